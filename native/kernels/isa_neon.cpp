// Kernels for NEON; see simd_neon.h for what they need.
#include <arm_neon.h>

#include "api.h"

namespace octavo {
namespace {
namespace neon {
#define ISA_NAME "neon"
#include "simd_neon.h"
#include "linear.inc"
#include "linear_floats.inc"
#include "elementwise.inc"
#include "attention.inc"
#include "attention_registers.inc"
#include "limits.inc"
#include "resize.inc"
#include "table.inc"
}  // namespace neon
}  // namespace

const Kernels* kernels_neon() { return neon::table(); }

}  // namespace octavo
