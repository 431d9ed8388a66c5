#include "cpu.h"

#include <algorithm>
#include <stdexcept>

#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace octavo {
namespace {

#if defined(__x86_64__)
// GCC's built-ins check cpuid and XGETBV, so a host whose kernel does not save wide registers is
// not fooled.
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c");
}

bool has_avx512vnni() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vnni");
}

bool has_avx512bf16() { return has_avx512vnni() && __builtin_cpu_supports("avx512bf16"); }

bool cpuid7(unsigned subleaf, int bit, bool edx) {
  unsigned a = 7, b, c = subleaf, d;
  asm volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  return ((edx ? d : a) >> bit) & 1;
}

bool has_avxvnni() { return has_avx2() && cpuid7(1, 4, false); }

// Tile registers are saved only for processes that ask Linux for them (ARCH_REQ_XCOMP_PERM,
// XTILEDATA).
bool has_amx() {
  constexpr int REQUEST = 0x1023, TILE_DATA = 18;
  return has_avx512bf16() && cpuid7(0, 24, true) && cpuid7(0, 25, true) && cpuid7(0, 22, true) &&
         syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}
#endif

#if defined(__aarch64__)
bool has_dotprod() { return getauxval(AT_HWCAP) & HWCAP_ASIMDDP; }
#endif

bool always() { return true; }

struct Isa { const char* name; bool (*runs)(); const Kernels* (*kernels)(); };

const Isa ISAS[] = {  // best first
#if defined(__x86_64__)
    {"amx", has_amx, kernels_amx},
    {"avx512bf16", has_avx512bf16, kernels_avx512bf16},
    {"avx512vnni", has_avx512vnni, kernels_avx512vnni},
    {"avxvnni", has_avxvnni, kernels_avxvnni},
    {"avx2", has_avx2, kernels_avx2},
#elif defined(__aarch64__)
    {"neon", has_dotprod, kernels_neon},
#endif
    {"scalar", always, kernels_scalar},
};

}  // namespace

std::vector<std::string> runnable_isas() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
  std::vector<std::string> names;
  for (const Isa& i : ISAS) if (i.runs()) names.push_back(i.name);
#if defined(__x86_64__)
  // Intel's processors take four times as long for products of bf16 pairs as for fp32 ones, which
  // are half as many: sets without them are quicker there.
  const auto pairs = std::find(names.begin(), names.end(), "avx512bf16");
  if (pairs != names.end() && __builtin_cpu_is("intel")) std::iter_swap(pairs, pairs + 1);
#endif
  return names;
}

const Kernels* select_kernels(const std::string& isa) {
  const std::vector<std::string> runnable = runnable_isas();
  const std::string& wanted = isa.empty() ? runnable[0] : isa;
  std::string names;
  for (const Isa& i : ISAS) {
    names += std::string(names.empty() ? "" : ", ") + i.name;
    if (wanted != i.name) continue;
    for (const std::string& name : runnable) if (name == wanted) return i.kernels();
    throw std::runtime_error("this CPU cannot run the " + wanted + " kernels");
  }
  throw std::runtime_error("OCTAVO_ISA is \"" + isa + "\"; it may be one of " + names);
}

}  // namespace octavo
