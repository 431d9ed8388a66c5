// Kernels for AMX beside AVX-512: tiles where many rows meet, registers for the rest.
#include <immintrin.h>

#include "api.h"

namespace octavo {
namespace {
namespace amx {
#define ISA_NAME "amx"
#include "simd_avx512.h"
#include "linear.inc"
#include "linear_floats.inc"
#include "elementwise.inc"
#include "attention.inc"
#include "attention_registers.inc"
#include "limits.inc"
#include "resize.inc"
#define BASE kernels_avx512bf16
#include "amx.h"
#include "amx_linear.inc"
#include "amx_attention.inc"
#include "amx_limits.inc"
#define BLOCK_ROWS SHARED_ROWS
#define LINEAR(FORMAT, NUMBER) tile_linear<FORMAT, NUMBER>
#define LINEAR_BF16 bf16_linear
#define ATTEND_BF16 Tiles<false>
#define ATTEND_INT8 Tiles<true>
#define MULTIPLY multiply_tiles
#include "table.inc"
}  // namespace amx
}  // namespace

const Kernels* kernels_amx() { return amx::table(); }

}  // namespace octavo
