// A row of logits, and what is known of its sets of 256 tokens: maxima, and sums of exponentials at
// one temperature. The head measures a set while it is in the core's cache; what it left out, or
// has changed since, is measured when asked for. Both ways give the same bits, since sets are fixed
// and are added in their order.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "../kernels/api.h"

namespace octavo {

constexpr int SET_PANELS = 16, SET_TOKENS = SET_PANELS * PANEL;
inline int set_count(int vocabulary) { return (vocabulary + SET_TOKENS - 1) / SET_TOKENS; }

class Logits {
 public:
  // Floats of the statistics of a row: [set][PANEL] maxima of tokens 16 apart, then [set] sums of
  // e^((x - the set's maximum) * inverse), where inverse is that of a temperature.
  static size_t statistics_floats(int vocabulary) {
    return size_t(set_count(vocabulary)) * (PANEL + 1);
  }

  // `values` have room for a multiple of 16.
  Logits(const Kernels& kernels, float* values, int vocabulary, float* statistics);

  void measure(int set, float inverse);  // its maxima, and its sum unless `inverse` is 0
  void trust(float inverse);             // every set has been measured with it
  void forget() { measured_ = summed_ = false; }  // values have changed

  int size() const { return n_; }
  float max();
  int first(float max);                                   // of the values that are `max`
  // of sets of tokens that have none in common
  const float* maxima(int& count);
  const float* values() const { return values_; }
  // take(token, value) of the values that are `least` or more but not `above` or more, in order of
  // token
  template <class F> void each_between(float least, float above, F&& take);
  double total(float max, float inverse);                 // sum of e^((x - max) * inverse)
  // from that distribution over all tokens, in order of id, by its inverse
  int32_t draw(float max, float inverse, double u);

 private:
  float* peaks(int set) { return statistics_ + set * PANEL; }
  float& sum(int set) { return statistics_[sets_ * PANEL + set]; }
  float set_max(int set) { return kernels_.row_max(peaks(set), PANEL); }
  int set_size(int set) const;
  void find_maxima();
  std::vector<float> shares(float max, float inverse);    // the sets' parts of the total

  const Kernels& kernels_;
  float *values_, *statistics_;
  int n_, sets_;
  bool measured_ = false, summed_ = false;  // all maxima; all sums, with
  float inverse_ = 0;
};

template <class F> void Logits::each_between(float least, float above, F&& take) {
  find_maxima();
  for (int set = 0; set < sets_; set++) {
    if (!(set_max(set) >= least)) continue;
    const float* x = values_ + set * SET_TOKENS;
    // without a branch for each value: whether it is taken may be anybody's guess
    uint8_t taken[SET_TOKENS];
    int count = 0;
    for (int i = 0, n = std::min(SET_TOKENS, n_ - set * SET_TOKENS); i < n; i++) {
      taken[count] = uint8_t(i);
      count += (x[i] >= least) & !(x[i] >= above);
    }
    for (int i = 0; i < count; i++) take(set * SET_TOKENS + taken[i], x[taken[i]]);
  }
}

}  // namespace octavo
