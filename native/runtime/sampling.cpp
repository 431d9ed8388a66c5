#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "logits.h"

namespace octavo {
namespace {

constexpr float INFINITE = std::numeric_limits<float>::infinity(),
                LARGEST = std::numeric_limits<float>::max();
constexpr float WEIGHTLESS = 88;  // temperatures below the largest logit: e^-88 is nothing

// A place in an order of tokens: by key, of equals by token.
struct Place {
  float key;
  int32_t token;
};
constexpr Place END{INFINITE, std::numeric_limits<int32_t>::max()};

bool before(Place a, Place b) { return (a.key < b.key) | ((a.key == b.key) & (a.token < b.token)); }

struct Candidate {
  Place place;
  float mass;
};

bool sooner(const Candidate& a, const Candidate& b) { return before(a.place, b.place); }

// Masses by key, in buckets of equal width; keys outside of [low, high] belong to the first and the
// last.
struct Buckets {
  static constexpr int COUNT = 1024;
  const float low, scale;  // 0: they cannot be told apart
  double sums[COUNT] = {};

  Buckets(float low, float high)
      : low(low),
        scale(high > low && COUNT / (high - low) <= LARGEST ? COUNT / (high - low) : 0) {}
  int of(float key) const {
    const float at = (key - low) * scale, most = at < COUNT - 1 ? at : COUNT - 1;
    return int(most > 0 ? most : 0);
  }
  // The first that reaches `least` together with those before it and `sum`, to which those are
  // added; else the last that has any mass.
  int reach(double least, double& sum) const {
    int last = 0;
    double others = sum;  // without the last
    for (int b = 0; b < COUNT && !(sum >= least); b++)
      if (sums[b] > 0) last = b, others = sum, sum += sums[b];
    sum = others;
    return last;
  }
};

// The first place at which `sum` and the masses up to there reach `least`, else the last. Few are
// sorted, the others fall into buckets.
Place reach(std::vector<Candidate>& c, double sum, double least) {
  constexpr size_t FEW = 256;
  while (c.size() > FEW) {
    const auto [low, high] = std::minmax_element(c.begin(), c.end(),
        [](const Candidate& a, const Candidate& b) { return a.place.key < b.place.key; });
    Buckets buckets(low->place.key, high->place.key);
    if (buckets.scale == 0) break;
    for (const Candidate& x : c) buckets.sums[buckets.of(x.place.key)] += double(x.mass);
    const int last = buckets.reach(least, sum);
    std::erase_if(c, [&](const Candidate& x) { return buckets.of(x.place.key) != last; });
  }
  if (!std::is_sorted(c.begin(), c.end(), sooner)) std::sort(c.begin(), c.end(), sooner);
  for (const Candidate& x : c)
    if ((sum += double(x.mass)) >= least) return x.place;
  return c.empty() ? END : c.back().place;
}

// The tokens that may be drawn: the likeliest up to some place, and of those the most typical up to
// another. Both places are found without sorting, in passes over the logits or over copies of those
// that are not too low.
class Running {
 public:
  Running(const Kernels& kernels, Logits& logits, float temperature)
      : kernels_(kernels),
        logits_(logits),
        max_(std::min(logits.max(), LARGEST)),
        temperature_(temperature),
        inverse_(1 / temperature),
        x_(logits.values()),
        count_(int(padded(size_t(logits.size())))),
        lowest_(max_ - WEIGHTLESS * temperature) {}

  // The k-th largest of the maxima of disjoint sets bounds the k-th best from below.
  void keep_best(int k) {
    int count;
    const float* first = logits_.maxima(count);
    if (k < count) {
      std::vector<float> maxima(first, first + count);
      std::nth_element(
          maxima.begin(), maxima.begin() + (k - 1), maxima.end(), std::greater<float>());
      gather(maxima[size_t(k - 1)], NAN);
    } else {
      for (int i = 0; i < count_; i++)
        lowest_ = x_[i] >= -LARGEST ? std::min(lowest_, x_[i]) : lowest_;
    }
    likely_ = find(k, true);
  }

  void keep_from(float least) {
    if (!ids_) gather(least, NAN);
    if (-least < likely_.key) likely_ = {-least, END.token};
  }

  // The likeliest that have `least` of the mass. Unless there are copies already, logits are copied
  // from the top down until they do.
  void keep_head(double least) {
    double mass = ids_ ? least : 0;
    float above = NAN;
    for (float width = 2; mass < least && above != -LARGEST; width += std::max(2.0f, width / 2)) {
      const float next = width > WEIGHTLESS ? -LARGEST : max_ - width * temperature_;
      mass += gather(next, above);
      above = next;
    }
    likely_ = find(least, false);
  }

  // Locally typical sampling (Meister et al., 2023): those whose information content is nearest to
  // the entropy, until they have `share` of the mass. A token x below the largest logit, in
  // temperatures, has information log Z + x; the entropy is log Z and the mean x.
  void keep_typical(double share) {
    double mass = 0, sum = 0;
    each_chunk(false, [&](int n, const int32_t*, const float* keys, const float* masses) {
      float information[CHUNK];
      for (int i = 0; i < n; i++)
        information[i] = masses[i] > 0 ? masses[i] * ((max_ + keys[i]) * inverse_) : 0;
      mass += sum_of(masses, n), sum += sum_of(information, n);
    });
    mean_ = float(sum / mass);
    by_distance_ = true;
    typical_ = find(share * mass, false);
  }

  double mass() {
    double mass = 0;
    each_chunk(false, [&](int n, const int32_t*, const float*, const float* masses) {
      mass += sum_of(masses, n);
    });
    return mass;
  }

  // By the inverse of the distribution, in order; NO_TOKEN if nothing is left.
  int32_t draw(double u) {
    // the first whose sum exceeds it
    const Place p = find(std::nextafter(u * mass(), double(INFINITE)), false);
    return p.key == INFINITE ? NO_TOKEN : p.token;
  }

  std::vector<Candidate> sorted() {
    std::vector<Candidate> all;
    each_chunk(true, [&](int n, const int32_t* ids, const float* keys, const float* masses) {
      for (int i = 0; i < n; i++) if (masses[i] > 0) all.push_back({{keys[i], ids[i]}, masses[i]});
    });
    std::sort(all.begin(), all.end(), sooner);
    return all;
  }

 private:
  static constexpr int CHUNK = 256;

  static double sum_of(const float* x, int n) {  // a multiple of 16
    float lanes[PANEL] = {};
    for (int i = 0; i < n; i += PANEL) for (int j = 0; j < PANEL; j++) lanes[j] += x[i + j];
    double sum = 0;
    for (float lane : lanes) sum += double(lane);
    return sum;
  }

  // Copies the tokens whose logits are `least` or more but not `above` or more (NaN: no such
  // bound), and gives their mass.
  double gather(float least, float above) {
    // room is taken as it is used
    if (!ids_) values_.reserve(size_t(2 * count_)), tokens_.reserve(size_t(2 * count_));
    const size_t from = values_.size();
    logits_.each_between(std::max(least, -LARGEST), above,
        [&](int32_t token, float x) { values_.push_back(x), tokens_.push_back(token); });
    values_.resize(padded(values_.size()), -INFINITE), tokens_.resize(values_.size());
    x_ = values_.data(), ids_ = tokens_.data(), count_ = int(values_.size()),
    lowest_ = std::max(least, max_ - WEIGHTLESS * temperature_);
    return kernels_.exp_sum(x_ + from, int(values_.size() - from), max_, inverse_, nullptr);
  }

  static size_t padded(size_t n) { return (n + PANEL - 1) / PANEL * PANEL; }

  // f(count, ids, keys, masses), chunk after chunk, 16 at a time. Keys are of the order that is
  // being cut; a token that is out has no mass, any other its part of the softmax, or one if they
  // are counted.
  template <class F> void each_chunk(bool counting, F&& f) {
    float keys[CHUNK], masses[CHUNK];
    int32_t ids[CHUNK];
    for (int at = 0; at < count_; at += CHUNK) {
      const int n = std::min(CHUNK, count_ - at);
      const float* x = x_ + at;
      if (counting) for (int i = 0; i < n; i++) masses[i] = x[i] >= -LARGEST ? 1 : 0;
      else kernels_.exp_sum(x, n, max_, inverse_, masses);
      for (int i = 0; i < n; i++) ids[i] = ids_ ? ids_[at + i] : at + i;
      for (int i = 0; i < n; i++) keys[i] = -x[i];
      leave(likely_, n, ids, keys, masses);
      if (by_distance_) {
        for (int i = 0; i < n; i++) keys[i] = std::abs((max_ - x[i]) * inverse_ - mean_);
        leave(typical_, n, ids, keys, masses);
      }
      f(n, ids, keys, masses);
    }
  }
  static void leave(Place last, int n, const int32_t* ids, const float* keys, float* masses) {
    if (last.key == INFINITE) return;
    for (int i = 0; i < n; i++) masses[i] = before(last, {keys[i], ids[i]}) ? 0 : masses[i];
  }

  // The first place, in order, at which the masses up to there reach `least`; the last token's if
  // they do not.
  Place find(double least, bool counting) {
    Buckets buckets = by_distance_
        ? Buckets(0, std::min(typical_.key, std::max(mean_, (max_ - lowest_) * inverse_ - mean_)))
        : Buckets(-max_, std::min(likely_.key, -lowest_));
    double sum = 0;
    int last = -1;
    if (count_ > 4 * CHUNK) {
      each_chunk(counting, [&](int n, const int32_t*, const float* keys, const float* masses) {
        int at[CHUNK];
        for (int i = 0; i < n; i++) at[i] = buckets.of(keys[i]);
        for (int i = 0; i < n; i++) buckets.sums[at[i]] += double(masses[i]);
      });
      last = buckets.reach(least, sum);
    }
    std::vector<Candidate> c;
    each_chunk(counting, [&](int n, const int32_t* ids, const float* keys, const float* masses) {
      int at[CHUNK];
      for (int i = 0; i < n; i++) at[i] = last < 0 ? last : buckets.of(keys[i]);
      for (int i = 0; i < n; i++)
        if (at[i] == last && masses[i] > 0) c.push_back({{keys[i], ids[i]}, masses[i]});
    });
    return reach(c, sum, least);
  }

  const Kernels& kernels_;
  Logits& logits_;
  const float max_, temperature_, inverse_;
  const float* x_;                // what is looked through: the row, or
  const int32_t* ids_ = nullptr;  // copies, with their tokens
  int count_;
  float lowest_;                  // of what has any mass
  std::vector<float> values_;
  std::vector<int32_t> tokens_;
  Place likely_ = END, typical_ = END;
  bool by_distance_ = false;
  float mean_ = 0;
};

bool limited(const SamplingRow& row, int vocabulary) {
  return row.top_k > 0 && row.top_k < vocabulary;
}

int32_t choose(const Kernels& kernels, Logits& l, const SamplingRow& row) {
  const float max = l.max(), inverse = 1 / row.temperature;
  if (max == -INFINITE) return NO_TOKEN;
  if (row.temperature <= 0 || inverse > LARGEST || max > LARGEST) return l.first(max);
  const double u = uniform(row.seed, row.position);
  const bool best = limited(row, l.size());
  if (!best && row.top_p >= 1 && row.min_p <= 0 && row.typical_p >= 1)
    return l.draw(max, inverse, u);
  Running running(kernels, l, row.temperature);
  if (best) running.keep_best(row.top_k);
  const double total = row.top_p >= 1 ? 0 : best ? running.mass() : l.total(max, inverse);
  if (row.min_p > 0) running.keep_from(max + std::log(row.min_p) * row.temperature);
  if (row.top_p < 1) running.keep_head(double(row.top_p) * total);
  if (row.typical_p < 1) running.keep_typical(double(row.typical_p));
  const int32_t token = running.draw(u);
  return token == NO_TOKEN ? 0 : token;  // every logit is NaN
}

// Takes the tokens that are not allowed out of the running.
void apply_mask(float* logits, int n, const uint32_t* mask) {
  for (int i = 0; i < n; i += 32) {
    const uint32_t bits = mask[i / 32];
    if (bits == ~0u) continue;
    for (int j = 0; j < 32 && i + j < n; j++)
      if (!(bits >> j & 1)) logits[i + j] = -std::numeric_limits<float>::infinity();
  }
}

void report(const Kernels& kernels, Logits& l, int count, float log_total, Sample& s) {
  if (count <= 0) return;
  Running running(kernels, l, 1);
  running.keep_best(count);
  for (const Candidate& x : running.sorted()) {
    s.top_tokens.push_back(x.place.token);
    s.top_logprobs.push_back(-x.place.key - log_total);
  }
}

}  // namespace

double uniform(uint64_t seed, uint64_t position) {
  uint32_t c[4] = {uint32_t(position), uint32_t(position >> 32), 0, 0},
           k[2] = {uint32_t(seed), uint32_t(seed >> 32)};
  for (int round = 0; round < 10; round++) {
    const uint64_t a = uint64_t(0xD2511F53u) * c[0], b = uint64_t(0xCD9E8D57u) * c[2];
    const uint32_t next[4] = {
        uint32_t(b >> 32) ^ c[1] ^ k[0], uint32_t(b), uint32_t(a >> 32) ^ c[3] ^ k[1], uint32_t(a)};
    std::copy(next, next + 4, c);
    k[0] += 0x9E3779B9u;
    k[1] += 0xBB67AE85u;
  }
  return double((uint64_t(c[0]) << 32 | c[1]) >> 11) * 0x1p-53;
}

bool wants_argmax(const SamplingRow& row) {
  return row.temperature <= 0 && row.target < 0 && row.logprobs < 0 && !row.mask &&
      !row.adjustment_count;
}

float summed_inverse(const SamplingRow& row, int vocabulary) {
  const bool changed = row.mask || row.adjustment_count,
             drawn = row.target < 0 && row.temperature > 0 && !limited(row, vocabulary);
  if (drawn && !changed) return 1.0f / row.temperature;
  return row.logprobs >= 0 ? 1.0f : 0.0f;
}

Sample sample(const Kernels& kernels, float* logits, float* statistics, bool measured, int n,
    const SamplingRow& row) {
  Logits l(kernels, logits, n, statistics);
  if (measured) l.trust(summed_inverse(row, n));
  Sample s{};
  float log_total = 0;
  if (row.logprobs >= 0) {
    const float max = l.max();
    log_total = max + float(std::log(l.total(max, 1.0f)));
    if (!row.legal) report(kernels, l, row.logprobs, log_total, s);
  }
  if (row.target >= 0) {
    s.token = row.target;
    s.logprob = logits[row.target] - log_total;
    return s;
  }
  if (row.mask || row.adjustment_count) l.forget();
  if (row.mask) apply_mask(logits, n, row.mask);
  std::vector<float> original;
  for (int i = 0; i < row.adjustment_count; i++) {
    const Adjustment& a = row.adjustments[i];
    float& x = logits[a.token];
    original.push_back(x);
    x = (x > 0 ? x / a.repetition : x * a.repetition) + a.add;
  }
  if (row.legal) report(kernels, l, row.logprobs, log_total, s);
  s.token = choose(kernels, l, row);
  for (int i = row.adjustment_count; i-- > 0;)
    logits[row.adjustments[i].token] = original[size_t(i)];
  if (row.logprobs >= 0 && s.token >= 0) s.logprob = logits[s.token] - log_total;
  return s;
}

}  // namespace octavo
