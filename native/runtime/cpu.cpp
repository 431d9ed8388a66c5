#include "cpu.h"

#include <stdexcept>

namespace octavo {
namespace {

// GCC's built-in checks cpuid and XGETBV, so a host whose kernel does not save wide registers is not fooled.
bool has_avx512() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

bool has_avx2() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

}  // namespace

const Kernels* select_kernels(const std::string& isa) {
#if defined(__x86_64__)
  if ((isa.empty() || isa == "avx512") && has_avx512()) return kernels_avx512();
  if ((isa.empty() || isa == "avx2") && has_avx2()) return kernels_avx2();
#endif
  if (isa.empty() || isa == "scalar") return kernels_scalar();
  if (isa == "avx512" || isa == "avx2") throw std::runtime_error("this CPU cannot run the " + isa + " kernels");
  throw std::runtime_error("OCTAVO_ISA is \"" + isa + "\"; it may be avx512, avx2 or scalar");
}

}  // namespace octavo
