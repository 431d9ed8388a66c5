// Kernels for scalar; see simd_scalar.h for what it needs.
#include <math.h>
#include <string.h>

#include "api.h"

namespace octavo {
namespace {
namespace scalar {
#define ISA_NAME "scalar"
#include "simd_scalar.h"
#include "linear.inc"
#include "linear_floats.inc"
#include "elementwise.inc"
#include "attention.inc"
#include "attention_registers.inc"
#include "limits.inc"
#include "resize.inc"
#include "table.inc"
}  // namespace scalar
}  // namespace

const Kernels* kernels_scalar() { return scalar::table(); }

}  // namespace octavo
