// Chooses the instruction set at run time, so that one library works on every machine of its architecture.
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <vector>

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

// Seconds that one thread takes for products of one and of four rows with a matrix larger than the caches next to the core. The best
// of several, because other work on the machine only adds to it.
double product_seconds(const Kernels& kernels) {
  constexpr int64_t kInputs = 1024, kOutputs = 1024, kRows = 4, kTrials = 5;
  const std::vector<float> panels(kInputs * kOutputs), x(kRows * kInputs);
  std::vector<float> out(kRows * kOutputs);
  const Matrix matrix{reinterpret_cast<const uint8_t*>(panels.data()), kPlain32, panel_bytes(kPlain32, kInputs), false};
  double sum = 0;
  for (const int64_t rows : {int64_t(1), kRows}) {
    const LinearArgs args{x.data(), matrix, {}, nullptr, out.data(), rows, kInputs, kOutputs, kInputs, false, kIdentity, nullptr};
    double best = 1;
    for (int64_t trial = 0; trial < kTrials; ++trial) {
      const auto start = std::chrono::steady_clock::now();
      const int64_t items = kernels.linear_items(args, 1);
      kernels.linear(args, items, 0, items);
      best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    sum += best;
  }
  return sum;
}

// The best set, unless the next one is clearly faster here: on some machines the widest vectors lower the clock. Measured once, in
// some 10 ms. The margin keeps noise from deciding, so that machines of one kind agree.
const Kernels* fastest() {
  constexpr double kMargin = 1.15;
  const Kernels *first = candidate(0), *second = candidate(1);
  if (first && second) return product_seconds(*first) > kMargin * product_seconds(*second) ? second : first;
  return first ? first : second ? second : candidate(2);
}

}  // namespace

const Kernels& kernels() {
  if (const Kernels* current = chosen.load(std::memory_order_acquire)) return *current;
  select_kernels("auto");
  return *chosen.load(std::memory_order_acquire);
}

bool select_kernels(const char* name) {
  if (std::strcmp(name, "auto") == 0) {
    static const Kernels* const automatic = fastest();
    chosen.store(automatic, std::memory_order_release);
    return true;
  }
  for (int rank = 0; rank < 3; ++rank) {
    const Kernels* found = candidate(rank);
    if (found && std::strcmp(name, found->name) == 0) {
      chosen.store(found, std::memory_order_release);
      return true;
    }
  }
  return false;
}

}  // namespace neap
