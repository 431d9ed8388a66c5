// Kernels for avxvnni; see simd_avx2.h for what they need.
#include <immintrin.h>

#include "api.h"

namespace octavo {
namespace {
namespace avxvnni {
#define ISA_NAME "avxvnni"
#include "simd_avx2.h"
#include "linear.inc"
#include "linear_floats.inc"
#include "elementwise.inc"
#include "attention.inc"
#include "attention_registers.inc"
#include "limits.inc"
#include "resize.inc"
#include "table.inc"
}  // namespace avxvnni
}  // namespace

const Kernels* kernels_avxvnni() { return avxvnni::table(); }

}  // namespace octavo
