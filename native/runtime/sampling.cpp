#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "logits.h"

namespace octavo {
namespace {

struct Candidate { float logit; int32_t token; };

bool better(const Candidate& a, const Candidate& b) {  // a total order: ties go to the lower token
  return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
}

// The k best, sorted. The k-th largest of the maxima of disjoint sets bounds the k-th best from below.
void top_candidates(Logits& l, int k, std::vector<Candidate>& out) {
  int count;
  const float* first = l.maxima(count);
  std::vector<float> maxima(first, first + count);
  float threshold = -std::numeric_limits<float>::infinity();
  if (k < count) {
    std::nth_element(maxima.begin(), maxima.begin() + (k - 1), maxima.end(), std::greater<float>());
    threshold = maxima[size_t(k - 1)];
  }
  out.clear();
  l.each_from(threshold, [&](int32_t token, float logit) { out.push_back({logit, token}); });
  k = std::min(k, int(out.size()));
  std::partial_sort(out.begin(), out.begin() + k, out.end(), better);
  out.resize(size_t(k));
}

// What top_p and typical_p leave of sorted candidates, with their weights.
struct Kept {
  std::vector<int32_t> tokens;
  std::vector<double> weights;
  double mass = 0;
};

Kept nucleus(const std::vector<Candidate>& c, const SamplingRow& row, double total, float max) {
  Kept k;
  for (const Candidate& x : c) {
    k.tokens.push_back(x.token);
    k.weights.push_back(std::exp(double(x.logit - max) / double(row.temperature)));
    k.mass += k.weights.back();
    if (row.top_p < 1 && k.mass >= double(row.top_p) * total) break;
  }
  return k;
}

// Locally typical sampling (Meister et al., 2023): the tokens whose information content is nearest to
// the entropy, until they hold typical_p of the mass.
Kept typical(const Kept& from, double share) {
  const size_t n = from.tokens.size();
  std::vector<double> information(n);
  double entropy = 0;
  for (size_t i = 0; i < n; i++) {
    const double p = from.weights[i] / from.mass;
    information[i] = p > 0 ? -std::log(p) : std::numeric_limits<double>::infinity();
    if (p > 0) entropy += p * information[i];
  }
  std::vector<size_t> order(n);
  for (size_t i = 0; i < n; i++) order[i] = i;
  auto distance = [&](size_t i) { return std::abs(information[i] - entropy); };
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return distance(a) != distance(b) ? distance(a) < distance(b) : a < b; });
  Kept k;
  for (size_t i : order) {
    k.tokens.push_back(from.tokens[i]);
    k.weights.push_back(from.weights[i]);
    k.mass += from.weights[i];
    if (k.mass >= share * from.mass) break;
  }
  return k;
}

int32_t draw(const Kept& k, double u) {
  double target = u * k.mass;
  for (size_t i = 0; i + 1 < k.tokens.size(); i++) {
    if (target < k.weights[i]) return k.tokens[i];
    target -= k.weights[i];
  }
  return k.tokens.back();
}

bool limited(const SamplingRow& row, int vocabulary) { return row.top_k > 0 && row.top_k < vocabulary; }

// The candidates worth sorting: the top_k best, or the head of the distribution that holds top_p of its mass.
double candidates(Logits& l, const SamplingRow& row, float max, float floor, std::vector<Candidate>& c) {
  const double temperature = double(row.temperature);
  double total = 0;
  if (limited(row, l.size())) {
    top_candidates(l, row.top_k, c);
    for (const Candidate& x : c) total += std::exp(double(x.logit - max) / temperature);
    return total;
  }
  const float lowest = std::numeric_limits<float>::lowest();  // what is -inf is no candidate
  total = l.total(max, 1.0f / row.temperature);
  double mass = 0;
  float above = std::numeric_limits<float>::quiet_NaN();  // where the last round ended: nothing is above it yet
  for (float cut = 2;; cut += std::max(2.0f, cut / 2)) {
    float threshold = max - cut * row.temperature;
    if (cut > 200 || (row.top_p >= 1 && threshold < floor)) threshold = row.top_p >= 1 ? floor : lowest;
    threshold = std::max(threshold, lowest);
    l.each_from(threshold, [&](int32_t token, float logit) {
      if (logit >= above) return;
      c.push_back({logit, token});
      mass += std::exp(double(logit - max) / temperature);
    });
    if (cut > 200 || threshold <= floor || mass >= double(row.top_p) * total) break;
    above = threshold;
  }
  std::sort(c.begin(), c.end(), better);
  return total;
}

int32_t choose(Logits& l, const SamplingRow& row) {
  const float max = l.max();
  if (max == -std::numeric_limits<float>::infinity()) return NO_TOKEN;
  if (row.temperature <= 0) return l.first(max);
  const float floor = row.min_p > 0 ? max + std::log(row.min_p) * row.temperature : -std::numeric_limits<float>::infinity();
  const double u = uniform(row.seed, row.position);
  if (!limited(row, l.size()) && row.top_p >= 1 && row.min_p <= 0 && row.typical_p >= 1) return l.draw(max, 1.0f / row.temperature, u);
  std::vector<Candidate> c;
  const double total = candidates(l, row, max, floor, c);
  while (c.size() > 1 && c.back().logit < floor) c.pop_back();
  if (c.empty()) return 0;  // every logit is NaN
  const Kept kept = nucleus(c, row, total, max);
  return draw(row.typical_p < 1 ? typical(kept, double(row.typical_p)) : kept, u);
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

void report(Logits& l, int count, float log_total, Sample& s) {
  std::vector<Candidate> top;
  if (count > 0) top_candidates(l, count, top);
  for (const Candidate& x : top) {
    if (x.logit == -std::numeric_limits<float>::infinity()) break;
    s.top_tokens.push_back(x.token);
    s.top_logprobs.push_back(x.logit - log_total);
  }
}

}  // namespace

double uniform(uint64_t seed, uint64_t position) {
  uint32_t c[4] = {uint32_t(position), uint32_t(position >> 32), 0, 0}, k[2] = {uint32_t(seed), uint32_t(seed >> 32)};
  for (int round = 0; round < 10; round++) {
    const uint64_t a = uint64_t(0xD2511F53u) * c[0], b = uint64_t(0xCD9E8D57u) * c[2];
    const uint32_t next[4] = {uint32_t(b >> 32) ^ c[1] ^ k[0], uint32_t(b), uint32_t(a >> 32) ^ c[3] ^ k[1], uint32_t(a)};
    std::copy(next, next + 4, c);
    k[0] += 0x9E3779B9u;
    k[1] += 0xBB67AE85u;
  }
  return double((uint64_t(c[0]) << 32 | c[1]) >> 11) * 0x1p-53;
}

float summed_inverse(const SamplingRow& row, int vocabulary) {
  const bool changed = row.mask || row.adjustment_count, drawn = row.target < 0 && row.temperature > 0 && !limited(row, vocabulary);
  if (drawn && !changed) return 1.0f / row.temperature;
  return row.logprobs >= 0 ? 1.0f : 0.0f;
}

Sample sample(const Kernels& kernels, float* logits, float* statistics, bool measured, int n, const SamplingRow& row) {
  Logits l(kernels, logits, n, statistics);
  if (measured) l.trust(summed_inverse(row, n));
  Sample s{};
  float log_total = 0;
  if (row.logprobs >= 0) {
    const float max = l.max();
    log_total = max + float(std::log(l.total(max, 1.0f)));
    if (!row.legal) report(l, row.logprobs, log_total, s);
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
  if (row.legal) report(l, row.logprobs, log_total, s);
  s.token = choose(l, row);
  for (int i = row.adjustment_count; i-- > 0;) logits[row.adjustments[i].token] = original[size_t(i)];
  if (row.logprobs >= 0 && s.token >= 0) s.logprob = logits[s.token] - log_total;
  return s;
}

}  // namespace octavo
