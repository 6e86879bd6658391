// The part of CUDA that the kernels use, on the host: their source runs under AddressSanitizer and UBSan without a GPU.
//
// Every CUDA thread is a fiber. A few blocks are alive at once and take turns, warps and lanes in an order that the
// seed decides: ascending, descending or random, each as far as it can go or switching at every step. Shared memory is
// a heap block of its exact size, filled with NaN. What a thread publishes reaches memory at its next fence, or else
// only when the kernel ends. Collectives whose lanes disagree, barriers that some threads miss and deadlocks end the
// process.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <type_traits>
#include <vector>

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { uint32_t x, y; };
using cudaStream_t = void*;
using cudaError_t = int;
constexpr int cudaErrorInvalidValue = 1;

namespace emulator {

// AddressSanitizer clears what it knows of a stack whenever a fiber is entered.
constexpr size_t kStackBytes = 64 << 10, kResidentBlocks = 3;

struct Block;
struct Fiber {
  enum State { kReady, kAtBarrier, kAtCollective, kDone } state = kReady;
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  Block* block = nullptr;
  dim3 thread{0, 0, 0};
  unsigned mask = 0, collectives = 0;
  const char* what = "";
};
struct Block {
  dim3 index{0, 0, 0};
  size_t at_barrier = 0, done = 0;  // fibers
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::map<int, std::unique_ptr<char[]>> shared;
  std::vector<std::array<std::array<uint64_t, 32>, 2>> exchange;  // per warp, for this collective and the next
  std::vector<unsigned> arrived;                                  // per warp, lanes at the collective under way
};
struct Store {
  Fiber* by;
  void* at;
  uint64_t bits;
  size_t bytes;
};

struct Machine {
  dim3 grid, threads;
  std::function<void()> kernel;
  std::deque<std::unique_ptr<Block>> resident;
  std::vector<std::unique_ptr<Fiber>> idle;
  std::vector<Store> stores;
  ucontext_t scheduler;
  Fiber* current = nullptr;
  unsigned seed = 0;
  std::mt19937 random;
};
inline Machine& machine() {
  static Machine m;
  return m;
}
inline Fiber& self() { return *machine().current; }
inline unsigned lane() { return self().thread.x % 32; }

[[noreturn]] inline void die(const char* what) {
  std::fprintf(stderr, "emulator: %s", what);
  if (machine().current)
    std::fprintf(stderr, " (block %u,%u thread %u)", self().block->index.x, self().block->index.y, self().thread.x);
  std::fprintf(stderr, "\n");
  std::_Exit(86);
}

inline void leave() {
  Fiber& fiber = self();
  swapcontext(&fiber.context, &machine().scheduler);
}
inline void enter() {
  machine().kernel();
  self().state = Fiber::kDone;
  ++self().block->done;
  leave();
}

inline void* shared(int id, size_t bytes) {
  auto& memory = self().block->shared[id];
  if (!memory) {
    memory.reset(new char[bytes]);
    std::memset(memory.get(), 0xff, bytes);
  }
  return memory.get();
}

template <class T>
inline void publish(T* p, T value) {
  Store store{&self(), p, 0, sizeof(T)};
  std::memcpy(&store.bits, &value, sizeof(T));
  machine().stores.push_back(store);
}
inline void flush(const Fiber* by) {
  std::vector<Store> kept;
  for (const Store& store : machine().stores) {
    if (by && store.by != by) kept.push_back(store);
    else std::memcpy(store.at, &store.bits, store.bytes);
  }
  machine().stores.swap(kept);
}

inline void barrier() {
  Fiber& fiber = self();
  Block& block = *fiber.block;
  if (block.done) die("a barrier after some threads have ended");
  fiber.state = Fiber::kAtBarrier;
  if (++block.at_barrier == block.fibers.size()) {
    block.at_barrier = 0;
    for (auto& other : block.fibers) other->state = Fiber::kReady;
  }
  leave();
}

// All lanes of `mask` give a value and get those of all.
template <class T>
inline const std::array<uint64_t, 32>& collect(unsigned mask, T value, const char* what) {
  static_assert(sizeof(T) <= 8);
  Fiber& fiber = self();
  const unsigned warp = fiber.thread.x / 32, size = (unsigned)fiber.block->fibers.size();
  if (!(mask >> lane() & 1)) die("a lane outside its own collective's mask");
  auto& slot = fiber.block->exchange[warp][fiber.collectives++ % 2];
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  slot[lane()] = bits;
  fiber.state = Fiber::kAtCollective;
  fiber.mask = mask;
  fiber.what = what;
  unsigned& arrived = fiber.block->arrived[warp];
  if (++arrived == (unsigned)__builtin_popcount(mask)) {
    arrived = 0;
    for (unsigned l = 0; l < 32; ++l) {
      if (!(mask >> l & 1)) continue;
      if (warp * 32 + l >= size) die("a collective names a lane that does not exist");
      Fiber& other = *fiber.block->fibers[warp * 32 + l];
      if (other.state != Fiber::kAtCollective || other.mask != mask || other.what != what ||
          other.collectives != fiber.collectives)
        die("the lanes of a warp are at different collectives");
      other.state = Fiber::kReady;
    }
  }
  leave();
  return slot;
}
template <class T>
inline T from_lane(unsigned mask, T value, unsigned source, const char* what) {
  const auto& all = collect(mask, value, what);
  if (!(mask >> (source & 31) & 1)) die("a shuffle reads a lane outside its mask");
  T out;
  std::memcpy(&out, &all[source & 31], sizeof(T));
  return out;
}

inline float float_of_half(uint16_t bits);
// The instruction mma.m16n8k16 of float16: lane 4 g + t has columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of rows g and
// g + 8 of a, the same rows of column g of b, and columns 2 t and 2 t + 1 of the sums' rows g and g + 8.
inline void multiply_add(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  const auto both = [](uint32_t first, uint32_t second) { return first | (uint64_t)second << 32; };
  static const std::vector<float> halves = [] {
    std::vector<float> out(1 << 16);
    for (unsigned i = 0; i < out.size(); ++i) out[i] = float_of_half((uint16_t)i);
    return out;
  }();
  const float* decoded = halves.data();
  const auto value = [=](uint64_t bits, unsigned place) { return decoded[bits >> 16 * place & 0xffff]; };
  // What is exchanged is overwritten two collectives later.
  const std::array<uint64_t, 32> near = collect(~0u, both(a[0], a[1]), "mma");
  const std::array<uint64_t, 32> far = collect(~0u, both(a[2], a[3]), "mma");
  const std::array<uint64_t, 32>& columns = collect(~0u, both(b[0], b[1]), "mma");
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned row = lane() / 4, column = lane() % 4 * 2 + i % 2;
    for (unsigned k = 0; k < 16; ++k) {
      const unsigned t = k % 8 / 2;
      const uint64_t left = (k < 8 ? near : far)[row * 4 + t], right = columns[column * 4 + t];
      sums[i] += value(left, i / 2 * 2 + k % 2) * value(right, k / 8 * 2 + k % 2);
    }
  }
}

inline std::unique_ptr<Block> begin_block(unsigned number) {
  Machine& m = machine();
  auto block = std::make_unique<Block>();
  block->index = dim3(number % m.grid.x, number / m.grid.x % m.grid.y, number / m.grid.x / m.grid.y);
  block->exchange.resize((m.threads.x + 31) / 32), block->arrived.resize((m.threads.x + 31) / 32);
  for (unsigned t = 0; t < m.threads.x; ++t) {
    std::unique_ptr<Fiber> fiber;
    if (m.idle.empty()) fiber = std::make_unique<Fiber>();
    else {
      fiber = std::move(m.idle.back());
      m.idle.pop_back();
    }
    fiber->state = Fiber::kReady;
    fiber->block = block.get();
    fiber->thread = dim3(t, 0, 0);
    fiber->collectives = 0;
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack.get();
    fiber->context.uc_stack.ss_size = kStackBytes;
    fiber->context.uc_link = &m.scheduler;
    makecontext(&fiber->context, (void (*)())enter, 0);
    block->fibers.push_back(std::move(fiber));
  }
  return block;
}

// Runs every ready lane of a warp once; whether there was one.
inline bool run_warp(Block& block, unsigned warp) {
  Machine& m = machine();
  bool ran = false;
  const unsigned offset = m.seed % 3 == 2 ? m.random() % 32 : 0;
  for (unsigned i = 0; i < 32; ++i) {
    const unsigned l = m.seed % 3 == 1 ? 31 - i : (i + offset) % 32, t = warp * 32 + l;
    if (t >= block.fibers.size() || block.fibers[t]->state != Fiber::kReady) continue;
    m.current = block.fibers[t].get();
    swapcontext(&m.scheduler, &m.current->context);
    m.current = nullptr;
    ran = true;
  }
  return ran;
}

inline void launch(dim3 grid, dim3 threads, std::function<void()> kernel) {
  Machine& m = machine();
  if (threads.x == 0 || threads.x > 1024 || grid.x == 0 || grid.y == 0 || grid.y > 65535)
    die("a launch of no or too many threads or blocks");
  m.grid = grid;
  m.threads = threads;
  m.kernel = std::move(kernel);
  m.random.seed(m.seed);
  const unsigned count = grid.x * grid.y * grid.z, warps = (threads.x + 31) / 32;
  std::vector<unsigned> order(count);
  for (unsigned i = 0; i < count; ++i) order[i] = m.seed % 3 == 1 ? count - 1 - i : i;
  if (m.seed % 3 == 2) std::shuffle(order.begin(), order.end(), m.random);
  for (unsigned next = 0; next < count || !m.resident.empty();) {
    while (next < count && m.resident.size() < kResidentBlocks) m.resident.push_back(begin_block(order[next++]));
    bool ran = false;
    for (size_t b = 0; b < m.resident.size(); ++b) {
      Block& block = *m.resident[m.seed % 3 == 1 ? m.resident.size() - 1 - b : b];
      for (unsigned i = 0; i < warps; ++i) {
        const unsigned warp = m.seed % 3 == 0 ? i : m.seed % 3 == 1 ? warps - 1 - i : m.random() % warps;
        // The first two policies drive a warp as far as it can go, the third lets it take one step.
        while (run_warp(block, warp)) {
          ran = true;
          if (m.seed % 3 == 2) break;
        }
      }
    }
    bool ready = false;
    for (auto at = m.resident.begin(); at != m.resident.end();) {
      bool done = true;
      for (auto& fiber : (*at)->fibers) {
        done = done && fiber->state == Fiber::kDone;
        ready = ready || fiber->state == Fiber::kReady;
      }
      if (!done) {
        ++at;
        continue;
      }
      for (auto& fiber : (*at)->fibers) m.idle.push_back(std::move(fiber));
      at = m.resident.erase(at);
      ran = true;
    }
    if (!ran && !ready) die("deadlock: threads wait for others that never come");
  }
  flush(nullptr);
}

inline float float_of_half(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float magnitude = exponent == 31
                              ? (fraction ? NAN : INFINITY)
                              : std::ldexp((float)(exponent ? fraction + 1024 : fraction), std::max(exponent, 1) - 25);
  return bits >> 15 ? -magnitude : magnitude;
}

inline uint16_t half_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000u);
  if (value != value) return sign | 0x7e00u;
  const float magnitude = std::fabs(value);
  if (magnitude >= 65520.f) return sign | 0x7c00u;
  // Halves are whole multiples of 2^-24 or of their own last place, whichever is the larger.
  const int exponent = magnitude > 0 ? std::max(std::ilogb(magnitude), -14) : -14;
  const long steps = std::lrint(std::ldexp(magnitude, 10 - exponent));
  return sign | (uint16_t)(((exponent + 14) << 10) + steps);
}

}  // namespace emulator

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define threadIdx (::emulator::self().thread)
#define blockIdx (::emulator::self().block->index)
#define gridDim (::emulator::machine().grid)
#define blockDim (::emulator::machine().threads)
#define NEAP_SHARED(type, name, count) \
  type* name = static_cast<type*>(::emulator::shared(__COUNTER__, sizeof(type) * (count)))
#define NEAP_LAUNCH(kernel, grid, threads, stream, ...) \
  ((void)(stream), ::emulator::launch(dim3(grid), dim3(threads), [=] { kernel(__VA_ARGS__); }))

inline void __syncthreads() { ::emulator::barrier(); }
inline void __threadfence() { ::emulator::flush(&::emulator::self()); }
inline void __syncwarp() { ::emulator::collect(0xffffffffu, 0, "warp barrier"); }
template <class T> T __shfl_sync(unsigned mask, T value, int source) {
  return ::emulator::from_lane(mask, value, (unsigned)source, "shuffle from");
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int step) {
  return ::emulator::from_lane(mask, value, ::emulator::lane() ^ step, "shuffle");
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned step) {
  return ::emulator::from_lane(mask, value, ::emulator::lane() < step ? ::emulator::lane() : ::emulator::lane() - step,
                               "shuffle up");
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const auto& all = ::emulator::collect(mask, predicate != 0, "ballot");
  unsigned out = 0;
  for (unsigned l = 0; l < 32; ++l)
    if (mask >> l & 1) out |= (unsigned)(all[l] & 1) << l;
  return out;
}
inline unsigned atomicInc(uint32_t* p, unsigned limit) {
  const unsigned old = *p;
  *p = old >= limit ? 0 : old + 1;
  ::emulator::leave();  // others may run between this and what follows from it
  return old;
}
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
template <class T> T __ldcg(const T* p) { return *p; }
inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float __fmul_rn(float a, float b) { return a * b; }
template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }
inline int cudaGetLastError() { return 0; }
inline const char* cudaGetErrorString(cudaError_t) { return "emulated"; }
inline int cudaMemsetAsync(void* p, int value, size_t bytes, void*) {
  std::memset(p, value, bytes);
  return 0;
}
