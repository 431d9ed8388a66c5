#include "logits.h"

#include <limits>

namespace octavo {

constexpr float LEAST = -std::numeric_limits<float>::infinity();

Logits::Logits(const Kernels& kernels, float* values, int vocabulary, float* statistics)
    : kernels_(kernels),
      values_(values),
      statistics_(statistics),
      n_(vocabulary),
      sets_(set_count(vocabulary)) {}

int Logits::set_size(int set) const {
  return (std::min(SET_TOKENS, n_ - set * SET_TOKENS) + PANEL - 1) / PANEL * PANEL;
}

void Logits::measure(int set, float inverse) {
  float* x = values_ + set * SET_TOKENS;
  if (set + 1 == sets_) std::fill(values_ + n_, x + set_size(set), LEAST);  // no tokens
  kernels_.peaks(x, set_size(set), peaks(set));
  if (inverse == 0) return;
  const float max = set_max(set);
  sum(set) = max == LEAST ? 0 : float(kernels_.exp_sum(x, set_size(set), max, inverse, nullptr));
}

void Logits::trust(float inverse) {
  measured_ = true, summed_ = inverse != 0;
  inverse_ = inverse;
}

void Logits::find_maxima() {
  if (measured_) return;
  for (int set = 0; set < sets_; set++) measure(set, 0);
  measured_ = true;
}

float Logits::max() {
  find_maxima();
  return kernels_.row_max(peaks(0), sets_ * PANEL);
}

int Logits::first(float max) {
  find_maxima();
  int set = 0;
  while (set + 1 < sets_ && set_max(set) != max) set++;
  for (int i = set * SET_TOKENS; i < n_; i++) if (values_[i] == max) return i;
  return 0;  // every logit is NaN
}

const float* Logits::maxima(int& count) {
  find_maxima();
  count = sets_ * PANEL;
  return peaks(0);
}

std::vector<float> Logits::shares(float max, float inverse) {
  if (!summed_ || inverse_ != inverse) {
    for (int set = 0; set < sets_; set++) measure(set, inverse);
    trust(inverse);
  }
  std::vector<float> out(size_t(sets_ + PANEL - 1) / PANEL * PANEL, LEAST);
  for (int set = 0; set < sets_; set++) out[size_t(set)] = set_max(set);
  kernels_.exp_sum(out.data(), int(out.size()), max, inverse, out.data());
  for (int set = 0; set < sets_; set++) out[size_t(set)] *= sum(set);
  return out;
}

double Logits::total(float max, float inverse) {
  double total = 0;
  for (float share : shares(max, inverse)) total += double(share);
  return total;
}

int32_t Logits::draw(float max, float inverse, double u) {
  const std::vector<float> parts = shares(max, inverse);
  double target = 0;
  for (float part : parts) target += double(part);
  target *= u;
  int set = -1;
  for (int i = 0; i < sets_; i++) {
    if (!(parts[size_t(i)] > 0)) continue;
    set = i;
    if (target < double(parts[size_t(i)])) break;
    target -= double(parts[size_t(i)]);
  }
  if (set < 0) return 0;  // every logit is NaN
  float p[SET_TOKENS];
  kernels_.exp_sum(values_ + set * SET_TOKENS, set_size(set), set_max(set), inverse, p);
  target *= double(sum(set)) / double(parts[size_t(set)]);
  int32_t last = 0;
  for (int i = 0; i < std::min(SET_TOKENS, n_ - set * SET_TOKENS); i++) {
    if (!(p[i] > 0)) continue;
    last = set * SET_TOKENS + i;
    if (target < double(p[i])) break;
    target -= double(p[i]);
  }
  return last;
}

}  // namespace octavo
