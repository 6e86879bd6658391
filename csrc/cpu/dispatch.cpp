// Chooses the instruction set at run time, so that one library works on every machine of its architecture.
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <atomic>
#include <cstring>

#include "../include/kernels.h"

namespace neap {

namespace portable { const Kernels& table(); }
#if defined(__x86_64__)
namespace avx2 { const Kernels& table(); }
namespace avx512 { const Kernels& table(); }
#endif

namespace {

std::atomic<const Kernels*> chosen{nullptr};

#if defined(__x86_64__)
// Needed because some compilers' __builtin_cpu_supports does not know F16C.
bool has_f16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}
#endif

// The kernels of the rank-th best instruction set, or null if this machine does not have it.
const Kernels* candidate(int rank) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  if (rank == 0) return has_avx2 && __builtin_cpu_supports("avx512f") ? &avx512::table() : nullptr;
  if (rank == 1) return has_avx2 ? &avx2::table() : nullptr;
#endif
  return rank == 2 ? &portable::table() : nullptr;
}

}  // namespace

const Kernels& kernels() {
  const Kernels* current = chosen.load(std::memory_order_acquire);
  if (current == nullptr) {
    select_kernels("auto");
    current = chosen.load(std::memory_order_acquire);
  }
  return *current;
}

bool select_kernels(const char* name) {
  for (int rank = 0; rank < 3; ++rank) {
    const Kernels* found = candidate(rank);
    if (found && (std::strcmp(name, "auto") == 0 || std::strcmp(name, found->name) == 0)) {
      chosen.store(found, std::memory_order_release);
      return true;
    }
  }
  return false;
}

}  // namespace neap
