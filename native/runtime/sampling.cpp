#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace octavo {
namespace {

struct Candidate { float logit; int32_t token; };

bool better(const Candidate& a, const Candidate& b) {  // a total order: ties go to the lower token
  return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
}

void collect(const float* logits, int n, float threshold, std::vector<Candidate>& out) {
  out.clear();
  for (int i = 0; i < n; i++) if (logits[i] >= threshold) out.push_back({logits[i], i});
}

// The k best, sorted. The k-th largest of the maxima of 64-token blocks bounds the k-th best from below.
void top_candidates(const Kernels& kernels, const float* logits, int n, int padded, int k, std::vector<Candidate>& out) {
  std::vector<float> maxima;
  for (int i = 0; i < padded; i += 64) maxima.push_back(kernels.row_max(logits + i, std::min(64, padded - i)));
  float threshold = -std::numeric_limits<float>::infinity();
  if (k < int(maxima.size())) {
    std::nth_element(maxima.begin(), maxima.begin() + (k - 1), maxima.end(), std::greater<float>());
    threshold = maxima[size_t(k - 1)];
  }
  collect(logits, n, threshold, out);
  k = std::min(k, int(out.size()));
  std::partial_sort(out.begin(), out.begin() + k, out.end(), better);
  out.resize(size_t(k));
}

int argmax(const Kernels& kernels, const float* logits, int n, int padded) {
  const float max = kernels.row_max(logits, padded);
  for (int i = 0; i < n; i++) if (logits[i] == max) return i;
  return 0;  // every logit is NaN
}

// Draws by inverse cumulative distribution over all tokens in id order.
int32_t draw_all(const float* p, int n, double u) {
  constexpr int BLOCK_TOKENS = 256;
  std::vector<double> sums;
  double total = 0;
  for (int i = 0; i < n; i += BLOCK_TOKENS) {
    double s = 0;
    for (int j = i; j < std::min(n, i + BLOCK_TOKENS); j++) s += double(p[j]);
    sums.push_back(s);
    total += s;
  }
  double target = u * total;
  size_t block = 0;
  while (block + 1 < sums.size() && target >= sums[block]) target -= sums[block++];
  int32_t last = 0;
  for (int j = int(block) * BLOCK_TOKENS; j < n; j++) {
    if (p[j] <= 0) continue;
    last = j;
    if (target < double(p[j])) return j;
    target -= double(p[j]);
  }
  return last;
}

int32_t draw(const std::vector<Candidate>& c, const SamplingRow& row, double total, float max) {
  std::vector<double> p;
  double mass = 0;
  for (const Candidate& x : c) {
    p.push_back(std::exp(double(x.logit - max) / double(row.temperature)));
    mass += p.back();
    if (row.top_p < 1 && mass >= double(row.top_p) * total) break;
  }
  double target = uniform(row.seed, row.position) * mass;
  for (size_t i = 0; i + 1 < p.size(); i++) {
    if (target < p[i]) return c[i].token;
    target -= p[i];
  }
  return c[p.size() - 1].token;
}

int32_t choose(const Kernels& kernels, const float* logits, int n, int padded, const SamplingRow& row, float* scratch) {
  if (row.temperature <= 0) return argmax(kernels, logits, n, padded);
  const float max = kernels.row_max(logits, padded), inverse = 1.0f / row.temperature;
  const float floor = row.min_p > 0 ? max + std::log(row.min_p) * row.temperature : -std::numeric_limits<float>::infinity();
  const bool limited = row.top_k > 0 && row.top_k < n;
  if (!limited && row.top_p >= 1 && row.min_p <= 0) {
    kernels.exp_sum(logits, padded, max, inverse, scratch);
    return draw_all(scratch, n, uniform(row.seed, row.position));
  }
  std::vector<Candidate> c;
  double total = 0;
  if (limited) {
    top_candidates(kernels, logits, n, padded, row.top_k, c);
    for (const Candidate& x : c) total += std::exp(double(x.logit - max) / double(row.temperature));
  } else {
    // Only the head of the distribution needs sorting; lower the cut until it holds top_p of the mass.
    total = kernels.exp_sum(logits, padded, max, inverse, scratch);
    for (float cut = 7.0f;; cut *= 2) {
      float threshold = max - cut * row.temperature;
      if (cut > 200 || (row.top_p >= 1 && threshold < floor)) threshold = row.top_p >= 1 ? floor : -std::numeric_limits<float>::infinity();
      collect(logits, n, threshold, c);
      double mass = 0;
      for (const Candidate& x : c) mass += std::exp(double(x.logit - max) / double(row.temperature));
      if (cut > 200 || threshold <= floor || mass >= double(row.top_p) * total) break;
    }
    std::sort(c.begin(), c.end(), better);
  }
  while (c.size() > 1 && c.back().logit < floor) c.pop_back();
  return c.empty() ? 0 : draw(c, row, total, max);
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

Sample sample(const Kernels& kernels, float* logits, int n, const SamplingRow& row, float* scratch) {
  const int padded = (n + 15) / 16 * 16;
  for (int i = n; i < padded; i++) logits[i] = -std::numeric_limits<float>::infinity();
  Sample s{};
  float log_total = 0;
  if (row.logprobs >= 0) {
    const float max = kernels.row_max(logits, padded);
    log_total = max + float(std::log(kernels.exp_sum(logits, padded, max, 1.0f, nullptr)));
    std::vector<Candidate> top;
    if (row.logprobs > 0) top_candidates(kernels, logits, n, padded, row.logprobs, top);
    for (const Candidate& x : top) {
      s.top_tokens.push_back(x.token);
      s.top_logprobs.push_back(x.logit - log_total);
    }
  }
  std::vector<float> original;
  for (int i = 0; i < row.adjustment_count; i++) {
    const Adjustment& a = row.adjustments[i];
    float& l = logits[a.token];
    original.push_back(l);
    l = (l > 0 ? l / a.repetition : l * a.repetition) + a.add;
  }
  s.token = choose(kernels, logits, n, padded, row, scratch);
  for (int i = row.adjustment_count; i-- > 0;) logits[row.adjustments[i].token] = original[size_t(i)];
  if (row.logprobs >= 0) s.logprob = logits[s.token] - log_total;
  return s;
}

}  // namespace octavo
