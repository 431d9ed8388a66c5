// Kernels for avx512vnni; see simd_avx512.h for what they need.
#include <immintrin.h>

#include "api.h"

namespace octavo {
namespace {
namespace avx512vnni {
#define ISA_NAME "avx512vnni"
#include "simd_avx512.h"
#include "linear.inc"
#include "linear_floats.inc"
#include "elementwise.inc"
#include "attention.inc"
#include "attention_registers.inc"
#include "limits.inc"
#include "resize.inc"
#include "table.inc"
}  // namespace avx512vnni
}  // namespace

const Kernels* kernels_avx512vnni() { return avx512vnni::table(); }

}  // namespace octavo
