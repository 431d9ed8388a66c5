// Kernels for avx2; see simd_avx2.h for what they need.
#include <immintrin.h>

#include "api.h"

namespace octavo {
namespace {
namespace avx2 {
#define ISA_NAME "avx2"
#include "simd_avx2.h"
#include "linear.inc"
#include "linear_floats.inc"
#include "elementwise.inc"
#include "attention.inc"
#include "attention_registers.inc"
#include "limits.inc"
#include "resize.inc"
#include "table.inc"
}  // namespace avx2
}  // namespace

const Kernels* kernels_avx2() { return avx2::table(); }

}  // namespace octavo
