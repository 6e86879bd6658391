// Several steps of parallel work in one parallel region. Each thread has a part of a step, and takes over the parts
// that others have not begun. A step has ended when all of it is done: a thread that the system has preempted between
// two parts holds nobody up.
#pragma once
#include <atomic>
#include <thread>

#include "binding.h"

namespace neap::binding {

// What the threads of a region share. Items are numbered through all steps.
struct TeamState {
  explicit TeamState(int64_t ranks) : parts(ranks) {}
  struct alignas(64) Part {
    std::atomic<int64_t> claimed{0};  // the end of the rank's part of the last step in which somebody has claimed it
  };
  std::vector<Part> parts;  // of each rank
  alignas(64) std::atomic<int64_t> done{0};
  alignas(64) std::atomic<int64_t> gathered{0};
};

// One thread's place in a team. Its rank numbers what is its own, such as scratch memory. Every thread calls the same
// functions in the same order with the same numbers of items. A thread that is late finds its steps done, and goes on
// to the one that is not.
class Team {
 public:
  Team(int64_t rank, int64_t count, TeamState* state)
      : rank(rank), size((int64_t)state->parts.size()), count_(count), state_(*state) {}

  const int64_t rank, size;

  // Whether the next step, of so many items, has some that nobody has claimed. Until then its inputs are as the step
  // before has left them.
  bool has_work(int64_t items) const {
    for (int64_t r = 0; r < size; ++r)
      if (state_.parts[r].claimed.load(std::memory_order_acquire) < end_ + items * (r + 1) / size) return true;
    return false;
  }

  // A step: a loop over items, of which this thread runs f(first, last) for those that it claims. Does not wait for
  // others.
  template <class F>
  void share(int64_t items, const F& f) {
    const int64_t begin = end_;
    int64_t num_done = 0;
    end_ += items;
    for (int64_t i = 0; i < size; ++i) {
      const int64_t r = (rank + i) % size, low = begin + items * r / size, high = begin + items * (r + 1) / size;
      if (low == high) continue;
      std::atomic<int64_t>& claimed = state_.parts[r].claimed;
      int64_t known = claimed.load(std::memory_order_acquire);
      // Only another claim of this part or a later one makes the exchange fail.
      if (known >= high || !claimed.compare_exchange_strong(known, high, std::memory_order_acq_rel)) continue;
      f(low - begin, high - begin);
      num_done += high - low;
    }
    if (num_done > 0) state_.done.fetch_add(num_done, std::memory_order_acq_rel);
  }

  // Waits until all items of the steps so far are done.
  void meet() const {
    wait([this] { return state_.done.load(std::memory_order_acquire) >= end_; });
  }

  // Waits until every thread has arrived here. Between two gatherings one thread may change which steps follow.
  void gather() {
    gathered_ += size;
    state_.gathered.fetch_add(count_, std::memory_order_acq_rel);
    wait([this] { return state_.gathered.load(std::memory_order_acquire) >= gathered_; });
  }

 private:
  // The other threads usually end within microseconds. If the system has preempted one, spinning on wastes the core.
  static constexpr int kSpins = 4000;

  template <class F>
  static void wait(const F& is_over) {
    for (int spins = 0; !is_over(); ++spins)
      if (spins >= kSpins) std::this_thread::yield();
      else relax();
  }

  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  const int64_t count_;  // ranks that this thread stands for: one, unless torch runs fewer threads than requested
  TeamState& state_;
  int64_t end_ = 0, gathered_ = 0;
};

// Runs f(team) in each thread of one parallel region. f must not throw: the other threads would wait forever.
template <class F>
void in_team(int64_t size, const F& f) {
  TeamState state(size);
  const auto run = [&](int64_t begin, int64_t end) {
    Team team(begin, end - begin, &state);
    f(team);
  };
  if (size == 1) return run(0, 1);
  torch::stable::parallel_for(0, size, 1, run);
}

// Runs f(begin, end) over [0, items) on torch's threads. `flops`: work of all items. Each thread gets at least
// kGrainFlops of it.
template <class F>
void parallel(int64_t items, double flops, const F& f) {
  if (items == 0) return;
  const int64_t worth = std::max<int64_t>((int64_t)(flops / (double)kGrainFlops), 1);
  in_team(std::min({worth, items, (int64_t)torch::stable::get_num_threads()}), [&](Team& team) {
    team.share(items, f);
    team.meet();
  });
}

}  // namespace neap::binding
