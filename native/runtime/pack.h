// Weight matrices as panels of 16 rows, made from the blocks of a checkpoint without loss.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../kernels/api.h"

namespace octavo {

// Of panels, and of the file that keeps them (Arena::save). Another number whenever either changes:
// files of older layouts are then not found.
constexpr int LAYOUT_VERSION = 4;

// Types as numbered in GGUF files.
enum GgmlType : int {  // from 1000 on: codes with scales apart, see Storage
  GGML_F32 = 0,
  GGML_F16 = 1,
  GGML_Q4_0 = 2,
  GGML_Q4_1 = 3,
  GGML_Q5_0 = 6,
  GGML_Q5_1 = 7,
  GGML_Q8_0 = 8,
  GGML_Q2_K = 10,
  GGML_Q3_K = 11,
  GGML_Q4_K = 12,
  GGML_Q5_K = 13,
  GGML_Q6_K = 14,
  GGML_IQ4_NL = 20,
  GGML_BF16 = 30,
  GGML_MXFP4 = 39,
  STORED_INT4 = 1010,
  STORED_INT4_MIN = 1011,
  STORED_INT8 = 1012,
  STORED_INT8_MIN = 1013,
  STORED_TABLE4 = 1014,
  STORED_FP8 = 1015,
};

// How a matrix comes: rows of blocks or floats; from STORED_INT4 on, a code a byte [rows][cols],
// then fp32 scales [rows][ceil(cols / group)], then minima likewise (_MIN) or sixteen values
// (TABLE4). Values are scale * (code - 8 or - 128), scale * code + minimum, scale * values[code],
// scale * e4m3(code).
struct Storage { int type, group; };

// throws std::invalid_argument for other types
Format panel_format(int ggml_type);
bool is_grouped(Format format);
bool is_fixed(Format format);                           // multiplied in fixed point
bool has_halves(Format format);                         // scales for each 16 features
bool has_minima(Format format);                         // codes stand for scale * code + minimum
size_t stored_bytes(Storage storage, size_t rows, size_t cols);
size_t panel_bytes(Format format, int group, size_t cols);
inline size_t padded_cols(size_t cols) { return (cols + 63) / 64 * 64; }

// Packs rows [panel * 16, panel * 16 + 16) of a row-major matrix; rows past the end are zero.
void pack_panel(
    Storage storage, const uint8_t* data, size_t rows, size_t cols, size_t panel, uint8_t* out);

// Row `lane` of a panel as floats: the plain statement of what each layout means.
void unpack_row(Format format, int group, const uint8_t* panel, int lane, size_t cols, float* out);

}  // namespace octavo
