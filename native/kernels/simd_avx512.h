// 16 lanes in one 512-bit register. Needs F, BW, DQ, VL, VNNI; uses BF16 where the compiler is told
// of it.
#include <immintrin.h>

// tokens per integer register tile: 8 weight lines + 8 accumulators + temporaries
constexpr int TOKEN_TILE = 8;
// panels that share what is read of tokens whose groups have scales: a digit that is broadcast once
// serves both
constexpr int PAIR = 2;
constexpr int FLOAT_TILE = 6, FLOAT_SUMS = 24;  // tokens of a tile of floats, sums in registers
constexpr int ATTEND_TILE = 16;  // sums of a tile of attention

struct VF { __m512 v; };
struct VI { __m512i v; };
struct VB { __m512i v; };  // 64 bytes: 16 rows x 4 features
struct VM { __mmask16 v; };

static inline VF f_load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void f_store(float* p, VF a) { _mm512_storeu_ps(p, a.v); }
static inline VF f_set(float x) { return {_mm512_set1_ps(x)}; }
static inline VF f_add(VF a, VF b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline VF f_sub(VF a, VF b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline VF f_mul(VF a, VF b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline VF f_div(VF a, VF b) { return {_mm512_div_ps(a.v, b.v)}; }
// 1 / a within 1 ulp or so: a Newton step doubles the 14 bits; a finite and not tiny
static inline VF f_inverse(VF a) {
  const __m512 r = _mm512_rcp14_ps(a.v);
  return {_mm512_fmadd_ps(_mm512_fnmadd_ps(a.v, r, _mm512_set1_ps(1)), r, r)};
}
static inline VF f_fma(VF a, VF b, VF c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline VF f_max(VF a, VF b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline VF f_min(VF a, VF b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline VF f_abs(VF a) { return {_mm512_abs_ps(a.v)}; }
static inline VF f_round(VF a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
static inline VF f_half(const void* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))};
}
static inline VF f_table(const uint8_t* p, int high, VF table) {
  const __m512i b = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  // reads the low four bits
  return {_mm512_permutexvar_ps(high ? _mm512_srli_epi32(b, 4) : b, table.v)};
}
static inline VF f_e8m0(const uint8_t* p) {  // 2^(p - 128)
  const __m512i b = _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)), 23);
  return {_mm512_mul_ps(_mm512_castsi512_ps(_mm512_max_epu32(b, _mm512_set1_epi32(0x00400000))),
      _mm512_set1_ps(0.5f))};
}
static inline VF f_fp8(const uint8_t* p) {  // e4m3; 2^120 moves the exponent's bias from 127 to 7
  // the sign, five times
  const __m512i b = _mm512_slli_epi32(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)), 20);
  return {
      _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(b, _mm512_set1_epi32((int)0x87F00000))),
          _mm512_set1_ps(0x1p120f))};
}
static inline VF f_int(VI a) { return {_mm512_cvtepi32_ps(a.v)}; }
static inline VF f_u8(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
static inline VF f_u4(const uint8_t* p, int high) {  // low or high nibbles
  const __m512i b = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  return {_mm512_cvtepi32_ps(
      high ? _mm512_srli_epi32(b, 4) : _mm512_and_si512(b, _mm512_set1_epi32(15)))};
}
static inline VF f_s8(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
static inline VF f_scale2(VF x, VF n) { return {_mm512_scalef_ps(x.v, n.v)}; }  // x * 2^n
static inline VF f_even(VF a, VF b) {  // lanes 0, 2, 4... of a, then of b
  const __m512i at = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  return {_mm512_permutex2var_ps(a.v, at, b.v)};
}
static inline VF f_odd(VF a, VF b) {
  const __m512i at = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  return {_mm512_permutex2var_ps(a.v, at, b.v)};
}
// lane 4 i + j: the largest of lanes 4 i ... 4 i + 3 of x[j]
static inline VF f_max_fours(const VF* x) {
  const auto by_twos = [](VF a, VF b) {
    return _mm512_max_ps(_mm512_shuffle_ps(a.v, b.v, 0x88), _mm512_shuffle_ps(a.v, b.v, 0xDD));
  };
  return {by_twos({by_twos(x[0], x[1])}, {by_twos(x[2], x[3])})};
}
// each lane i and lane i ^ N
template <int N> static inline VF f_swap(VF a) {
  if constexpr (N < 4) return {_mm512_permute_ps(a.v, N == 1 ? 0xB1 : 0x4E)};
  else return {_mm512_shuffle_f32x4(a.v, a.v, N == 4 ? 0xB1 : 0x4E)};
}
static inline uint32_t m_bits(VM m) { return m.v; }
static inline VM f_le(VF a, VF b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ)}; }
static inline VF f_select(VM m, VF yes, VF no) { return {_mm512_mask_mov_ps(no.v, m.v, yes.v)}; }
static inline VM m_range(int begin, int end) {  // lanes begin <= i < end
  uint32_t hi = end >= 16 ? 0xFFFF : end <= 0 ? 0 : (1u << end) - 1;
  uint32_t lo = begin >= 16 ? 0xFFFF : begin <= 0 ? 0 : (1u << begin) - 1;
  return {(__mmask16)(hi & ~lo)};
}

static inline VI f_bits(VF a) { return {_mm512_castps_si512(a.v)}; }
static inline VI i_load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
static inline VI i_set(int32_t x) { return {_mm512_set1_epi32(x)}; }
static inline void i_store(int32_t* p, VI a) { _mm512_storeu_si512(p, a.v); }
static inline VI i_add(VI a, VI b) { return {_mm512_add_epi32(a.v, b.v)}; }
static inline VI i_sub(VI a, VI b) { return {_mm512_sub_epi32(a.v, b.v)}; }
static inline VI i_and(VI a, VI b) { return {_mm512_and_si512(a.v, b.v)}; }
static inline VI i_max(VI a, VI b) { return {_mm512_max_epi32(a.v, b.v)}; }
// Lanes as pairs of 16 bits: acc + a.low * b.low + a.high * b.high; the low halves of `low` under
// those of `high`, whose own are zero
static inline VI i_dot16(VI acc, VI a, VI b) {
  // GCC 12 copies the accumulator before and after the intrinsic, whose lanes have another type
  asm("vpdpwssd %2, %1, %0" : "+v"(acc.v) : "v"(a.v), "v"(b.v));
  return acc;
}
static inline VI i_pair(VI low, VI high) {
  return {_mm512_mask_mov_epi16(high.v, 0x55555555, low.v)};
}
template <int N> static inline VI i_shr(VI a) { return {_mm512_srai_epi32(a.v, N)}; }
static inline void i_hadd2(VI a, VI b, int32_t* sums) {
  __m512i t =
      _mm512_add_epi32(_mm512_shuffle_i64x2(a.v, b.v, 0x44), _mm512_shuffle_i64x2(a.v, b.v, 0xEE));
  t = _mm512_add_epi32(t, _mm512_shuffle_i64x2(t, t, 0xB1));
  t = _mm512_add_epi32(t, _mm512_shuffle_epi32(t, (_MM_PERM_ENUM)0x4E));
  t = _mm512_add_epi32(t, _mm512_shuffle_epi32(t, (_MM_PERM_ENUM)0xB1));
  sums[0] = _mm_cvtsi128_si32(_mm512_castsi512_si128(t));
  sums[1] = _mm_cvtsi128_si32(_mm512_extracti32x4_epi32(t, 2));
}
template <int N> static inline VI i_shl(VI a) { return {_mm512_slli_epi32(a.v, N)}; }
static inline VI i_round(VF a) { return {_mm512_cvtps_epi32(a.v)}; }
static inline void i_store8(int8_t* p, VI a) {
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a.v));
}

// the low 16 bits of a's lanes, then of b's
static inline void i_store16(int16_t* p, VI a, VI b) {
  alignas(64) static constexpr int16_t LOW[32] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26,
      28, 30, 32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
  _mm512_storeu_si512(p, _mm512_permutex2var_epi16(a.v, _mm512_load_si512(LOW), b.v));
}
// 32 signed bytes as pairs of 16 bits
static inline VI i_widen8(const int8_t* p) {
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p))};
}

static inline VB b_load(const uint8_t* p) { return {_mm512_load_si512(p)}; }
static inline VB b_low(VB a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
static inline VB b_high(VB a) {
  return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))};
}
// adds 16 where the bit of the 64-bit mask is set
static inline VB b_bit5(VB a, const uint8_t* mask) {
  return {_mm512_mask_add_epi8(a.v, *(const uint64_t*)mask, a.v, _mm512_set1_epi8(16))};
}
static inline VB b_lookup(VB a, const int8_t* table) {
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), a.v)};
}
// signed to unsigned: adds 128
static inline VB b_flip(VB a) { return {_mm512_xor_si512(a.v, _mm512_set1_epi8(-128))}; }
static inline VB b_or(VB a, VB b) { return {_mm512_or_si512(a.v, b.v)}; }
// Each byte shifted to the right (to the left where S is negative), and of that the bits in MASK.
template <int S, int MASK> static inline VB b_bits(VB a) {
  constexpr int LEFT = S < 0 ? -S : 0, RIGHT = S < 0 ? 0 : S;
  const __m512i x = LEFT ? _mm512_slli_epi16(a.v, LEFT) : _mm512_srli_epi16(a.v, RIGHT);
  return {_mm512_and_si512(x, _mm512_set1_epi8(MASK))};
}
// acc[row] += sum over 4 of u8 weight * s8 activation; WIDE: weights may exceed 127
template <bool WIDE> static inline VI b_dot(VI acc, VB w, const int8_t* a) {
  // GCC 12 does not let the instruction broadcast what it reads
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc.v) : "v"(w.v), "m"(*(const int32_t*)a));
  return acc;
}
// The same of two panels, which read the digits once.
#define DOT_PAIR b_dot_pair
static inline void b_dot_pair(VI& first, VI& second, VB v, VB w, const int8_t* a) {
  __m512i x;
  asm("vpbroadcastd %1, %0" : "=v"(x) : "m"(*(const int32_t*)a));
  asm("vpdpbusd %2, %1, %0" : "+v"(first.v) : "v"(v.v), "v"(x));
  asm("vpdpbusd %2, %1, %0" : "+v"(second.v) : "v"(w.v), "v"(x));
}

static inline VF h_load(const uint16_t* p) {
  return {_mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
// the first and the second of each pair of a line
static inline VF h_even(const uint16_t* line) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_load_si512(line), 16))};
}
static inline VF h_odd(const uint16_t* line) {
  return {_mm512_castsi512_ps(
      _mm512_and_si512(_mm512_load_si512(line), _mm512_set1_epi32((int)0xFFFF0000)))};
}
// h_dot: acc[lane] += x0 * y0 + x1 * y1 over bf16 pairs; y is broadcast. h_store rounds to nearest
// even.
#ifdef __AVX512BF16__
#define BF16_DOT
static inline VF h_dot(VF acc, const uint16_t* line, const uint16_t* pair) {
  return {_mm512_dpbf16_ps(acc.v, (__m512bh)_mm512_load_si512(line),
      (__m512bh)_mm512_set1_epi32(*(const int32_t*)pair))};
}
static inline void h_store(uint16_t* p, VF a) {
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(a.v));
}
// two values as bf16, what is left of them as bf16, and so on
static inline void h_store_pairs(uint16_t* p, VF a) {
  const __m256bh values = _mm512_cvtneps_pbh(a.v);
  const __m512 rest = _mm512_sub_ps(a.v, _mm512_cvtpbh_ps(values));
  const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)values),
                    (__m256i)_mm512_cvtneps_pbh(rest), 1),
                by_turns = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
  _mm512_storeu_si512(p, _mm512_permutexvar_epi32(by_turns, both));
}
#else
static inline VF h_dot(VF acc, const uint16_t* line, const uint16_t* pair) {
  const __m512i x = _mm512_load_si512(line), y = _mm512_set1_epi32(*(const int32_t*)pair),
                high = _mm512_set1_epi32((int)0xFFFF0000);
  acc.v = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)),
      _mm512_castsi512_ps(_mm512_slli_epi32(y, 16)), acc.v);
  return {_mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(x, high)),
      _mm512_castsi512_ps(_mm512_and_si512(y, high)), acc.v)};
}
static inline void h_store(uint16_t* p, VF a) {
  const __m512i u = _mm512_castps_si512(a.v),
                odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
#endif

static inline float f_hadd(VF a) {  // fixed tree
  float t[16];
  _mm512_storeu_ps(t, a.v);
  for (int w = 8; w; w /= 2) for (int i = 0; i < w; i++) t[i] += t[i + w];
  return t[0];
}
static inline float f_hmax(VF a) { return _mm512_reduce_max_ps(a.v); }

#define LINE_DIGITS line_digits  // as the plain one of emit.inc
static void line_digits(const float* x, const VF* inverse, int8_t* q, int32_t* sums) {
  __m512i n[4], high[2], low[2];
  for (int i = 0; i < 4; i++) n[i] = i_round(f_mul(f_load(x + 16 * i), inverse[i / 2])).v;
  for (int i = 0; i < 2; i++) {
    const __m512i w = _mm512_packs_epi32(n[2 * i], n[2 * i + 1]);
    high[i] = _mm512_srai_epi16(_mm512_add_epi16(w, _mm512_set1_epi16(128)), 8);
    low[i] = _mm512_and_si512(w, _mm512_set1_epi16(255));
  }
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15),
                one = _mm512_set1_epi8(1);
  const __m512i h = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(high[0], high[1]));
  const __m512i l = _mm512_max_epi8(
      _mm512_permutexvar_epi32(order, _mm512_packus_epi16(low[0], low[1])), _mm512_set1_epi8(-127));
  _mm512_store_si512(q, h);
  _mm512_store_si512(q + DIGITS, l);
  // By four in each lane, then the fours of each quarter: a quarter's sum over high digits and over
  // low ones, next to each other.
  const __m512i a = _mm512_dpbusd_epi32(_mm512_setzero_si512(), one, h),
                b = _mm512_dpbusd_epi32(_mm512_setzero_si512(), one, l);
  __m512i t = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  t = _mm512_add_epi32(t, _mm512_shuffle_epi32(t, (_MM_PERM_ENUM)0x4E));
  const __m512i pick = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 0, 0, 0, 0, 0, 0, 0, 0);
  _mm256_storeu_si256((__m256i*)sums, _mm512_castsi512_si256(_mm512_permutexvar_epi32(pick, t)));
}
