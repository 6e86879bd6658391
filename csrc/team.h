// Several steps of parallel work in one parallel region. Threads wait at barriers between steps instead of being woken for each step.
#pragma once
#include <atomic>
#include <thread>

#include "binding.h"

namespace neap::binding {

// A spinning barrier for the ranks of a team.
class Barrier {
 public:
  explicit Barrier(int64_t ranks) : ranks_(ranks) {}

  // Returns when all ranks have arrived. The calling thread arrives for `count` of them.
  void arrive(int64_t count) {
    if (count == ranks_) return;
    const int64_t round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(count, std::memory_order_acq_rel) + count == ranks_) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    // The other threads usually arrive within microseconds. If the system has preempted them, spinning on would waste the core.
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins)
      if (spins >= kSpins) std::this_thread::yield();
      else relax();
  }

 private:
  static constexpr int kSpins = 4000;

  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  alignas(64) std::atomic<int64_t> arrived_{0};
  alignas(64) std::atomic<int64_t> round_{0};
  const int64_t ranks_;
};

// One thread's part of a team of `size` ranks: ranks [begin, end). That is one rank per thread unless torch runs fewer threads than
// requested.
struct Team {
  int64_t begin, end, size;
  Barrier* barrier;

  // Runs this thread's part of a loop over items. Does not wait for the other threads.
  template <class F>
  void share(int64_t items, const F& f) const {
    const int64_t first = items * begin / size, last = items * end / size;
    if (first < last) f(first, last);
  }

  // Waits until every thread has arrived here.
  void meet() const { barrier->arrive(end - begin); }
};

// Runs f(team) in each thread of one parallel region. f must not throw: the other threads would wait at a barrier forever.
template <class F>
void in_team(int64_t size, const F& f) {
  Barrier barrier(size);
  if (size == 1) return f(Team{0, 1, 1, &barrier});
  torch::stable::parallel_for(0, size, 1, [&](int64_t begin, int64_t end) { f(Team{begin, end, size, &barrier}); });
}

}  // namespace neap::binding
