// Kernels for avx512bf16: those of avx512vnni, and products of bf16 values in one instruction.
#include <immintrin.h>

#include "api.h"

namespace octavo {
namespace {
namespace avx512bf16 {
#define ISA_NAME "avx512bf16"
#include "simd_avx512.h"
#include "linear.inc"
#include "linear_floats.inc"
#include "elementwise.inc"
#include "attention.inc"
#include "attention_registers.inc"
#include "limits.inc"
#include "resize.inc"
#define BASE kernels_avx512vnni
#include "table.inc"
}  // namespace avx512bf16
}  // namespace

const Kernels* kernels_avx512bf16() { return avx512bf16::table(); }

}  // namespace octavo
