#include "pictures.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace octavo {
namespace {

constexpr double PI = 3.14159265358979323846;

double sinc(double x) { return x == 0 ? 1 : std::sin(x * PI) / (x * PI); }

// Filters as https://pillow.readthedocs.io has them, in the arithmetic of its Resample.c: weights
// are rounded, and other orders of the same operations could round otherwise.
double weight(Filter filter, double x) {
  if (filter == BOX) return x > -0.5 && x <= 0.5 ? 1 : 0;
  if (filter == LANCZOS) return -3 <= x && x < 3 ? sinc(x) * sinc(x / 3) : 0;
  x = std::fabs(x);
  if (filter == BILINEAR) return x < 1 ? 1 - x : 0;
  if (filter == BICUBIC) {
    constexpr double a = -0.5;
    if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
    return x < 2 ? (((x - 5) * x + 8) * x - 4) * a : 0;
  }
  if (x == 0) return 1;  // HAMMING
  return x < 1 ? std::sin(x * PI) / (x * PI) * (0.54f + 0.46f * std::cos(x * PI)) : 0;
}

double support(Filter filter) {
  switch (filter) {
    case LANCZOS: return 3;
    case BICUBIC: return 2;
    case BILINEAR:
    case HAMMING: return 1;
    case BOX: return 0.5;
  }
  throw std::invalid_argument("no such filter");
}

// What makes `to` values of `from`. Pillow has the length of a side in fp32.
struct Axis {
  std::vector<int32_t> first, count, weights;
  int stride;

  Axis(Filter filter, size_t from, size_t to)
      : first(to), count(to) {
    const double scale = double(float(from)) / double(to), wide = scale < 1 ? 1 : scale,
                 reach = support(filter) * wide, inverse = 1 / wide;
    stride = (int(std::ceil(reach)) * 2 + 1 + 3) / 4 * 4;
    weights.resize(to * size_t(stride));
    std::vector<double> line(static_cast<size_t>(stride));
    for (size_t i = 0; i < to; i++) {
      const double center = (double(i) + 0.5) * scale;
      const int low = std::max(0, int(center - reach + 0.5)),
                n = std::min(int(from), int(center + reach + 0.5)) - low;
      double sum = 0;
      for (int t = 0; t < n; t++)
        sum += line[size_t(t)] = weight(filter, (t + low - center + 0.5) * inverse);
      first[i] = low, count[i] = n;
      for (int t = 0; t < n; t++) {
        const double part = sum != 0 ? line[size_t(t)] / sum : line[size_t(t)];
        const double scaled = part * (1 << WEIGHT_BITS);
        weights[i * size_t(stride) + size_t(t)] = int32_t(part < 0 ? scaled - 0.5 : scaled + 0.5);
      }
    }
  }
  Taps taps() const {
    return {int(first.size()), stride, first.data(), count.data(), weights.data()};
  }
};

// Rows of `in` become rows of another width, RESIZED_ROWS at a time.
void across(
    const Kernels& kernels, const uint8_t* in, Picture from, uint8_t* out, const Axis& axis) {
  const Taps taps = axis.taps();
  const size_t bytes = 3 * from.width, wanted = 3 * size_t(taps.size), end = from.height * bytes;
  // Rows are read beyond their end: those at the end of the picture are read from here.
  std::vector<uint8_t> ends(RESIZED_ROWS * (bytes + READ_BEYOND));
  for (size_t y = 0; y < from.height; y += RESIZED_ROWS) {
    const uint8_t* rows[RESIZED_ROWS];
    uint8_t* made[RESIZED_ROWS];
    for (size_t r = 0; r < RESIZED_ROWS; r++) {
      const size_t row = std::min(y + r, from.height - 1);
      rows[r] = in + row * bytes, made[r] = out + row * wanted;
      if ((row + 1) * bytes + READ_BEYOND <= end) continue;
      uint8_t* copy = &ends[r * (bytes + READ_BEYOND)];
      memcpy(copy, rows[r], bytes);
      rows[r] = copy;
    }
    kernels.resize_across(rows, taps, made);
  }
}

void down(const Kernels& kernels, const uint8_t* in, Picture from, uint8_t* out, const Axis& axis) {
  const size_t bytes = 3 * from.width;
  for (size_t y = 0; y < axis.first.size(); y++)
    kernels.resize_down(in + size_t(axis.first[y]) * bytes, bytes,
        &axis.weights[y * size_t(axis.stride)], axis.count[y], bytes, out + y * bytes);
}

}  // namespace

void pack_pixels(const uint8_t* in, size_t pixels, uint8_t* out) {
  if (!pixels) return;
  // Four bytes are written, the last of which the next pixel writes again.
  for (size_t i = 0; i + 1 < pixels; i++) memcpy(out + 3 * i, in + 4 * i, 4);
  memcpy(out + 3 * (pixels - 1), in + 4 * (pixels - 1), 3);
}

void resize(const Kernels& kernels, const uint8_t* in, Picture from, uint8_t* out, Picture to,
    Filter filter) {
  if (!from.height || !from.width || !to.height || !to.width)
    throw std::invalid_argument("a picture without pixels");
  const bool wider = from.width != to.width, higher = from.height != to.height;
  if (!wider && !higher) {
    support(filter);
    memcpy(out, in, 3 * to.height * to.width);
    return;
  }
  if (!wider) return down(kernels, in, from, out, Axis(filter, from.height, to.height));
  const Axis columns(filter, from.width, to.width);
  if (!higher) return across(kernels, in, from, out, columns);
  const Axis rows(filter, from.height, to.height);
  // Pillow begins with the height where that shrinks by over twice as many pixels as the width.
  const int64_t lower = int64_t(from.height) - int64_t(to.height),
                narrower = int64_t(from.width) - int64_t(to.width);
  const bool first_down = lower > 0 && lower > 2 * narrower;
  const Picture between = first_down ? Picture{to.height, from.width}
                                     : Picture{from.height, to.width};
  std::vector<uint8_t> made(3 * between.height * between.width);
  if (first_down) {
    down(kernels, in, from, made.data(), rows);
    across(kernels, made.data(), between, out, columns);
  } else {
    across(kernels, in, from, made.data(), columns);
    down(kernels, made.data(), between, out, rows);
  }
}

void cut(const Patches& p, const int32_t* first, size_t count, float* out) {
  const size_t side = size_t(p.side), frames = size_t(p.frames), line = 3 * p.width,
               row = 3 * frames * side * side;
  for (size_t i = 0; i < count; i++, out += row) {
    if (first[i] < 0) {
      memset(out, 0, row * sizeof(float));
      continue;
    }
    for (size_t f = 0; f < frames; f++)
      for (size_t y = 0; y < side; y++) {
        const uint8_t* from = p.pixels + 3 * size_t(first[i]) + (f * p.apart + y) * line;
        for (size_t c = 0; c < 3; c++) {
          float* to = out + ((c * frames + f) * side + y) * side;
          const float* values = p.values + 256 * c;
          for (size_t x = 0; x < side; x++) to[x] = values[from[3 * x + c]];
        }
      }
  }
}

}  // namespace octavo
