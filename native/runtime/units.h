// The unit of a row in fixed point (kernels/linear.inc): its weights are rounded to whole numbers
// of it.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "../kernels/api.h"

namespace octavo {

// How large a row's weights are, one by one and together.
class RowRange {
 public:
  // A group of codes that stand for scale * (code - MIDDLE) + middle.
  void add(const uint8_t* codes, size_t count, float scale, float middle) {
    float most = std::max(std::fabs(scale), std::fabs(middle)), sum = 0;
    for (size_t i = 0; i < count; i++) {
      const float w = std::fabs(scale * float(codes[i] - MIDDLE) + middle);
      most = std::max(most, w);
      sum += w;
    }
    largest_ = std::max(largest_, most);
    sum_ += double(sum);
    count_ += count;
    if (!std::isfinite(sum)) broken_ = true;
  }

  // The least unit with which every weight, rounded, is a high byte and a signed low one, and the
  // sum over features of weight times digit cannot leave 32 bits: |digit| <= 127, and with the
  // other digit's carry 128, so the weights' magnitudes may sum to 2^24. A rounded weight is off by
  // a half for its middle and up to four for its scale. Infinite where a weight is: what it is
  // multiplied with is then no number.
  float unit() const {
    if (broken_) return INFINITY;
    constexpr double ROUNDING = 5;
    const double room = double(1 << 24) - ROUNDING * double(count_);
    return float(
        std::max(double(largest_) / (127 * 256 + 127 - ROUNDING), sum_ / room) * (1 + 0x1p-20));
  }

 private:
  float largest_ = 0;
  double sum_ = 0;
  size_t count_ = 0;
  bool broken_ = false;
};

}  // namespace octavo
