#include "pack.h"

#include <cmath>
#include <cstring>
#include <stdexcept>

#include "pack_grouped.h"
#include "units.h"

// Panel layouts (lane r = row r of 16; a line is 64 bytes = 16 rows x 4 features):
//   32-blocks, tile of 64 features:  d[2][16] f16, (m[2][16] f16), (fifth bits: 2 x 8 u64), lines.
//     A nibble line s of a group holds features 4s..4s+3 low and 16+4s..16+4s+3 high; Q8_0 has one
//     line per 4 features, stored as q + 128.
//     MXFP4 has exponents [2][16] u8 in place of d.
//   K-quants, tile of 256 features:  d[16], dmin[16] f16, scales [8][16] and minima [8][16] u8
//     (Q2_K: [16][16] with scales in low and minima in high nibbles; Q3_K, Q6_K: signed scales
//     [16][16]), (fifth bits: 8 x 64 bytes), (8 x 4 nibble lines), (Q2_K, Q3_K, Q6_K: 8 x 2 lines
//     of two bits a code), (Q3_K: 8 lines of one bit a code). Two-bit line h of a group holds
//     features 16h + 4s..16h + 4s + 3 in bits 2s, 2s + 1; a one-bit line 4s..4s + 3 in bit s.
//   CODE4, CODE8: scales [groups][16] f32, (minima likewise), then the lines of Q4_0 or Q8_0 for
//     each 32 features.
//   TABLE4: scales, values [16] f32, 16 rows of two features after another.
//   FP8: scales, 16 rows of one feature after another.
//   Formats in fixed point end with the rows' units [16] f32.
//   BF16: lines of 16 rows x 2 features; F16 and F32: 16 rows of one feature after another.

namespace octavo {
namespace {

// elements, bytes, ... offsets of each part; -1: absent
struct Layout { int block, source, tile_k, tile, minimum, fifth, lines, pairs, thirds; };

const Layout& layout(Format f) {
  static const Layout table[] = {
      {32, 18, 64, 576, -1, -1, 64, -1, -1},         // Q4_0
      {32, 20, 64, 640, 64, -1, 128, -1, -1},        // Q4_1
      {32, 22, 64, 704, -1, 64, 192, -1, -1},        // Q5_0
      {32, 24, 64, 768, 64, 128, 256, -1, -1},       // Q5_1
      {32, 18, 64, 576, -1, -1, 64, -1, -1},         // IQ4_NL
      {32, 17, 64, 576, -1, -1, 64, -1, -1},         // MXFP4
      {32, 34, 64, 1088, -1, -1, 64, -1, -1},        // Q8_0
      {256, 84, 256, 1344, 32, -1, -1, 320, -1},     // Q2_K
      {256, 110, 256, 1856, -1, -1, -1, 320, 1344},  // Q3_K
      {256, 144, 256, 2368, 32, -1, 320, -1, -1},    // Q4_K
      {256, 176, 256, 2880, 32, 320, 832, -1, -1},   // Q5_K
      {256, 210, 256, 3392, -1, -1, 320, 2368, -1},  // Q6_K
  };
  return table[f];
}

// Codes of one block as unsigned integers.
void codes(Format f, const uint8_t* b, uint8_t* q) {
  auto nibbles = [&](const uint8_t* qs) {
    for (int i = 0; i < 16; i++) q[i] = qs[i] & 15, q[i + 16] = qs[i] >> 4;
  };
  auto fives = [&](const uint8_t* qh) {
    for (int i = 0; i < 32; i++) q[i] |= uint8_t((qh[i / 8] >> (i % 8) & 1) << 4);
  };
  auto k_nibbles = [&](const uint8_t* qs) {
    for (int p = 0; p < 4; p++)
      for (int i = 0; i < 32; i++)
        q[64 * p + i] = qs[32 * p + i] & 15, q[64 * p + 32 + i] = qs[32 * p + i] >> 4;
  };
  auto twos = [&](const uint8_t* qs) {
    for (int i = 0; i < 256; i++)
      q[i] = qs[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
  };
  switch (f) {
    case Q4_0: case IQ4_NL: return nibbles(b + 2);
    case MXFP4: return nibbles(b + 1);
    case Q4_1: return nibbles(b + 4);
    case Q5_0: nibbles(b + 6); return fives(b + 2);
    case Q5_1: nibbles(b + 8); return fives(b + 4);
    case Q8_0: for (int i = 0; i < 32; i++) q[i] = b[2 + i] ^ 0x80; return;
    case Q2_K: return twos(b + 16);
    case Q3_K:
      twos(b + 32);
      for (int j = 0; j < 8; j++)
        for (int i = 0; i < 32; i++) q[32 * j + i] |= uint8_t((b[i] >> j & 1) << 2);
      return;
    case Q4_K: return k_nibbles(b + 16);
    case Q5_K:
      k_nibbles(b + 48);
      for (int j = 0; j < 8; j++)
        for (int i = 0; i < 32; i++) q[32 * j + i] |= uint8_t((b[16 + i] >> j & 1) << 4);
      return;
    default:  // Q6_K
      for (int h = 0; h < 2; h++)
        for (int i = 0; i < 32; i++) {
          const uint8_t *ql = b + 64 * h, high = b[128 + 32 * h + i];
          uint8_t* o = q + 128 * h + i;
          o[0] = uint8_t((ql[i] & 15) | (high & 3) << 4);
          o[32] = uint8_t((ql[i + 32] & 15) | (high >> 2 & 3) << 4);
          o[64] = uint8_t((ql[i] >> 4) | (high >> 4 & 3) << 4);
          o[96] = uint8_t((ql[i + 32] >> 4) | (high >> 6 & 3) << 4);
        }
  }
}

// Q3_K: scale `j` of 16, signed.
uint8_t six_bits(const uint8_t* s, int j) {
  const int low = j < 8 ? s[j] & 15 : s[j - 8] >> 4, high = s[8 + j % 4] >> (j / 4 * 2) & 3;
  return uint8_t((low | high << 4) - 32);
}

void scales(Format f, const uint8_t* b, uint8_t* tile, int group, int lane) {
  const Layout& l = layout(f);
  if (f == MXFP4) {
    tile[group * 16 + lane] = b[0];
    return;
  }
  if (f <= Q8_0) {
    memcpy(tile + group * 32 + lane * 2, b, 2);
    if (l.minimum >= 0) memcpy(tile + l.minimum + group * 32 + lane * 2, b + 2, 2);
    return;
  }
  if (f == Q6_K || f == Q3_K || f == Q2_K) {
    memcpy(tile + lane * 2, b + l.source - (f == Q2_K ? 4 : 2), 2);
    if (f == Q2_K) memcpy(tile + l.minimum + lane * 2, b + l.source - 2, 2);
    for (int j = 0; j < 16; j++)
      tile[64 + j * 16 + lane] = f == Q6_K ? b[192 + j] : f == Q2_K ? b[j] : six_bits(b + 96, j);
    return;
  }
  memcpy(tile + lane * 2, b, 2);
  memcpy(tile + 32 + lane * 2, b + 2, 2);
  const uint8_t* s = b + 4;
  for (int j = 0; j < 8; j++) {
    tile[64 + j * 16 + lane] = j < 4 ? s[j] & 63 : uint8_t((s[j + 4] & 15) | (s[j - 4] >> 6) << 4);
    tile[192 + j * 16 + lane] = j < 4 ? s[j + 4] & 63 : uint8_t((s[j + 4] >> 4) | (s[j] >> 6) << 4);
  }
}

// Where two bits of code `i` of a group lie.
int pair_at(const Layout& l, int g, int lane, int i) {
  return l.pairs + g * 128 + (i / 16) * 64 + lane * 4 + i % 4;
}

// Writes 32 codes of `lane` into group `g` of a tile.
void put_group(Format f, const uint8_t* q, uint8_t* tile, int g, int lane) {
  const Layout l = layout(f);  // a copy: what is written could be the table's
  if (f == Q8_0) {
    for (int i = 0; i < 32; i += 4) memcpy(tile + l.lines + g * 512 + i * 16 + lane * 4, q + i, 4);
    return;
  }
  for (int i = 0; l.lines >= 0 && i < 16; i += 4) {
    uint32_t low, high;
    memcpy(&low, q + i, 4);
    memcpy(&high, q + i + 16, 4);
    low = (low & 0x0f0f0f0f) | (high & 0x0f0f0f0f) << 4;
    memcpy(tile + l.lines + g * 256 + i * 16 + lane * 4, &low, 4);
  }
  if (l.fifth >= 0)
    for (int i = 0; i < 32; i++)
      tile[l.fifth + g * 64 + (i / 4) * 8 + lane / 2] |=
          uint8_t((q[i] >> 4 & 1) << (lane % 2 * 4 + i % 4));
  if (l.pairs >= 0)
    for (int i = 0; i < 32; i++)
      tile[pair_at(l, g, lane, i)] |=
          uint8_t((f == Q6_K ? q[i] >> 4 : q[i] & 3) << (i / 4 % 4 * 2));
  if (l.thirds >= 0)
    for (int i = 0; i < 32; i++)
      tile[l.thirds + g * 64 + lane * 4 + i % 4] |= uint8_t((q[i] >> 2) << (i / 4));
}

uint8_t get_code(Format f, const uint8_t* tile, int g, int lane, int i) {
  const Layout& l = layout(f);
  if (f == Q8_0) return tile[l.lines + g * 512 + (i / 4) * 64 + lane * 4 + i % 4];
  const int two = l.pairs >= 0 ? tile[pair_at(l, g, lane, i)] >> (i / 4 % 4 * 2) & 3 : 0;
  if (f == Q2_K) return uint8_t(two);
  if (f == Q3_K)
    return uint8_t(two | (tile[l.thirds + g * 64 + lane * 4 + i % 4] >> (i / 4) & 1) << 2);
  const uint8_t byte = tile[l.lines + g * 256 + (i / 4 % 4) * 64 + lane * 4 + i % 4];
  int q = i < 16 ? byte & 15 : byte >> 4;
  if (f == IQ4_NL) return uint8_t(IQ4_NL_VALUES[q] + 128);
  if (f == MXFP4) return uint8_t(MXFP4_VALUES[q] + 128);
  if (l.fifth >= 0)
    q |= (tile[l.fifth + g * 64 + (i / 4) * 8 + lane / 2] >> (lane % 2 * 4 + i % 4) & 1) << 4;
  return uint8_t(q | two << 4);
}

float half(const uint8_t* p) {
  uint16_t h;
  memcpy(&h, p, 2);
  const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7FFF;
  uint32_t bits;
  if (rest >= 0x7C00) bits = sign | 0x7F800000 | (rest & 0x3FF) << 13;
  else if (rest >= 0x400) bits = sign | ((rest << 13) + (112u << 23));
  else { float f = float(rest) * 0x1p-24f; memcpy(&bits, &f, 4); bits |= sign; }
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

struct Scales { float scale, minimum; };

// Of feature `i` of a group.
Scales scales_of(Format f, const uint8_t* tile, int g, int lane, int i = 0) {
  const Layout& l = layout(f);
  if (f == MXFP4) {  // 255: no number
    const uint8_t exponent = tile[g * 16 + lane];
    return {exponent == 255 ? INFINITY : std::ldexp(1.0f, exponent - 128), 0};
  }
  if (f <= Q8_0)
    return {half(tile + g * 32 + lane * 2),
        l.minimum >= 0 ? half(tile + l.minimum + g * 32 + lane * 2) : 0};
  const float d = half(tile + lane * 2);
  const uint8_t half_scale = tile[64 + (2 * g + i / 16) * 16 + lane];
  if (f == Q3_K || f == Q6_K) return {d * float(int8_t(half_scale)), 0};
  if (f == Q2_K)
    return {d * float(half_scale & 15), -half(tile + 32 + lane * 2) * float(half_scale >> 4)};
  return {d * float(tile[64 + g * 16 + lane]),
      -half(tile + 32 + lane * 2) * float(tile[192 + g * 16 + lane])};
}

typedef uint32_t Four __attribute__((vector_size(16), aligned(4), may_alias));

// `words` 4-byte elements of 16 rows `stride` bytes apart, one element of all rows after another.
void interleave(const uint8_t* rows, size_t stride, size_t words, uint8_t* out) {
  for (size_t i = 0; i + 4 <= words; i += 4)
    for (size_t lane = 0; lane < PANEL; lane += 4) {
      const uint8_t* from = rows + lane * stride + 4 * i;
      const Four a = *reinterpret_cast<const Four*>(from),
                 b = *reinterpret_cast<const Four*>(from + stride);
      const Four c = *reinterpret_cast<const Four*>(from + 2 * stride),
                 d = *reinterpret_cast<const Four*>(from + 3 * stride);
      const Four ab = __builtin_shufflevector(a, b, 0, 4, 1, 5),
                 cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
      const Four ab2 = __builtin_shufflevector(a, b, 2, 6, 3, 7),
                 cd2 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
      uint8_t* to = out + i * 64 + lane * 4;
      *reinterpret_cast<Four*>(to) = __builtin_shufflevector(ab, cd, 0, 1, 4, 5);
      *reinterpret_cast<Four*>(to + 64) = __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
      *reinterpret_cast<Four*>(to + 128) = __builtin_shufflevector(ab2, cd2, 0, 1, 4, 5);
      *reinterpret_cast<Four*>(to + 192) = __builtin_shufflevector(ab2, cd2, 2, 3, 6, 7);
    }
}

// Bf16 pairs and fp32 of a whole panel whose rows need no padding.
bool pack_words(int type, const uint8_t* rows, size_t cols, uint8_t* out) {
  const size_t stride = cols * (type == GGML_F32 ? 4 : 2);
  if (type == GGML_F16 || cols % 64) return false;
  interleave(rows, stride, stride / 4, out);
  return true;
}

void pack_float_row(int type, const uint8_t* row, size_t cols, int lane, uint8_t* out) {
  for (size_t i = 0; i < cols; i++) {
    if (type == GGML_BF16) memcpy(out + (i / 2) * 64 + lane * 4 + i % 2 * 2, row + 2 * i, 2);
    else if (type == GGML_F16) memcpy(out + i * 32 + lane * 2, row + 2 * i, 2);
    else memcpy(out + i * 64 + lane * 4, row + 4 * i, 4);
  }
}

}  // namespace

Format panel_format(int type) {
  switch (type) {
    case GGML_F32: return F32;
    case GGML_F16: return F16;
    case GGML_BF16: return BF16;
    case GGML_Q4_0: return Q4_0;
    case GGML_Q4_1: return Q4_1;
    case GGML_Q5_0: return Q5_0;
    case GGML_Q5_1: return Q5_1;
    case GGML_IQ4_NL: return IQ4_NL;
    case GGML_MXFP4: return MXFP4;
    case GGML_Q8_0: return Q8_0;
    case GGML_Q2_K: return Q2_K;
    case GGML_Q3_K: return Q3_K;
    case GGML_Q4_K: return Q4_K;
    case GGML_Q5_K: return Q5_K;
    case GGML_Q6_K: return Q6_K;
    case STORED_INT4: return CODE4;
    case STORED_INT4_MIN: return CODE4_MIN;
    case STORED_INT8: return CODE8;
    case STORED_INT8_MIN: return CODE8_MIN;
    case STORED_TABLE4: return TABLE4;
    case STORED_FP8: return FP8;
  }
  throw std::invalid_argument("no panel format for this tensor type");
}

bool is_fixed(Format f) {
  return f == Q4_0 || f == Q4_1 || f == Q4_K || f == CODE4 || f == CODE4_MIN;
}

bool has_halves(Format f) { return f == Q2_K || f == Q3_K || f == Q6_K; }

bool has_minima(Format f) {
  return is_grouped(f) ? has_minimum(f) : f < BF16 && layout(f).minimum >= 0;
}

bool is_grouped(Format f) { return (f >= CODE4 && f <= CODE8_MIN) || f == TABLE4 || f == FP8; }

namespace {

size_t row_bytes(int type, size_t cols) {
  const Format f = panel_format(type);
  if (f >= BF16) return cols * (type == GGML_F32 ? 4 : 2);
  if (cols % size_t(layout(f).block))
    throw std::invalid_argument("row length is not a whole number of blocks");
  return cols / size_t(layout(f).block) * size_t(layout(f).source);
}

}  // namespace

size_t stored_bytes(Storage s, size_t rows, size_t cols) {
  const Format f = panel_format(s.type);
  if (!is_grouped(f)) return rows * row_bytes(s.type, cols);
  if (s.group < GROUP || s.group % GROUP)
    throw std::invalid_argument("groups are multiples of 32 columns");
  return rows * cols +
      rows * scale_lines(s.group, cols) * sizeof(float) * (has_minimum(f) ? 2 : 1) +
      (f == TABLE4 ? SCALE_LINE : 0);
}

size_t panel_bytes(Format f, int group, size_t cols) {
  const size_t k = padded_cols(cols), units = is_fixed(f) ? SCALE_LINE : 0;
  if (is_grouped(f)) return grouped_bytes(f, group, cols) + units;
  if (f == BF16 || f == F16) return k * 32;
  if (f == F32) return k * 64;
  return k / size_t(layout(f).tile_k) * size_t(layout(f).tile) + units;
}

void pack_panel(
    Storage s, const uint8_t* data, size_t rows, size_t cols, size_t panel, uint8_t* out) {
  const int type = s.type;
  const Format f = panel_format(type);
  const size_t stride = is_grouped(f) ? 0 : row_bytes(type, cols);
  if (f >= BF16 && !is_grouped(f) && (panel + 1) * PANEL <= rows &&
      pack_words(type, data + panel * PANEL * stride, cols, out))
    return;
  memset(out, 0, panel_bytes(f, s.group, cols));
  if (is_grouped(f)) return pack_grouped(s, f, data, rows, cols, panel, out);
  for (int lane = 0; lane < PANEL && panel * PANEL + size_t(lane) < rows; lane++) {
    const uint8_t* row = data + (panel * PANEL + size_t(lane)) * stride;
    if (f >= BF16) { pack_float_row(type, row, cols, lane, out); continue; }
    const Layout& l = layout(f);
    RowRange range;
    for (size_t k = 0; k < cols; k += size_t(l.block)) {
      uint8_t q[256], *tile = out + k / size_t(l.tile_k) * size_t(l.tile);
      const uint8_t* block = row + k / size_t(l.block) * size_t(l.source);
      const int group = int(k % size_t(l.tile_k)) / GROUP;
      codes(f, block, q);
      scales(f, block, tile, group, lane);
      for (int g = 0; g < l.block / GROUP; g++) {
        put_group(f, q + g * GROUP, tile, group + g, lane);
        if (!is_fixed(f)) continue;
        const Scales s = scales_of(f, tile, group + g, lane);
        range.add(q + g * GROUP, GROUP, s.scale, ZERO_POINT[f] ? 0 : s.minimum + MIDDLE * s.scale);
      }
    }
    if (is_fixed(f)) put_unit(out, panel_bytes(f, s.group, cols), lane, range);
  }
}

void unpack_row(Format f, int group, const uint8_t* panel, int lane, size_t cols, float* out) {
  if (is_grouped(f)) return unpack_grouped(f, group, panel, lane, cols, out);
  for (size_t i = 0; i < cols && f >= BF16; i++) {
    if (f == F16) {
      out[i] = half(panel + i * 32 + lane * 2);
      continue;
    }
    uint32_t bits = 0;
    if (f == F32) memcpy(&bits, panel + i * 64 + lane * 4, 4);
    else
      memcpy(reinterpret_cast<uint8_t*>(&bits) + 2, panel + (i / 2) * 64 + lane * 4 + i % 2 * 2, 2);
    memcpy(out + i, &bits, 4);
  }
  if (f >= BF16) return;
  const Layout& l = layout(f);
  for (size_t k = 0; k < cols; k += GROUP) {
    const uint8_t* tile = panel + k / size_t(l.tile_k) * size_t(l.tile);
    const int g = int(k % size_t(l.tile_k)) / GROUP;
    for (int half = 0; half < GROUP; half += GROUP / 2) {
      const Scales s = scales_of(f, tile, g, lane, half);
      for (int i = half; i < half + GROUP / 2 && k + size_t(i) < cols; i++)
        out[k + size_t(i)] =
            s.scale * float(get_code(f, tile, g, lane, i) - ZERO_POINT[f]) + s.minimum;
    }
  }
}

}  // namespace octavo
