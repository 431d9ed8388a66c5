// 16 lanes in four 128-bit registers. Needs Armv8.2-A with the dot-product extension.
#include <arm_neon.h>

constexpr int TOKEN_TILE = 4;
constexpr int FLOAT_TILE = 1, FLOAT_SUMS = 4;
constexpr int PAIR = 1;
constexpr int ATTEND_TILE = 4;  // sums of a tile of attention

struct VF { float32x4_t v[4]; };
struct VI { int32x4_t v[4]; };
struct VB { uint8x16_t v[4]; };
struct VM { uint32x4_t v[4]; };
#define EACH for (int i = 0; i < 4; i++)

static inline VF f_load(const float* p) { VF r; EACH r.v[i] = vld1q_f32(p + 4 * i); return r; }
static inline void f_store(float* p, VF a) { EACH vst1q_f32(p + 4 * i, a.v[i]); }
static inline VF f_set(float x) { VF r; EACH r.v[i] = vdupq_n_f32(x); return r; }
static inline VF f_add(VF a, VF b) { EACH a.v[i] = vaddq_f32(a.v[i], b.v[i]); return a; }
static inline VF f_sub(VF a, VF b) { EACH a.v[i] = vsubq_f32(a.v[i], b.v[i]); return a; }
static inline VF f_mul(VF a, VF b) { EACH a.v[i] = vmulq_f32(a.v[i], b.v[i]); return a; }
static inline VF f_div(VF a, VF b) { EACH a.v[i] = vdivq_f32(a.v[i], b.v[i]); return a; }
static inline VF f_inverse(VF a) { return f_div(f_set(1), a); }
static inline VF f_fma(VF a, VF b, VF c) {
  EACH c.v[i] = vfmaq_f32(c.v[i], a.v[i], b.v[i]);
  return c;
}
// Comparisons with NaN choose the second operand, as on x86.
static inline VF f_max(VF a, VF b) {
  EACH b.v[i] = vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]);
  return b;
}
static inline VF f_min(VF a, VF b) {
  EACH b.v[i] = vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]);
  return b;
}
static inline VF f_abs(VF a) { EACH a.v[i] = vabsq_f32(a.v[i]); return a; }
static inline VF f_round(VF a) { EACH a.v[i] = vrndnq_f32(a.v[i]); return a; }
static inline VF f_half(const void* p) {
  VF r;
  EACH r.v[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)p + 4 * i)));
  return r;
}
static inline VF f_table(const uint8_t* p, int high, VF table) {
  float t[16], r[16];
  f_store(t, table);
  for (int i = 0; i < 16; i++) r[i] = t[high ? p[i] >> 4 : p[i] & 15];
  return f_load(r);
}
static inline VF f_e8m0(const uint8_t* p) {  // 2^(p - 128)
  const uint8x16_t b = vld1q_u8(p);
  const uint16x8_t low = vmovl_u8(vget_low_u8(b)), high = vmovl_u8(vget_high_u8(b));
  const uint32x4_t w[4] = {vmovl_u16(vget_low_u16(low)), vmovl_u16(vget_high_u16(low)),
      vmovl_u16(vget_low_u16(high)), vmovl_u16(vget_high_u16(high))};
  VF r;
  EACH r.v[i] = vmulq_n_f32(
      vreinterpretq_f32_u32(vmaxq_u32(vshlq_n_u32(w[i], 23), vdupq_n_u32(0x00400000))), 0.5f);
  return r;
}
static inline VF f_fp8(const uint8_t* p) {  // e4m3; 2^120 moves the exponent's bias from 127 to 7
  const uint8x16_t b = vld1q_u8(p);
  const uint16x8_t low = vmovl_u8(vget_low_u8(b)), high = vmovl_u8(vget_high_u8(b));
  const uint32x4_t w[4] = {vmovl_u16(vget_low_u16(low)), vmovl_u16(vget_high_u16(low)),
      vmovl_u16(vget_low_u16(high)), vmovl_u16(vget_high_u16(high))};
  VF r;
  EACH {
    const uint32x4_t sign = vshlq_n_u32(vandq_u32(w[i], vdupq_n_u32(128)), 24),
                     rest = vshlq_n_u32(vandq_u32(w[i], vdupq_n_u32(127)), 20);
    r.v[i] = vmulq_n_f32(vreinterpretq_f32_u32(vorrq_u32(sign, rest)), 0x1p120f);
  }
  return r;
}
static inline VF f_int(VI a) { VF r; EACH r.v[i] = vcvtq_f32_s32(a.v[i]); return r; }
static inline VF f_u8(const uint8_t* p) {
  const uint8x16_t b = vld1q_u8(p);
  const uint16x8_t low = vmovl_u8(vget_low_u8(b)), high = vmovl_u8(vget_high_u8(b));
  return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))),
      vcvtq_f32_u32(vmovl_u16(vget_high_u16(low))), vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))),
      vcvtq_f32_u32(vmovl_u16(vget_high_u16(high)))}};
}
static inline VF f_u4(const uint8_t* p, int high) {  // low or high nibbles
  const uint8x16_t b = vld1q_u8(p),
                   n = high ? vshrq_n_u8(b, 4) : vandq_u8(b, vdupq_n_u8(15));
  const uint16x8_t low = vmovl_u8(vget_low_u8(n)), up = vmovl_u8(vget_high_u8(n));
  return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))),
      vcvtq_f32_u32(vmovl_u16(vget_high_u16(low))), vcvtq_f32_u32(vmovl_u16(vget_low_u16(up))),
      vcvtq_f32_u32(vmovl_u16(vget_high_u16(up)))}};
}
static inline VF f_s8(const uint8_t* p) {
  const int8x16_t b = vld1q_s8((const int8_t*)p);
  const int16x8_t low = vmovl_s8(vget_low_s8(b)), high = vmovl_s8(vget_high_s8(b));
  return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
      vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))), vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
      vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))}};
}
static inline VF f_scale2(VF x, VF n) {  // x * 2^n, n in [-126, 127]
  EACH x.v[i] = vmulq_f32(x.v[i],
      vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n.v[i]), vdupq_n_s32(127)), 23)));
  return x;
}
static inline VF f_even(VF a, VF b) {  // lanes 0, 2, 4... of a, then of b
  return {{vuzp1q_f32(a.v[0], a.v[1]), vuzp1q_f32(a.v[2], a.v[3]), vuzp1q_f32(b.v[0], b.v[1]),
      vuzp1q_f32(b.v[2], b.v[3])}};
}
static inline VF f_odd(VF a, VF b) {
  return {{vuzp2q_f32(a.v[0], a.v[1]), vuzp2q_f32(a.v[2], a.v[3]), vuzp2q_f32(b.v[0], b.v[1]),
      vuzp2q_f32(b.v[2], b.v[3])}};
}
// lane 4 i + j: the largest of lanes 4 i ... 4 i + 3 of x[j]
static inline VF f_max_fours(const VF* x) {
  VF r;
  EACH r.v[i] = vpmaxq_f32(vpmaxq_f32(x[0].v[i], x[1].v[i]), vpmaxq_f32(x[2].v[i], x[3].v[i]));
  return r;
}
// each lane i and lane i ^ N
template <int N> static inline VF f_swap(VF a) {
  VF r;
  EACH {
    if constexpr (N == 1) r.v[i] = vrev64q_f32(a.v[i]);
    else if constexpr (N == 2) r.v[i] = vextq_f32(a.v[i], a.v[i], 2);
    else r.v[i] = a.v[i ^ N / 4];
  }
  return r;
}
static inline uint32_t m_bits(VM m) {
  const uint32_t lanes[4] = {1, 2, 4, 8};
  uint32_t bits = 0;
  EACH bits |= vaddvq_u32(vandq_u32(m.v[i], vld1q_u32(lanes))) << 4 * i;
  return bits;
}
static inline VM f_le(VF a, VF b) { VM r; EACH r.v[i] = vcleq_f32(a.v[i], b.v[i]); return r; }
static inline VF f_select(VM m, VF yes, VF no) {
  EACH no.v[i] = vbslq_f32(m.v[i], yes.v[i], no.v[i]);
  return no;
}
static inline VM m_range(int begin, int end) {
  const int32_t lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  VM r;
  EACH {
    const int32x4_t lane = vld1q_s32(lanes + 4 * i);
    r.v[i] = vandq_u32(vcgeq_s32(lane, vdupq_n_s32(begin)), vcltq_s32(lane, vdupq_n_s32(end)));
  }
  return r;
}

static inline VI f_bits(VF a) { VI r; EACH r.v[i] = vreinterpretq_s32_f32(a.v[i]); return r; }
static inline VI i_load(const int32_t* p) { VI r; EACH r.v[i] = vld1q_s32(p + 4 * i); return r; }
static inline VI i_set(int32_t x) { VI r; EACH r.v[i] = vdupq_n_s32(x); return r; }
static inline void i_store(int32_t* p, VI a) { EACH vst1q_s32(p + 4 * i, a.v[i]); }
static inline VI i_add(VI a, VI b) { EACH a.v[i] = vaddq_s32(a.v[i], b.v[i]); return a; }
static inline VI i_sub(VI a, VI b) { EACH a.v[i] = vsubq_s32(a.v[i], b.v[i]); return a; }
static inline VI i_and(VI a, VI b) { EACH a.v[i] = vandq_s32(a.v[i], b.v[i]); return a; }
static inline VI i_max(VI a, VI b) { EACH a.v[i] = vmaxq_s32(a.v[i], b.v[i]); return a; }
// Lanes as pairs of 16 bits: acc + a.low * b.low + a.high * b.high; the low halves of `low` under
// those of `high`, whose own are zero
static inline VI i_dot16(VI acc, VI a, VI b) {
  EACH {
    const int16x8_t x = vreinterpretq_s16_s32(a.v[i]), y = vreinterpretq_s16_s32(b.v[i]);
    acc.v[i] = vaddq_s32(
        acc.v[i], vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y)));
  }
  return acc;
}
static inline VI i_pair(VI low, VI high) {
  EACH high.v[i] = vbslq_s32(vdupq_n_u32(0xFFFF), low.v[i], high.v[i]);
  return high;
}
template <int N> static inline VI i_shr(VI a) { EACH a.v[i] = vshrq_n_s32(a.v[i], N); return a; }
template <int N> static inline VI i_shl(VI a) {
  if constexpr (N > 0) EACH a.v[i] = vshlq_n_s32(a.v[i], N);
  return a;
}
static inline int32_t hadd_one(VI a) {
  return vaddvq_s32(vaddq_s32(vaddq_s32(a.v[0], a.v[1]), vaddq_s32(a.v[2], a.v[3])));
}
static inline void i_hadd2(VI a, VI b, int32_t* sums) {
  sums[0] = hadd_one(a), sums[1] = hadd_one(b);
}
static inline VI i_round(VF a) { VI r; EACH r.v[i] = vcvtnq_s32_f32(a.v[i]); return r; }
static inline void i_store8(int8_t* p, VI a) {
  const int16x8_t low = vcombine_s16(vmovn_s32(a.v[0]), vmovn_s32(a.v[1])),
                  high = vcombine_s16(vmovn_s32(a.v[2]), vmovn_s32(a.v[3]));
  vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}
// the low 16 bits of a's lanes, then of b's
static inline void i_store16(int16_t* p, VI a, VI b) {
  EACH vst1_s16(p + 4 * i, vmovn_s32(a.v[i])), vst1_s16(p + 16 + 4 * i, vmovn_s32(b.v[i]));
}
// 32 signed bytes as pairs of 16 bits
static inline VI i_widen8(const int8_t* p) {
  VI r;
  EACH r.v[i] = vreinterpretq_s32_s16(vmovl_s8(vld1_s8(p + 8 * i)));
  return r;
}
static inline VB b_load(const uint8_t* p) { VB r; EACH r.v[i] = vld1q_u8(p + 16 * i); return r; }
static inline VB b_low(VB a) { EACH a.v[i] = vandq_u8(a.v[i], vdupq_n_u8(15)); return a; }
static inline VB b_high(VB a) { EACH a.v[i] = vshrq_n_u8(a.v[i], 4); return a; }
static inline VB b_bit5(VB a, const uint8_t* mask) {
  const uint8_t bits[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  EACH {
    const uint8x16_t byte = vcombine_u8(vdup_n_u8(mask[2 * i]), vdup_n_u8(mask[2 * i + 1]));
    a.v[i] = vorrq_u8(a.v[i], vandq_u8(vtstq_u8(byte, vld1q_u8(bits)), vdupq_n_u8(16)));
  }
  return a;
}
static inline VB b_lookup(VB a, const int8_t* table) {
  EACH a.v[i] = vqtbl1q_u8(vld1q_u8((const uint8_t*)table), a.v[i]);
  return a;
}
// signed to unsigned
static inline VB b_flip(VB a) { EACH a.v[i] = veorq_u8(a.v[i], vdupq_n_u8(128)); return a; }
static inline VB b_or(VB a, VB b) { EACH a.v[i] = vorrq_u8(a.v[i], b.v[i]); return a; }
// Each byte shifted to the right (to the left where S is negative), and of that the bits in MASK.
template <int S, int MASK> static inline VB b_bits(VB a) {
  EACH {
    if constexpr (S < 0) a.v[i] = vshlq_n_u8(a.v[i], -S);
    if constexpr (S > 0) a.v[i] = vshrq_n_u8(a.v[i], S);
    a.v[i] = vandq_u8(a.v[i], vdupq_n_u8(MASK));
  }
  return a;
}
// The dot product takes signed bytes: a wider weight is its low seven bits and 128 times its top
// bit.
template <bool WIDE> static inline VI b_dot(VI acc, VB w, const int8_t* a) {
  const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(*(const int32_t*)a));
  EACH {
    const uint8x16_t low = WIDE ? vandq_u8(w.v[i], vdupq_n_u8(127)) : w.v[i];
    acc.v[i] = vdotq_s32(acc.v[i], vreinterpretq_s8_u8(low), x);
    if (!WIDE) continue;
    const int32x4_t top = vdotq_s32(vdupq_n_s32(0), vreinterpretq_s8_u8(vshrq_n_u8(w.v[i], 7)), x);
    acc.v[i] = vaddq_s32(acc.v[i], vshlq_n_s32(top, 7));
  }
  return acc;
}

static inline float32x4_t h_widen(const uint16_t* p) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}
static inline VF h_load(const uint16_t* p) { VF r; EACH r.v[i] = h_widen(p + 4 * i); return r; }
// the first and the second of each pair of a line
static inline VF h_even(const uint16_t* line) {
  VF r;
  EACH r.v[i] = vreinterpretq_f32_u32(vshlq_n_u32(vld1q_u32((const uint32_t*)line + 4 * i), 16));
  return r;
}
static inline VF h_odd(const uint16_t* line) {
  VF r;
  EACH r.v[i] = vreinterpretq_f32_u32(
      vandq_u32(vld1q_u32((const uint32_t*)line + 4 * i), vdupq_n_u32(0xFFFF0000)));
  return r;
}
// acc[lane] += x0 * y0 + x1 * y1 over bf16 pairs; y is broadcast
static inline VF h_dot(VF acc, const uint16_t* line, const uint16_t* pair) {
  const uint32x4_t y = vdupq_n_u32(*(const uint32_t*)pair), high = vdupq_n_u32(0xFFFF0000);
  const float32x4_t y0 = vreinterpretq_f32_u32(vshlq_n_u32(y, 16)),
                    y1 = vreinterpretq_f32_u32(vandq_u32(y, high));
  EACH {
    const uint32x4_t x = vreinterpretq_u32_u16(vld1q_u16(line + 8 * i));
    acc.v[i] = vfmaq_f32(acc.v[i], vreinterpretq_f32_u32(vshlq_n_u32(x, 16)), y0);
    acc.v[i] = vfmaq_f32(acc.v[i], vreinterpretq_f32_u32(vandq_u32(x, high)), y1);
  }
  return acc;
}
static inline void h_store(uint16_t* p, VF a) {  // to nearest even; inputs are finite
  EACH {
    const uint32x4_t u = vreinterpretq_u32_f32(a.v[i]),
                     odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    vst1_u16(p + 4 * i, vshrn_n_u32(vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7FFF))), 16));
  }
}

static inline float f_hadd(VF a) {  // fixed tree
  float t[16];
  f_store(t, a);
  for (int w = 8; w; w /= 2) for (int i = 0; i < w; i++) t[i] += t[i + w];
  return t[0];
}
static inline float f_hmax(VF a) {
  return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.v[0], a.v[1]), vmaxq_f32(a.v[2], a.v[3])));
}
