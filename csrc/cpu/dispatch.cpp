// Chooses the instruction set at run time, so that one library works on every machine of its architecture.
//
// The choice follows the processor's features and nothing else: instruction sets differ in the last bits of their
// results, so machines of one kind must choose alike (decision 003). Each set asks for exactly what its object is
// compiled with: ISA_FLAGS in shared/ops/build.py. `amx`, which needs the system's leave for its unit as well, gives
// the bits of the set whose object it is in.
#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif
#include <atomic>
#include <cstring>

#include "../include/kernels.h"

namespace neap {

#if defined(__x86_64__)
namespace avx2 { const Kernels& table(); }
namespace avx512 { const Kernels& table(); }
namespace avx512bf16 {
const Kernels& table();
const Kernels& amx_table();
}  // namespace avx512bf16
#endif
#if defined(__aarch64__)
namespace i8mm { const Kernels& table(); }
namespace dotprod { const Kernels& table(); }
namespace neon { const Kernels& table(); }
#else
namespace portable { const Kernels& table(); }
#endif

namespace {

std::atomic<const Kernels*> chosen{nullptr};

#if defined(__x86_64__)
// Needed because some compilers' __builtin_cpu_supports does not know F16C.
bool has_f16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}

// Whether there is a matrix unit for bytes, and the system lets this process use its registers. Threads whose signals
// have too small a stack for them make it refuse.
bool has_amx() {
#if defined(__linux__)
  constexpr unsigned kTileAndInt8 = 3u << 24;
  constexpr int kRequestFeature = 0x1023, kTileData = 18;
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & kTileAndInt8) == kTileAndInt8 &&
         syscall(SYS_arch_prctl, kRequestFeature, kTileData) == 0;
#else
  return false;
#endif
}
#elif defined(__aarch64__) && defined(__APPLE__)
bool has(const char* feature) {
  int value = 0;
  size_t size = sizeof(value);
  return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value != 0;
}
bool has_dotprod() { return has("hw.optional.arm.FEAT_DotProd"); }
bool has_i8mm() { return has("hw.optional.arm.FEAT_I8MM") && has("hw.optional.arm.FEAT_BF16"); }
#elif defined(__aarch64__)
// Linux's numbers, which old headers lack: CRC32, ATOMICS and ASIMDRDM of ARMv8.2, and ASIMDDP; I8MM and BF16.
bool has(unsigned long type, unsigned long wanted) { return (getauxval(type) & wanted) == wanted; }
bool has_dotprod() { return has(AT_HWCAP, 1ul << 7 | 1ul << 8 | 1ul << 12 | 1ul << 20); }
bool has_i8mm() { return has(AT_HWCAP2, 1ul << 13 | 1ul << 14); }
#endif

constexpr int kSets = 5;

// The kernels of the rank-th widest instruction set, or null if this machine does not have it.
const Kernels* candidate(int rank) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
  const bool has_bf16 = has_avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  if (rank == 0) return has_bf16 && has_amx() ? &avx512bf16::amx_table() : nullptr;
  if (rank == 1) return has_bf16 ? &avx512bf16::table() : nullptr;
  if (rank == 2) return has_avx512 ? &avx512::table() : nullptr;
  if (rank == 3) return has_avx2 ? &avx2::table() : nullptr;
#endif
#if defined(__aarch64__)
  if (rank == 0) return has_dotprod() && has_i8mm() ? &i8mm::table() : nullptr;
  if (rank == 1) return has_dotprod() ? &dotprod::table() : nullptr;
  return rank == kSets - 1 ? &neon::table() : nullptr;
#else
  return rank == kSets - 1 ? &portable::table() : nullptr;
#endif
}

}  // namespace

const Kernels& kernels() {
  if (const Kernels* current = chosen.load(std::memory_order_acquire)) return *current;
  select_kernels("auto");
  return *chosen.load(std::memory_order_acquire);
}

bool select_kernels(const char* name) {
  for (int rank = 0; rank < kSets; ++rank) {
    const Kernels* set = candidate(rank);
    if (set && (std::strcmp(name, "auto") == 0 || std::strcmp(name, set->name) == 0)) {
      chosen.store(set, std::memory_order_release);
      return true;
    }
  }
  return false;
}

}  // namespace neap
