// Kernels for avx512-vnni-bf16; see simd_avx512.h for what it needs.
#include <immintrin.h>

#include "api.h"

namespace octavo {
namespace {
namespace avx512 {
#define ISA_NAME "avx512-vnni-bf16"
#include "simd_avx512.h"
#include "linear.inc"
#include "elementwise.inc"
#include "attention.inc"
#include "table.inc"
}  // namespace avx512
}  // namespace

const Kernels* kernels_avx512() { return &avx512::TABLE; }

}  // namespace octavo
