// What a kernel is given: plain structs and one table of function pointers per instruction set.
// Kernel translation units include only this header and C headers, so that no inline function of
// the C++ library can be emitted with instructions the host does not have.
#pragma once
#include <stddef.h>
#include <stdint.h>

// Pieces of kernels: GCC leaves some out of line otherwise, and their vectors then pass through
// memory.
#define INLINE static inline __attribute__((always_inline))

namespace octavo {

// f(0) ... f(N - 1), expanded so early that arrays indexed by the argument become registers.
template <int N, class F> INLINE void repeat(F&& f) {
  if constexpr (N > 0) {
    repeat<N - 1>(f);
    f(N - 1);
  }
}
#define EXPANDED __attribute__((always_inline))

// Stored form of a weight matrix. Every form is a sequence of panels of 16 output rows.
// Layouts are described beside the packers in runtime/pack.cpp.
enum Format : int {
  Q4_0,
  Q4_1,
  Q5_0,
  Q5_1,
  IQ4_NL,
  MXFP4,
  Q8_0,
  Q2_K,
  Q3_K,
  Q4_K,
  Q5_K,
  Q6_K,
  CODE4,
  CODE4_MIN,
  CODE8,
  CODE8_MIN,
  BF16,
  F16,
  F32,
  TABLE4,
  FP8,
  FORMATS
};

constexpr int8_t IQ4_NL_VALUES[16] = {
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
// twice what they stand for
constexpr int8_t MXFP4_VALUES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
constexpr int PANEL = 16;         // output rows per panel = lanes of one vector
constexpr int GROUP = 32;         // input features whose sums are taken together
constexpr int DIGIT = 8;          // an activation is 2^DIGIT * high + low, two signed bytes
constexpr int GROUP_LINES = 8;    // of a group, as it lies in panels: four features of 16 rows each
constexpr int LINE_DIGIT = 4;     // second digits of single lines count 2^LINE_DIGIT
constexpr int MIDDLE = 8;         // where four-bit codes are counted from in fixed point
constexpr int LINE = 64;          // input features whose digits lie together
constexpr int ROW_TILE = 16;      // token rows that lie together
constexpr int BLOCK = 16;         // tokens per KV block
// dimensions of a cached int8 key or value that share a bf16 scale
constexpr int KV_GROUP = 16;
constexpr int KV_TILE = 64;       // tokens per softmax tile
// tokens per attention partial; fixed, so results never depend on threads
constexpr int KV_CHUNK = 256;
constexpr int ATTEND_ROWS = 16;   // query rows (token, head) handled together
constexpr int WIDEST_HEAD = 512;  // most dimensions of an attention head
constexpr float MASKED = -1e30f;  // running maximum before any key has been seen

INLINE int kv_groups(int padded) { return padded / KV_GROUP; }

enum KvType : int { KV_F32, KV_BF16, KV_INT8 };

// The input of linear layers, in the forms that its consumers read. Unused forms are null.
// Rows are tokens, allocated in whole tiles of 16; `k` is the feature count rounded up to 64
// (padding is zero). What belongs to a group of 32 features is tiled: entry (row, group) lies at
// `tiled(row, group, groups)`.
struct Act {
  int k;
  // x = scale * (256 * high + low), digits from -127 to 127: per tile of rows and 64 features, in
  // whole lines of 64 bytes
  int8_t* q;
                      //                 16 rows of 64 high digits, then as many low ones; see
                      //                 `digits`
  float* scale;       // 1 a row; or k / 32 where groups have scales of their own (`scaled`)
  int32_t* start_high;  // k / 32 a row  for fixed point: sums of high digits times -MIDDLE
  int32_t* start_low;   // k / 32 a row  and of low ones
  int32_t* pair_high;   // k / 64 a row  two groups' sums of high digits, as halves of 16 bits
  int32_t* pair_low;    // k / 64 a row  and of low ones
  int32_t* neg_high;  // k / 32 a row    of `scaled` groups: minus the sum of the high digits
  int32_t* neg_low;   // k / 32 a row    and of the low ones; of x / scale with
                      //                 `second_lines` of 1 or 2
  float* sum;         // k / 32 a row    for grouped floats: sum(256 * high + low), for minima;
                      //                 of `scaled` groups times their scale
  int32_t* neg32;     // k / 32 a row    minus that sum: a zero point is removed by a shift
  // the same per 16, for formats with scales for so many, and null where none of them reads it
  int32_t* neg16;       // k / 16 a row  if `scaled`, as neg_low
  int32_t* neg16_high;  // k / 16 a row  and of high ones
  // two for each of k / 32 a row: which lines of a `scaled` group have high digits, as bytes of
  // weights from the first line; and those digits, four each, times 16. Null: a row has one scale.
  uint16_t* line;
  int8_t* second;
  // How many lines of a `scaled` group have high digits: none, 1 or 2, those with the largest
  // values, while the group's scale is that of the others, or all.
  int second_lines;
  uint16_t* bf16;     // x rounded to bf16, then, if `remainder`, what is left rounded to bf16; rows
                      //                 are `bf16_stride` apart. Without bf16 dot products: as fp32
                      //                 numbers, x itself if `remainder`
  bool remainder;
  float* f32;         // [rows][k]
  // forms that only adapters read: left out where a step has none that do
  bool adapted_bf16, adapted_f32;
};

// Whether groups have scales of their own.
INLINE bool scaled(const Act& a) { return a.line; }

// From a row of bf16 to the next, with room for all its forms: a line more than its values, for
// rows that are a power of two apart would fall into the same few lines of the cache.
INLINE size_t bf16_stride(const Act& a) {
  return 2 * (size_t)a.k + LINE / sizeof(uint16_t);
}

INLINE size_t tiled(int row, int group, int groups) {
  return ((size_t)(row / ROW_TILE) * groups + group) * ROW_TILE + row % ROW_TILE;
}

// bytes from a high digit to its low one; rows of a tile are LINE bytes apart
constexpr int DIGITS = ROW_TILE * LINE;
INLINE size_t digits(int row, int group, int groups) {
  return ((size_t)(row / ROW_TILE) * groups + group / 2 * 2) * DIGITS + row % ROW_TILE * LINE +
      group % 2 * GROUP;
}

struct LinearArgs {
  const uint8_t* panels;
  size_t panel_bytes;
  int k;                  // padded input features (multiple of 64; of 256 for K-quants)
  Act act;
  int rows;               // tokens
  float* out;             // [rows][out_stride]
  int out_stride;
  const float* bias;      // [N padded to 16] or null
  const float* residual;  // [rows][out_stride] added to the result, or null; may equal out
  // features that share a scale, in formats that leave it open: a multiple of 32
  int group = 0;
};

struct KeyRange {                // keys and values of one sequence and KV head
  // of this layer and KV head: pool + block * AttendArgs::block_stride
  const uint8_t* pool;
  const int32_t* blocks;         // block table of the sequence
  int begin, end;                // key positions
};

struct AttendArgs {
  // ATTEND_ROWS or fewer query rows that share one KV head and one block table.
  int rows;
  const void* q[ATTEND_ROWS];    // as store_q of the instruction set wrote them
  bool remainder = true;         // else queries that are bf16 values and remainders are bf16 alone
  int first[ATTEND_ROWS];        // the row sees keys in [first, last]; first may be negative
  int last[ATTEND_ROWS];
  float softcap;                 // scores s become softcap * tanh(s / softcap); 0: as they are
  int head_dim;                  // padded to 16
  size_t block_stride;
  KeyRange keys;                 // what to cover; begin is a multiple of KV_CHUNK
  KeyRange next;                 // what will be asked for after that; may be empty
  bool fetch;                    // ask for keys and values ahead: they are not in the core's cache
  float* max[ATTEND_ROWS];       // partial results: running maximum,
  float* sum[ATTEND_ROWS];       // sum of exponentials,
  float* out[ATTEND_ROWS];       // and weighted values [head_dim]
};

constexpr int WEIGHT_BITS = 22;   // of weights of pixels, which are integers
constexpr int RESIZED_ROWS = 4;   // of pixels, resized together
constexpr int READ_BEYOND = 16;   // bytes behind a row of pixels that are read, whatever they are

// What makes each of `size` pixels: `count` pixels from `first` on, times weights, of which there
// are `stride` a pixel, a multiple of 4, the rest of them zero.
struct Taps {
  int size, stride;
  const int32_t *first, *count, *weights;
};

struct Kernels {
  const char* name;
  int block_rows;  // for so many, each thread may well unpack all weights
  bool digits_together;  // codes of bytes meet both digits of an input at once, for the cost of one
  void (*linear[FORMATS])(const LinearArgs&, int panel_begin, int panel_end);
  void (*emit)(const Act&, int row, const float* x);  // x: as many values as act.k
  void (*rms_norm)(const float* x, const float* weight, int n, float eps, float* y);
  void (*gated)(int kind, const float* gate, const float* up, int stride, int rows, float* out,
      int out_stride, int count);
  // y[16 * p + i] += sum over r of b[p][r][i] * h[r] for `panels` panels of 16; b is fp32, or bf16
  // in the second.
  void (*add_low_rank[2])(const void* b, int rank, const float* h, int panels, float* y);
  void (*rope)(
      const float* in, const float* cos_sin, int half, int head_dim, int interleaved, float* out);
  // out: 4 bytes a dimension at most
  void (*store_q)(const float* x, int head_dim, int padded, float scale, KvType type, void* out);
  void (*store_k)(const float* x, int head_dim, int padded, int slot, KvType type, uint8_t* block);
  void (*store_v)(const float* x, int head_dim, int padded, int slot, KvType type, uint8_t* block);
  void (*attend[3])(const AttendArgs&);  // by KvType
  void (*merge)(float* max, float* sum, float* out, float m, float l, const float* o, int head_dim);
  void (*combine)(const float* max, const float* sum, const float* out, int count, int step,
      int padded, int head_dim, const float* sink, float* y);
  void (*softcap)(float* x, int n, float cap);  // n is rounded up to 16
  float (*row_max)(const float* x, int n);
  // out[i] = max of x[i], x[16 + i], x[32 + i] ...; n is a multiple of 16
  void (*peaks)(const float* x, int n, float* out);
  // the largest of 2^DIGIT * x + error * norm; n is a multiple of 16
  float (*bound)(const float* x, const float* norms, float error, int n);
  double (*exp_sum)(const float* x, int n, float max, float inv_temperature, float* p);
  // Limits of the host: all bytes read; operations of byte products in registers, and by the widest
  // means there is.
  uint64_t (*read)(const uint8_t* p, size_t bytes);
  double (*multiply_registers)(long rounds, int32_t* sink);
  double (*multiply)(long rounds, int32_t* sink);
  // Rows of RGB to rows of another width, and bytes of several rows to one row.
  void (*resize_across)(const uint8_t* const rows[RESIZED_ROWS], const Taps& taps,
      uint8_t* const out[RESIZED_ROWS]);
  void (*resize_down)(const uint8_t* rows, size_t stride, const int32_t* weights, int count,
      size_t bytes, uint8_t* out);  // weights: as many as Taps has
};

const Kernels* kernels_amx();
const Kernels* kernels_avx512bf16();
const Kernels* kernels_avx512vnni();
const Kernels* kernels_avxvnni();
const Kernels* kernels_avx2();
const Kernels* kernels_neon();
const Kernels* kernels_scalar();

}  // namespace octavo
