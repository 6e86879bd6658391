// The token that each row of scores chooses, greedy or sampled: see ChoiceArgs.
#pragma once
#include "choices.h"
#include "device.cuh"

namespace neap::gpu {

constexpr int kChoiceThreads = 1024, kChoiceWarps = kChoiceThreads / kWarp;

struct Largest {
  double value;
  int64_t index;
  // NaN is larger than any number, as in PyTorch. The first of equal values is the largest.
  __device__ __forceinline__ bool beats(const Largest& rival) const {
    if (index < 0 || rival.index < 0) return rival.index < 0 && index >= 0;
    const bool nan = value != value, rival_nan = rival.value != rival.value;
    if (nan != rival_nan) return nan;
    return (!nan && value > rival.value) || ((nan || value == rival.value) && index < rival.index);
  }
};

// A NaN and an infinity differ from themselves by a NaN.
__device__ __forceinline__ bool is_finite(double value) { return value - value == 0; }

__device__ __forceinline__ double weight_of(double value) { return value; }
template <class E>
__device__ __forceinline__ double weight_of(E value) {
  return (double)to_float(value);
}

// Greedy choice of one row: the index of the largest score, -1 if that is not finite.
template <class E>
__device__ __forceinline__ void choose_largest(const E* scores, const ChoiceArgs& args, Largest* warp_best) {
  using Value = std::conditional_t<sizeof(E) == 8, double, float>;
  Value most = -INFINITY;
  int64_t at = -1;
  // A thread meets its scores in ascending order, so of equal ones the first stays.
  const auto take = [&](Value value, int64_t index) {
    if (value > most || (value != value && most == most)) most = value, at = index;
  };
  int64_t taken = 0;
  if constexpr (sizeof(E) < 8) {
    constexpr int kSize = 16 / sizeof(E);
    if (reinterpret_cast<uintptr_t>(scores) % 16 == 0) taken = args.vocabulary / kSize * kSize;
#pragma unroll 4
    for (int64_t i = (int64_t)threadIdx.x * kSize; i < taken; i += (int64_t)kChoiceThreads * kSize) {
      float values[kSize];
      load_chunk<kSize>(scores + i, values);
#pragma unroll
      for (int e = 0; e < kSize; ++e) take(values[e], i + e);
    }
  }
#pragma unroll 4
  for (int64_t i = taken + threadIdx.x; i < args.vocabulary; i += kChoiceThreads) take((Value)weight_of(scores[i]), i);
  Largest best{(double)most, at};
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const Largest rival{__shfl_xor_sync(kAll, best.value, step), __shfl_xor_sync(kAll, best.index, step)};
    if (rival.beats(best)) best = rival;
  }
  if (threadIdx.x % kWarp == 0) warp_best[threadIdx.x / kWarp] = best;
  __syncthreads();
  if (threadIdx.x) return;
  for (int warp = 1; warp < kChoiceWarps; ++warp)
    if (warp_best[warp].beats(best)) best = warp_best[warp];
  args.choices[blockIdx.x] = is_finite(best.value) ? best.index : -1;
}

// Draws from the distribution with weights weight(i): the first i whose running total exceeds `point` times the total.
// Every thread sums a piece of the weights; the thread whose piece contains the point then searches it. Returns -1 if
// all weights are 0 or their sum is not finite. All threads of the block must call it and get the result.
template <class F>
__device__ __forceinline__ int64_t at_point(int64_t size, double point, double* ends, int64_t* answer,
                                            const F& weight) {
  const int64_t piece = (size + blockDim.x - 1) / blockDim.x, begin = min(size, threadIdx.x * piece),
                end = min(size, begin + piece);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  double thread_sum = 0;
  for (int64_t i = begin; i < end; ++i) thread_sum += weight(i);
  double sum = thread_sum;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const double left = __shfl_up_sync(kAll, sum, step);
    if (lane >= step) sum += left;
  }
  if (threadIdx.x == 0) *answer = size;  // no piece yet
  if (lane == kWarp - 1) ends[warp] = sum;
  __syncthreads();
  double before = 0, total = 0;
  for (int w = 0; w < kChoiceWarps; ++w) {
    if (w < warp) before += ends[w];
    total += ends[w];
  }
  const double wanted = point * total;
  // Rounding can make neighbouring sums an ulp out of order, so several pieces may contain the point. The first one
  // counts.
  const bool passes = thread_sum > 0 && before + sum > wanted && is_finite(total);
  const unsigned passing = __ballot_sync(kAll, passes);
  NEAP_SHARED(int, firsts, kChoiceWarps);
  if (lane == 0) firsts[warp] = passing ? warp * kWarp + __ffs((int)passing) - 1 : kChoiceThreads;
  __syncthreads();
  int chosen = kChoiceThreads;
  for (int w = 0; w < kChoiceWarps; ++w) chosen = min(chosen, firsts[w]);
  if ((int)threadIdx.x == chosen) {
    double running = before + sum - thread_sum;
    int64_t at = begin;
    for (int64_t i = begin; i < end; ++i) {
      const double value = weight(i);
      running += value;
      if (value > 0) at = i;
      if (value > 0 && running > wanted) break;
    }
    *answer = at;
  }
  __syncthreads();
  const int64_t index = *answer;
  __syncthreads();
  return index < size ? index : -1;
}

// One block per row of scores.
template <class E>
__global__ void __launch_bounds__(kChoiceThreads, 1) choose_kernel(ChoiceArgs args) {
  NEAP_SHARED(Largest, warp_best, kChoiceWarps);
  NEAP_SHARED(double, ends, kChoiceWarps);
  NEAP_SHARED(int64_t, answer, 1);
  const E* scores = static_cast<const E*>(args.scores) + blockIdx.x * args.stride;
  if (args.uniforms == nullptr) return choose_largest(scores, args, warp_best);
  const int64_t token = at_point(args.vocabulary, args.uniforms[blockIdx.x], ends, answer,
                                 [=](int64_t i) { return weight_of(scores[i]); });
  if (threadIdx.x == 0) args.choices[blockIdx.x] = token;
}

}  // namespace neap::gpu
