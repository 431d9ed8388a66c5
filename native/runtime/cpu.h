#pragma once
#include <string>

#include "../kernels/api.h"

namespace octavo {

// The kernels for `isa` ("avx512", "avx2", "scalar"), or the best this host runs when it is empty.
// Throws std::runtime_error when the host lacks it.
const Kernels* select_kernels(const std::string& isa);

}  // namespace octavo
