#include "pack_grouped.h"

#include <algorithm>
#include <cstring>

namespace octavo {

void put_unit(uint8_t* panel, size_t bytes, int lane, const RowRange& range) {
  const float unit = range.unit();
  memcpy(panel + bytes - SCALE_LINE + size_t(lane) * sizeof(float), &unit, sizeof(float));
}

bool has_minimum(Format f) { return f == CODE4_MIN || f == CODE8_MIN; }

size_t scale_lines(int group, size_t cols) { return (cols + size_t(group) - 1) / size_t(group); }

namespace {

// offsets in a panel, whose scales come first
struct GroupedLayout { size_t minima, values, codes; };

GroupedLayout grouped_layout(Format f, int group, size_t cols) {
  const size_t scales = scale_lines(group, padded_cols(cols)) * SCALE_LINE;
  return {scales, scales, scales * (has_minimum(f) ? 2 : 1) + (f == TABLE4 ? SCALE_LINE : 0)};
}

size_t code_bytes(Format f, size_t k) {
  return f == FP8 ? k * 16 : f == CODE8 || f == CODE8_MIN ? k * 16 : k * 8;
}

void put_code(Format f, uint8_t* codes, size_t i, int lane, uint8_t q) {
  if (f == FP8) codes[i * 16 + size_t(lane)] = q;
  else if (f == TABLE4) codes[i / 2 * 16 + size_t(lane)] |= uint8_t(i % 2 ? q << 4 : q);
  else if (f == CODE8 || f == CODE8_MIN) codes[i / 4 * 64 + size_t(lane) * 4 + i % 4] = q;
  else
    codes[i / 32 * 256 + i % 16 / 4 * 64 + size_t(lane) * 4 + i % 4] |=
        uint8_t(i % 32 < 16 ? q : q << 4);
}

uint8_t get_grouped(Format f, const uint8_t* codes, size_t i, int lane) {
  if (f == FP8) return codes[i * 16 + size_t(lane)];
  if (f == TABLE4)
    return uint8_t(
        i % 2 ? codes[i / 2 * 16 + size_t(lane)] >> 4 : codes[i / 2 * 16 + size_t(lane)] & 15);
  if (f == CODE8 || f == CODE8_MIN) return codes[i / 4 * 64 + size_t(lane) * 4 + i % 4];
  const uint8_t byte = codes[i / 32 * 256 + i % 16 / 4 * 64 + size_t(lane) * 4 + i % 4];
  return uint8_t(i % 32 < 16 ? byte & 15 : byte >> 4);
}

float float_at(const uint8_t* p) {
  float f;
  memcpy(&f, p, 4);
  return f;
}

float e4m3(uint8_t code) {
  const uint32_t bits = uint32_t(code & 128) << 24 | uint32_t(code & 127) << 20;
  float f;
  memcpy(&f, &bits, 4);
  return f * 0x1p120f;
}

}  // namespace

size_t grouped_bytes(Format f, int group, size_t cols) {
  return grouped_layout(f, group, cols).codes + code_bytes(f, padded_cols(cols));
}

void pack_grouped(Storage s, Format f, const uint8_t* data, size_t rows, size_t cols, size_t panel,
    uint8_t* out) {
  const GroupedLayout l = grouped_layout(f, s.group, cols);
  const size_t groups = scale_lines(s.group, cols);
  const uint8_t *scales = data + rows * cols, *more = scales + rows * groups * sizeof(float);
  if (f == TABLE4) memcpy(out + l.values, more, SCALE_LINE);
  for (int lane = 0; lane < PANEL && panel * PANEL + size_t(lane) < rows; lane++) {
    const size_t row = panel * PANEL + size_t(lane);
    for (size_t g = 0; g < groups; g++) {
      memcpy(out + g * SCALE_LINE + size_t(lane) * 4, scales + (row * groups + g) * 4, 4);
      if (has_minimum(f))
        memcpy(
            out + l.minima + g * SCALE_LINE + size_t(lane) * 4, more + (row * groups + g) * 4, 4);
    }
    for (size_t i = 0; i < cols; i++) put_code(f, out + l.codes, i, lane, data[row * cols + i]);
    if (!is_fixed(f)) continue;
    RowRange range;
    for (size_t g = 0, i = 0; g < groups; g++, i += size_t(s.group)) {
      const float scale = float_at(scales + (row * groups + g) * 4);
      const float middle =
          has_minimum(f) ? float_at(more + (row * groups + g) * 4) + MIDDLE * scale : 0;
      range.add(data + row * cols + i, std::min(cols - i, size_t(s.group)), scale, middle);
    }
    put_unit(out, panel_bytes(f, s.group, cols), lane, range);
  }
}

void unpack_grouped(Format f, int group, const uint8_t* panel, int lane, size_t cols, float* out) {
  const GroupedLayout l = grouped_layout(f, group, cols);
  const float *scales = reinterpret_cast<const float*>(panel) + lane,
              *minima = reinterpret_cast<const float*>(panel + l.minima) + lane;
  const float* values = reinterpret_cast<const float*>(panel + l.values);
  for (size_t i = 0; i < cols; i++) {
    const size_t g = i / size_t(group) * PANEL;
    const uint8_t q = get_grouped(f, panel + l.codes, i, lane);
    if (f == FP8) out[i] = scales[g] * e4m3(q);
    else if (f == TABLE4) out[i] = scales[g] * values[q];
    else out[i] = scales[g] * float(q - ZERO_POINT[f]) + (has_minimum(f) ? minima[g] : 0);
  }
}

}  // namespace octavo
