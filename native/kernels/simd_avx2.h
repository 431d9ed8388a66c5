// 16 lanes in two 256-bit registers. Needs AVX2, FMA, F16C; uses AVX-VNNI where the compiler is
// told of it.
#include <immintrin.h>

#ifdef __AVXVNNI__
constexpr int TOKEN_TILE = 4;
#else
constexpr int TOKEN_TILE = 16;
#endif
constexpr int FLOAT_TILE = 6, FLOAT_SUMS = 6;  // tokens of a tile of floats, sums in registers
constexpr int PAIR = 1;
constexpr int ATTEND_TILE = 4;  // sums of a tile of attention

struct VF { __m256 a, b; };
struct VI { __m256i a, b; };
struct VB { __m256i a, b; };
struct VM { __m256 a, b; };

static inline VF f_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void f_store(float* p, VF x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
static inline VF f_set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline VF f_add(VF x, VF y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline VF f_sub(VF x, VF y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline VF f_mul(VF x, VF y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline VF f_div(VF x, VF y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline VF f_inverse(VF x) { return f_div(f_set(1), x); }
static inline VF f_fma(VF x, VF y, VF z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
static inline VF f_max(VF x, VF y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline VF f_min(VF x, VF y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
static inline VF f_abs(VF x) {
  __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
  return {_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)};
}
static inline VF f_round(VF x) {
  constexpr int MODE = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, MODE), _mm256_round_ps(x.b, MODE)};
}
static inline VF f_half(const void* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
      _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + 1))};
}
static inline __m256 table_half(__m256i index, VF table) {
  const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));  // bit 3 as sign
  return _mm256_blendv_ps(
      _mm256_permutevar8x32_ps(table.a, index), _mm256_permutevar8x32_ps(table.b, index), upper);
}
static inline VF f_table(const uint8_t* p, int high, VF table) {
  __m256i a = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)),
          b = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)));
  if (high) a = _mm256_srli_epi32(a, 4), b = _mm256_srli_epi32(b, 4);
  return {table_half(a, table), table_half(b, table)};
}
static inline __m256 e8m0_half(const uint8_t* p) {
  const __m256i b = _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)), 23);
  return _mm256_mul_ps(_mm256_castsi256_ps(_mm256_max_epu32(b, _mm256_set1_epi32(0x00400000))),
      _mm256_set1_ps(0.5f));
}
// 2^(p - 128)
static inline VF f_e8m0(const uint8_t* p) { return {e8m0_half(p), e8m0_half(p + 8)}; }
static inline __m256 fp8_half(const uint8_t* p) {
  // the sign, five times
  const __m256i b = _mm256_slli_epi32(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)), 20);
  return _mm256_mul_ps(_mm256_castsi256_ps(_mm256_and_si256(b, _mm256_set1_epi32((int)0x87F00000))),
      _mm256_set1_ps(0x1p120f));
}
// e4m3; 2^120 moves the exponent's bias from 127 to 7
static inline VF f_fp8(const uint8_t* p) { return {fp8_half(p), fp8_half(p + 8)}; }
static inline VF f_int(VI x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
static inline VF f_u8(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p))),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))};
}
static inline VF f_u4(const uint8_t* p, int high) {  // low or high nibbles
  __m256i a = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)),
          b = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)));
  const __m256i m = _mm256_set1_epi32(15);
  a = high ? _mm256_srli_epi32(a, 4) : _mm256_and_si256(a, m);
  b = high ? _mm256_srli_epi32(b, 4) : _mm256_and_si256(b, m);
  return {_mm256_cvtepi32_ps(a), _mm256_cvtepi32_ps(b)};
}
static inline VF f_s8(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))};
}
static inline __m256 exp2i_half(__m256 n) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
// n in [-126, 127]
static inline VF f_scale2(VF x, VF n) {
  return {_mm256_mul_ps(x.a, exp2i_half(n.a)), _mm256_mul_ps(x.b, exp2i_half(n.b))};
}
static inline __m256 even_half(__m256 a, __m256 b) {
  return _mm256_castpd_ps(
      _mm256_permute4x64_pd(_mm256_castps_pd(_mm256_shuffle_ps(a, b, 0x88)), 0xD8));
}
static inline __m256 odd_half(__m256 a, __m256 b) {
  return _mm256_castpd_ps(
      _mm256_permute4x64_pd(_mm256_castps_pd(_mm256_shuffle_ps(a, b, 0xDD)), 0xD8));
}
// lanes 0, 2, 4... of x, then of y
static inline VF f_even(VF x, VF y) { return {even_half(x.a, x.b), even_half(y.a, y.b)}; }
static inline VF f_odd(VF x, VF y) { return {odd_half(x.a, x.b), odd_half(y.a, y.b)}; }
static inline VM f_le(VF x, VF y) {
  return {_mm256_cmp_ps(x.a, y.a, _CMP_LE_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LE_OQ)};
}
static inline VF f_select(VM m, VF yes, VF no) {
  return {_mm256_blendv_ps(no.a, yes.a, m.a), _mm256_blendv_ps(no.b, yes.b, m.b)};
}
static inline VM m_range(int begin, int end) {
  __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), eight = _mm256_set1_epi32(8);
  __m256i lo = _mm256_set1_epi32(begin - 1), hi = _mm256_set1_epi32(end);
  __m256i upper = _mm256_add_epi32(lane, eight);
  return {_mm256_castsi256_ps(
              _mm256_and_si256(_mm256_cmpgt_epi32(lane, lo), _mm256_cmpgt_epi32(hi, lane))),
      _mm256_castsi256_ps(
          _mm256_and_si256(_mm256_cmpgt_epi32(upper, lo), _mm256_cmpgt_epi32(hi, upper)))};
}

// lane 4 i + j: the largest of lanes 4 i ... 4 i + 3 of x[j]
static inline __m256 max_twos(__m256 a, __m256 b) {
  return _mm256_max_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xDD));
}
static inline VF f_max_fours(const VF* x) {
  return {max_twos(max_twos(x[0].a, x[1].a), max_twos(x[2].a, x[3].a)),
      max_twos(max_twos(x[0].b, x[1].b), max_twos(x[2].b, x[3].b))};
}
// each lane i and lane i ^ N
template <int N> static inline VF f_swap(VF x) {
  if constexpr (N == 8) return {x.b, x.a};
  if constexpr (N == 4)
    return {_mm256_permute2f128_ps(x.a, x.a, 1), _mm256_permute2f128_ps(x.b, x.b, 1)};
  constexpr int ORDER = N == 1 ? 0xB1 : 0x4E;
  return {_mm256_permute_ps(x.a, ORDER), _mm256_permute_ps(x.b, ORDER)};
}
static inline uint32_t m_bits(VM m) {
  return (uint32_t)_mm256_movemask_ps(m.a) | (uint32_t)_mm256_movemask_ps(m.b) << 8;
}

static inline VI f_bits(VF x) {
  return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)};
}
static inline VI i_load(const int32_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
static inline VI i_set(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
static inline void i_store(int32_t* p, VI x) {
  _mm256_storeu_si256((__m256i*)p, x.a);
  _mm256_storeu_si256((__m256i*)p + 1, x.b);
}
static inline VI i_add(VI x, VI y) {
  return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
static inline VI i_sub(VI x, VI y) {
  return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)};
}
static inline VI i_and(VI x, VI y) {
  return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)};
}
static inline VI i_max(VI x, VI y) {
  return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)};
}
// Lanes as pairs of 16 bits: acc + x.low * y.low + x.high * y.high; the low halves of `low` under
// those of `high`, whose own are zero
static inline VI i_dot16(VI acc, VI x, VI y) {
  return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(x.a, y.a)),
      _mm256_add_epi32(acc.b, _mm256_madd_epi16(x.b, y.b))};
}
static inline VI i_pair(VI low, VI high) {
  return {_mm256_blend_epi16(high.a, low.a, 0x55), _mm256_blend_epi16(high.b, low.b, 0x55)};
}
template <int N>
static inline VI i_shr(VI x) {
  return {_mm256_srai_epi32(x.a, N), _mm256_srai_epi32(x.b, N)};
}
static inline int32_t hadd_half(__m256i a, __m256i b) {
  a = _mm256_add_epi32(a, b);
  __m128i t = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(t, _mm_shuffle_epi32(t, 0xB1)));
}
static inline void i_hadd2(VI x, VI y, int32_t* sums) {
  sums[0] = hadd_half(x.a, x.b), sums[1] = hadd_half(y.a, y.b);
}
template <int N>
static inline VI i_shl(VI x) {
  return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)};
}
static inline VI i_round(VF x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
static inline void i_store8(int8_t* p, VI x) {
  const __m256i low = _mm256_set1_epi32(255);  // packing saturates: bytes first
  __m256i w = _mm256_packus_epi32(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low));
  w = _mm256_permutevar8x32_epi32(
      _mm256_packus_epi16(w, w), _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5));
  _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(w));
}

static inline __m256i low16(VI x) {
  const __m256i low = _mm256_set1_epi32(0xFFFF);
  return _mm256_permute4x64_epi64(
      _mm256_packus_epi32(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low)), 0xD8);
}
// the low 16 bits of x's lanes, then of y's
static inline void i_store16(int16_t* p, VI x, VI y) {
  _mm256_storeu_si256((__m256i*)p, low16(x));
  _mm256_storeu_si256((__m256i*)p + 1, low16(y));
}
// 32 signed bytes as pairs of 16 bits
static inline VI i_widen8(const int8_t* p) {
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)),
      _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p + 1))};
}

static inline VB b_load(const uint8_t* p) {
  return {_mm256_load_si256((const __m256i*)p), _mm256_load_si256((const __m256i*)p + 1)};
}
static inline VB b_low(VB x) {
  __m256i m = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
static inline VB b_high(VB x) {
  __m256i m = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(x.a, 4), m),
      _mm256_and_si256(_mm256_srli_epi16(x.b, 4), m)};
}
static inline __m256i bit5_half(__m256i x, uint32_t bits) {
  __m256i byte = _mm256_shuffle_epi8(_mm256_set1_epi32((int)bits),
      _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3,
          3, 3, 3, 3, 3, 3));
  __m256i one = _mm256_set1_epi64x((long long)0x8040201008040201ULL);
  __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(byte, one), one);
  return _mm256_or_si256(x, _mm256_and_si256(set, _mm256_set1_epi8(16)));
}
static inline VB b_bit5(VB x, const uint8_t* mask) {
  return {bit5_half(x.a, *(const uint32_t*)mask), bit5_half(x.b, *(const uint32_t*)(mask + 4))};
}
static inline VB b_lookup(VB x, const int8_t* table) {
  const __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  return {_mm256_shuffle_epi8(t, x.a), _mm256_shuffle_epi8(t, x.b)};
}
// signed to unsigned
static inline VB b_flip(VB x) {
  const __m256i m = _mm256_set1_epi8(-128);
  return {_mm256_xor_si256(x.a, m), _mm256_xor_si256(x.b, m)};
}
static inline VB b_or(VB x, VB y) {
  return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)};
}
template <int S, int MASK> static inline __m256i bits_half(__m256i x) {
  constexpr int LEFT = S < 0 ? -S : 0, RIGHT = S < 0 ? 0 : S;
  x = LEFT ? _mm256_slli_epi16(x, LEFT) : _mm256_srli_epi16(x, RIGHT);
  return _mm256_and_si256(x, _mm256_set1_epi8(MASK));
}
// Each byte shifted to the right (to the left where S is negative), and of that the bits in MASK.
template <int S, int MASK> static inline VB b_bits(VB x) {
  return {bits_half<S, MASK>(x.a), bits_half<S, MASK>(x.b)};
}
#ifdef __AVXVNNI__
// acc[row] += sum over 4 of u8 weight * s8 activation
template <bool WIDE> static inline VI b_dot(VI acc, VB w, const int8_t* a) {
  const __m256i x = _mm256_set1_epi32(*(const int32_t*)a);
  return {_mm256_dpbusd_avx_epi32(acc.a, w.a, x), _mm256_dpbusd_avx_epi32(acc.b, w.b, x)};
}
#else
// Sums of 16 bits: half as many instructions as with two widenings a line. Registers are then few
// for sums of whole rows, which lie in memory.
#define SHORT_SUMS
// in halves of 16 bits: sums over 2 of u8 weight * s8 activation, saturated
static inline VI b_pairs(VB w, __m256i x) {
  return {_mm256_maddubs_epi16(w.a, x), _mm256_maddubs_epi16(w.b, x)};
}
static inline __m256i b_repeat(const void* p) { return _mm256_set1_epi32(*(const int32_t*)p); }
static inline VI i_add16(VI x, VI y) {
  // of the intrinsic GCC 12 makes a tree of sums, whose parts it keeps in memory
  asm("vpaddw %1, %0, %0" : "+x"(x.a) : "x"(y.a));
  asm("vpaddw %1, %0, %0" : "+x"(x.b) : "x"(y.b));
  return x;
}
// The even bytes of a line of codes, and the odd ones, as 16 bits.
static inline VI b_even(VB x) {
  const __m256i m = _mm256_set1_epi16(255);
  return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
static inline VI b_odd(VB x) { return {_mm256_srli_epi16(x.a, 8), _mm256_srli_epi16(x.b, 8)}; }
static inline VI i_dot16_repeated(VI acc, VI w, __m256i x) {
  w = {_mm256_madd_epi16(w.a, x), _mm256_madd_epi16(w.b, x)};
  asm("vpaddd %1, %0, %0" : "+x"(acc.a) : "x"(w.a));  // as in i_add16
  asm("vpaddd %1, %0, %0" : "+x"(acc.b) : "x"(w.b));
  return acc;
}
// A group's digits likewise, 16 even ones and 16 odd ones: those at `low` and, if they are asked
// for, 256 times those at `high`.
template <bool BOTH>
static inline void b_widen(const int8_t* low, const int8_t* high, int16_t* out) {
  const __m256i l = _mm256_load_si256((const __m256i*)low);
  __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(l, 8), 8), odd = _mm256_srai_epi16(l, 8);
  if constexpr (BOTH) {
    const __m256i h = _mm256_load_si256((const __m256i*)high);
    even = _mm256_add_epi16(even, _mm256_slli_epi16(h, 8));
    odd = _mm256_add_epi16(odd, _mm256_and_si256(h, _mm256_set1_epi16((short)0xFF00)));
  }
  _mm256_store_si256((__m256i*)out, even);
  _mm256_store_si256((__m256i*)out + 1, odd);
}
#endif

static inline __m256 h_half(__m256 acc, __m256i line, __m256i pair) {
  const __m256i high = _mm256_set1_epi32((int)0xFFFF0000);
  acc = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(line, 16)),
      _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16)), acc);
  return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(line, high)),
      _mm256_castsi256_ps(_mm256_and_si256(pair, high)), acc);
}
static inline VF h_dot(VF acc, const uint16_t* line, const uint16_t* pair) {
  __m256i y = _mm256_set1_epi32(*(const int32_t*)pair);
  return {h_half(acc.a, _mm256_load_si256((const __m256i*)line), y),
      h_half(acc.b, _mm256_load_si256((const __m256i*)line + 1), y)};
}
// the first and the second of each pair of a line
static inline VF h_even(const uint16_t* line) {
  const __m256i* p = (const __m256i*)line;
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_load_si256(p), 16)),
      _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_load_si256(p + 1), 16))};
}
static inline VF h_odd(const uint16_t* line) {
  const __m256i *p = (const __m256i*)line, high = _mm256_set1_epi32((int)0xFFFF0000);
  return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_load_si256(p), high)),
      _mm256_castsi256_ps(_mm256_and_si256(_mm256_load_si256(p + 1), high))};
}
static inline __m256 h_widen(const uint16_t* p) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
static inline VF h_load(const uint16_t* p) { return {h_widen(p), h_widen(p + 8)}; }
static inline __m256i round_half(__m256 x) {  // to nearest even; inputs are finite
  const __m256i u = _mm256_castps_si256(x),
                odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  return _mm256_srli_epi32(
      _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
}
static inline void h_store(uint16_t* p, VF x) {
  const __m256i packed = _mm256_packus_epi32(round_half(x.a), round_half(x.b));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xD8));
}

static inline float f_hadd(VF x) {
  float t[16];
  f_store(t, x);
  for (int w = 8; w; w /= 2) for (int i = 0; i < w; i++) t[i] += t[i + w];
  return t[0];
}
static inline float f_hmax(VF x) {
  __m256 a = _mm256_max_ps(x.a, x.b);
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
}
