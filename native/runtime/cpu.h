#pragma once
#include <string>
#include <vector>

#include "../kernels/api.h"

namespace octavo {

// The instruction sets whose kernels this host runs, best first. "scalar" is always the last.
std::vector<std::string> runnable_isas();

// The kernels for one of them, or the best when `isa` is empty.
// Throws std::runtime_error when the host lacks it.
const Kernels* select_kernels(const std::string& isa);

}  // namespace octavo
