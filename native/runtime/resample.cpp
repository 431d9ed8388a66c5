#include "runtime/resample.h"

#include <algorithm>
#include <cstring>

namespace octavo {
namespace {

constexpr int FRACTION = 22, LOW_BITS = 12;
constexpr int SIGN = 0x80;  // flips a byte between counting from 0 and from -128
constexpr int TILE = 16;

size_t padded(size_t n) { return (n + 15) / 16 * 16; }

// Pixels by lines in pairs: value i of lines 2j and 2j + 1 lie side by side.
class Pairs {
 public:
  Pairs(int lines, size_t values)
      : stride(2 * padded(values)), data_((size_t(lines) + 1) / 2 * stride) {}
  int8_t* at(int line) { return data_.data() + size_t(line / 2) * stride + line % 2; }
  const int8_t* pair(int index) const { return data_.data() + size_t(index) * stride; }
  const size_t stride;

 private:
  std::vector<int8_t> data_;
};

// The lines of `taps` made of those of `from`; each is given to `take`.
template <class F> void pass(const Kernels& k, const Pairs& from, const Taps& taps, F&& take) {
  std::vector<int32_t> high(size_t(taps.width)), low(size_t(taps.width));
  std::vector<int8_t> line(from.stride / 2);
  for (int i = 0; i < taps.count; i++) {
    const int32_t* share = taps.shares + size_t(i) * size_t(taps.width);
    uint32_t total = 0;
    for (int j = 0; j < taps.pairs[i]; j++) {
      const int32_t a = share[2 * j], b = share[2 * j + 1], mask = (1 << LOW_BITS) - 1;
      high[size_t(j)] = int32_t(uint32_t(b >> LOW_BITS) << 16 | (uint32_t(a >> LOW_BITS) & 0xFFFF));
      low[size_t(j)] = (b & mask) << 16 | (a & mask);
      total += uint32_t(a) + uint32_t(b);
    }
    // values count from -128 on both sides, and halves are rounded up
    const uint32_t bias = SIGN * total + (1u << (FRACTION - 1)) - (uint32_t(SIGN) << FRACTION);
    k.resample(from.pair(taps.first[i]), from.stride, high.data(), low.data(), taps.pairs[i],
        int32_t(bias), int(line.size()), line.data());
    take(i, line.data());
  }
}

}  // namespace

void resample(const Kernels& k, const uint8_t* rgb, int height, int width, const Taps& x,
    const Taps& y, uint8_t* out) {
  Pairs columns(width, size_t(height) * 3);
  for (int top = 0; top < height; top += TILE)
    for (int c = 0; c < width; c++) {
      int8_t* to = columns.at(c) + size_t(top) * 6;
      const uint8_t* from = rgb + (size_t(top) * size_t(width) + size_t(c)) * 3;
      for (int r = std::min(TILE, height - top); r > 0; r--, from += size_t(width) * 3, to += 6)
        to[0] = int8_t(from[0] ^ SIGN), to[2] = int8_t(from[1] ^ SIGN),
        to[4] = int8_t(from[2] ^ SIGN);
    }
  Pairs rows(height, size_t(x.count) * 3);
  pass(k, columns, x, [&](int c, const int8_t* line) {
    for (int r = 0; r < height; r++, line += 3) {
      int8_t* to = rows.at(r) + size_t(c) * 6;
      to[0] = line[0], to[2] = line[1], to[4] = line[2];
    }
  });
  const size_t bytes = size_t(x.count) * 3;
  pass(k, rows, y, [&](int r, const int8_t* line) {
    uint8_t* to = out + size_t(r) * bytes;
    for (size_t i = 0; i < bytes; i++) to[i] = uint8_t(line[i]) ^ SIGN;
  });
}

}  // namespace octavo
