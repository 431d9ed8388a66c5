// 16 lanes as an array: the portable path, and the plainest statement of what each operation means.
#include <math.h>
#include <string.h>

constexpr int TOKEN_TILE = 1;
constexpr int FLOAT_TILE = 1, FLOAT_SUMS = 4;
constexpr int PAIR = 1;
constexpr int ATTEND_TILE = 4;  // sums of a tile of attention

struct VF { float v[16]; };
struct VI { int32_t v[16]; };
struct VB { uint8_t v[64]; };
struct VM { bool v[16]; };
#define EACH_LANE for (int i = 0; i < 16; i++)
#define EACH_BYTE for (int i = 0; i < 64; i++)

static inline VF f_load(const float* p) { VF r; memcpy(r.v, p, 64); return r; }
static inline void f_store(float* p, VF a) { memcpy(p, a.v, 64); }
static inline VF f_set(float x) { VF r; EACH_LANE r.v[i] = x; return r; }
static inline VF f_add(VF a, VF b) { EACH_LANE a.v[i] += b.v[i]; return a; }
static inline VF f_sub(VF a, VF b) { EACH_LANE a.v[i] -= b.v[i]; return a; }
static inline VF f_mul(VF a, VF b) { EACH_LANE a.v[i] *= b.v[i]; return a; }
static inline VF f_div(VF a, VF b) { EACH_LANE a.v[i] /= b.v[i]; return a; }
static inline VF f_inverse(VF a) { return f_div(f_set(1), a); }
static inline VF f_fma(VF a, VF b, VF c) { EACH_LANE c.v[i] = a.v[i] * b.v[i] + c.v[i]; return c; }
static inline VF f_max(VF a, VF b) {
  EACH_LANE b.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return b;
}
static inline VF f_min(VF a, VF b) {
  EACH_LANE b.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
  return b;
}
static inline VF f_abs(VF a) { EACH_LANE a.v[i] = fabsf(a.v[i]); return a; }
static inline VF f_round(VF a) { EACH_LANE a.v[i] = rintf(a.v[i]); return a; }
static inline float half_to_float(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7FFF, bits;
  if (rest >= 0x7C00) bits = sign | 0x7F800000 | (rest & 0x3FF) << 13;
  else if (rest >= 0x400) bits = sign | ((rest << 13) + (112u << 23));
  else { float f = (float)rest * 5.9604644775390625e-8f; memcpy(&bits, &f, 4); bits |= sign; }
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
static inline VF f_half(const void* p) {
  VF r;
  EACH_LANE r.v[i] = half_to_float(((const uint16_t*)p)[i]);
  return r;
}
static inline VF f_table(const uint8_t* p, int high, VF table) {
  VF r;
  EACH_LANE r.v[i] = table.v[high ? p[i] >> 4 : p[i] & 15];
  return r;
}
static inline VF f_e8m0(const uint8_t* p) {  // 2^(p - 128)
  VF r;
  EACH_LANE {
    const uint32_t u = p[i] ? (uint32_t)p[i] << 23 : 0x00400000;
    memcpy(&r.v[i], &u, 4);
    r.v[i] *= 0.5f;
  }
  return r;
}
static inline VF f_fp8(const uint8_t* p) {  // e4m3; 2^120 moves the exponent's bias from 127 to 7
  VF r;
  EACH_LANE {
    uint32_t u = (uint32_t)(p[i] & 128) << 24 | (uint32_t)(p[i] & 127) << 20;
    memcpy(&r.v[i], &u, 4);
    r.v[i] *= 0x1p120f;
  }
  return r;
}
static inline VF f_int(VI a) { VF r; EACH_LANE r.v[i] = (float)a.v[i]; return r; }
static inline VF f_u8(const uint8_t* p) { VF r; EACH_LANE r.v[i] = p[i]; return r; }
static inline VF f_u4(const uint8_t* p, int high) {  // low or high nibbles
  VF r;
  EACH_LANE r.v[i] = high ? p[i] >> 4 : p[i] & 15;
  return r;
}
static inline VF f_s8(const uint8_t* p) { VF r; EACH_LANE r.v[i] = (int8_t)p[i]; return r; }
static inline VF f_scale2(VF a, VF n) {
  EACH_LANE a.v[i] = ldexpf(a.v[i], n.v[i] > -200 ? (int)n.v[i] : -200);
  return a;
}
static inline VF f_even(VF a, VF b) {
  VF r;
  EACH_LANE r.v[i] = i < 8 ? a.v[2 * i] : b.v[2 * i - 16];
  return r;
}
static inline VF f_odd(VF a, VF b) {
  VF r;
  EACH_LANE r.v[i] = i < 8 ? a.v[2 * i + 1] : b.v[2 * i - 15];
  return r;
}
// lane 4 i + j: the largest of lanes 4 i ... 4 i + 3 of x[j]
static inline VF f_max_fours(const VF* x) {
  VF r;
  EACH_LANE {
    const float* four = x[i % 4].v + i / 4 * 4;
    r.v[i] = four[0];
    for (int j = 1; j < 4; j++) r.v[i] = four[j] > r.v[i] ? four[j] : r.v[i];
  }
  return r;
}
// each lane i and lane i ^ N
template <int N> static inline VF f_swap(VF a) {
  VF r;
  EACH_LANE r.v[i] = a.v[i ^ N];
  return r;
}
static inline uint32_t m_bits(VM m) {
  uint32_t bits = 0;
  EACH_LANE bits |= (uint32_t)m.v[i] << i;
  return bits;
}
static inline VM f_le(VF a, VF b) { VM r; EACH_LANE r.v[i] = a.v[i] <= b.v[i]; return r; }
static inline VF f_select(VM m, VF yes, VF no) {
  EACH_LANE no.v[i] = m.v[i] ? yes.v[i] : no.v[i];
  return no;
}
static inline VM m_range(int begin, int end) {
  VM r;
  EACH_LANE r.v[i] = i >= begin && i < end;
  return r;
}

static inline VI f_bits(VF a) { VI r; memcpy(r.v, a.v, 64); return r; }
static inline VI i_load(const int32_t* p) { VI r; memcpy(r.v, p, 64); return r; }
static inline VI i_set(int32_t x) { VI r; EACH_LANE r.v[i] = x; return r; }
static inline void i_store(int32_t* p, VI a) { memcpy(p, a.v, 64); }
static inline VI i_add(VI a, VI b) { EACH_LANE a.v[i] += b.v[i]; return a; }
static inline VI i_sub(VI a, VI b) { EACH_LANE a.v[i] -= b.v[i]; return a; }
static inline VI i_and(VI a, VI b) { EACH_LANE a.v[i] &= b.v[i]; return a; }
static inline VI i_max(VI a, VI b) {
  EACH_LANE a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return a;
}
// Lanes as pairs of 16 bits: acc + a.low * b.low + a.high * b.high; the low halves of `low` under
// those of `high`, whose own are zero
static inline VI i_dot16(VI acc, VI a, VI b) {
  EACH_LANE acc.v[i] = (int32_t)((uint32_t)acc.v[i] +
      (uint32_t)((int16_t)a.v[i] * (int16_t)b.v[i]) + (uint32_t)((a.v[i] >> 16) * (b.v[i] >> 16)));
  return acc;
}
static inline VI i_pair(VI low, VI high) { EACH_LANE high.v[i] |= low.v[i] & 0xFFFF; return high; }
template <int N> static inline VI i_shr(VI a) { EACH_LANE a.v[i] >>= N; return a; }
static inline void i_hadd2(VI a, VI b, int32_t* sums) {
  sums[0] = sums[1] = 0;
  EACH_LANE sums[0] += a.v[i], sums[1] += b.v[i];
}
template <int N>
static inline VI i_shl(VI a) {
  EACH_LANE a.v[i] = (int32_t)((uint32_t)a.v[i] << N);
  return a;
}
static inline VI i_round(VF a) { VI r; EACH_LANE r.v[i] = (int32_t)rintf(a.v[i]); return r; }
static inline void i_store8(int8_t* p, VI a) { EACH_LANE p[i] = (int8_t)a.v[i]; }

// the low 16 bits of a's lanes, then of b's
static inline void i_store16(int16_t* p, VI a, VI b) {
  EACH_LANE p[i] = (int16_t)a.v[i], p[16 + i] = (int16_t)b.v[i];
}
// 32 signed bytes as pairs of 16 bits
static inline VI i_widen8(const int8_t* p) {
  VI r;
  EACH_LANE r.v[i] = (int32_t)((uint32_t)p[2 * i + 1] << 16 | (uint16_t)p[2 * i]);
  return r;
}

static inline VB b_load(const uint8_t* p) { VB r; memcpy(r.v, p, 64); return r; }
static inline VB b_low(VB a) { EACH_BYTE a.v[i] &= 15; return a; }
static inline VB b_high(VB a) { EACH_BYTE a.v[i] >>= 4; return a; }
static inline VB b_bit5(VB a, const uint8_t* mask) {
  EACH_BYTE a.v[i] |= (uint8_t)((mask[i / 8] >> (i % 8) & 1) << 4);
  return a;
}
static inline VB b_lookup(VB a, const int8_t* table) {
  EACH_BYTE a.v[i] = (uint8_t)table[a.v[i]];
  return a;
}
// signed to unsigned: adds 128
static inline VB b_flip(VB a) { EACH_BYTE a.v[i] ^= 128; return a; }
static inline VB b_or(VB a, VB b) { EACH_BYTE a.v[i] |= b.v[i]; return a; }
// Each byte shifted to the right (to the left where S is negative), and of that the bits in MASK.
template <int S, int MASK> static inline VB b_bits(VB a) {
  constexpr int LEFT = S < 0 ? -S : 0, RIGHT = S < 0 ? 0 : S;
  EACH_BYTE a.v[i] = (uint8_t)(a.v[i] << LEFT >> RIGHT & MASK);
  return a;
}
template <bool WIDE> static inline VI b_dot(VI acc, VB w, const int8_t* a) {
  EACH_LANE for (int j = 0; j < 4; j++) acc.v[i] += w.v[4 * i + j] * a[j];
  return acc;
}

static inline float bf16_to_float(uint16_t h) {
  uint32_t u = (uint32_t)h << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
// the first and the second of each pair of a line
static inline VF h_even(const uint16_t* line) {
  VF r;
  EACH_LANE r.v[i] = bf16_to_float(line[2 * i]);
  return r;
}
static inline VF h_odd(const uint16_t* line) { return h_even(line + 1); }
static inline VF h_dot(VF acc, const uint16_t* line, const uint16_t* pair) {
  float y0 = bf16_to_float(pair[0]), y1 = bf16_to_float(pair[1]);
  EACH_LANE acc.v[i] =
      acc.v[i] + bf16_to_float(line[2 * i]) * y0 + bf16_to_float(line[2 * i + 1]) * y1;
  return acc;
}
static inline VF h_load(const uint16_t* p) {
  VF r;
  EACH_LANE r.v[i] = bf16_to_float(p[i]);
  return r;
}
static inline void h_store(uint16_t* p, VF a) {
  EACH_LANE {
    uint32_t u;
    memcpy(&u, &a.v[i], 4);
    p[i] = (uint16_t)((u + 0x7FFF + ((u >> 16) & 1)) >> 16);
  }
}

static inline float f_hadd(VF a) {
  for (int w = 8; w; w /= 2) for (int i = 0; i < w; i++) a.v[i] += a.v[i + w];
  return a.v[0];
}
static inline float f_hmax(VF a) {
  float m = a.v[0];
  EACH_LANE m = a.v[i] > m ? a.v[i] : m;
  return m;
}
