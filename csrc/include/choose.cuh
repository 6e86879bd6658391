// The token that each row of scores chooses, greedy or sampled: see ChoiceArgs. Blocks reduce pieces of rows first,
// then a block of each row joins them. Pieces begin at the same scores of every row.
#pragma once
#include "choices.h"
#include "device.cuh"

namespace neap::gpu {

constexpr int kChoiceThreads = 256, kChoiceWarps = kChoiceThreads / kWarp;

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

// The largest that a thread meets of the scores [begin, end), of which the first is a chunk's first if the row's is.
template <class E>
__device__ __forceinline__ Largest largest_of_thread(const E* scores, int64_t begin, int64_t end) {
  using Value = std::conditional_t<sizeof(E) == 8, double, float>;
  Value most = -INFINITY;
  int64_t at = -1;
  // A thread meets its scores in ascending order, so of equal ones the first stays.
  const auto take = [&](Value value, int64_t index) {
    if (value > most || (value != value && most == most)) most = value, at = index;
  };
  if constexpr (sizeof(E) < 8) {
    constexpr int kSize = 16 / sizeof(E);
    if (reinterpret_cast<uintptr_t>(scores) % 16 == 0) {
      const int64_t whole = end - end % kSize;
#pragma unroll 2
      for (int64_t i = begin + (int64_t)threadIdx.x * kSize; i < whole; i += kChoiceThreads * kSize) {
        float values[kSize];
        load_chunk<kSize>(scores + i, values);
#pragma unroll
        for (int e = 0; e < kSize; ++e) take(values[e], i + e);
      }
      begin = whole;
    }
  }
#pragma unroll 8
  for (int64_t i = begin + threadIdx.x; i < end; i += kChoiceThreads) take((Value)weight_of(scores[i]), i);
  return {(double)most, at};
}

// The largest of the block's threads, in thread 0.
__device__ __forceinline__ Largest largest_of_block(Largest best, Largest* warp_best) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const Largest rival{__shfl_xor_sync(kAll, best.value, step), __shfl_xor_sync(kAll, best.index, step)};
    if (rival.beats(best)) best = rival;
  }
  if (threadIdx.x % kWarp == 0) warp_best[threadIdx.x / kWarp] = best;
  __syncthreads();
  if (threadIdx.x == 0)
    for (int warp = 1; warp < kChoiceWarps; ++warp)
      if (warp_best[warp].beats(best)) best = warp_best[warp];
  return best;
}

// One block per row and piece: its largest score, or the sum of its probabilities.
template <class E>
__global__ void __launch_bounds__(kChoiceThreads) choose_piece_kernel(ChoiceArgs args) {
  NEAP_SHARED(Largest, warp_best, kChoiceWarps);
  NEAP_SHARED(double, scratch, kChoiceWarps);
  const int64_t pieces = choice_pieces(args.vocabulary), row = blockIdx.x / pieces,
                begin = blockIdx.x % pieces * kChoicePiece, end = min(args.vocabulary, begin + kChoicePiece);
  const E* scores = static_cast<const E*>(args.scores) + row * args.stride;
  Largest part{0, 0};
  if (args.uniforms == nullptr) {
    part = largest_of_block(largest_of_thread(scores, begin, end), warp_best);
  } else {
    double sum = 0;
#pragma unroll
    for (int i = 0; i < kChoicePiece / kChoiceThreads; ++i) {
      const int64_t at = begin + i * kChoiceThreads + threadIdx.x;
      sum += at < end ? weight_of(scores[at]) : 0;
    }
    part.value = block_sum(sum, scratch);
  }
  if (threadIdx.x == 0) args.parts[blockIdx.x] = {part.value, part.index};
}

// What the threads of a block write down for each other.
struct Passing {
  double ends[kChoiceWarps];
  int firsts[kChoiceWarps];
  double before;
  int64_t index;
};

// The first of `size` items at which the running total, which begins at `before`, exceeds `wanted`; where rounding
// keeps it from that, the last item that weighs anything. `before` becomes the running total before the item. All
// threads of the block must call it and get the result.
template <class F>
__device__ __forceinline__ int64_t passing(int64_t size, double wanted, double& before, Passing& shared,
                                           const F& weight) {
  const int64_t share = ceil_div(size, kChoiceThreads), begin = min(size, threadIdx.x * share),
                end = min(size, begin + share);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  double own = 0;
  for (int64_t i = begin; i < end; ++i) own += weight(i);
  double sum = own;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const double left = __shfl_up_sync(kAll, sum, step);
    if (lane >= step) sum += left;
  }
  if (lane == kWarp - 1) shared.ends[warp] = sum;
  if (threadIdx.x == 0) shared.index = 0, shared.before = before;
  __syncthreads();
  for (int w = 0; w < warp; ++w) before += shared.ends[w];
  // Rounding can make neighbouring totals an ulp out of order, so several threads may exceed it. The first one counts.
  const int thread = (int)threadIdx.x;
  int first = own > 0 ? (before + sum > wanted ? thread : 2 * kChoiceThreads - thread) : 2 * kChoiceThreads + 1;
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) first = min(first, __shfl_xor_sync(kAll, first, step));
  if (lane == 0) shared.firsts[warp] = first;
  __syncthreads();
  for (int w = 0; w < kChoiceWarps; ++w) first = min(first, shared.firsts[w]);
  if (thread == (first < kChoiceThreads ? first : 2 * kChoiceThreads - first)) {
    double running = before + sum - own;
    for (int64_t i = begin; i < end; ++i) {
      const double value = weight(i);
      if (value > 0) shared.index = i, shared.before = running;
      running += value;
      if (value > 0 && running > wanted) break;
    }
  }
  __syncthreads();
  before = shared.before;
  return shared.index;
}

// One block per row of scores.
template <class E>
__global__ void __launch_bounds__(kChoiceThreads) choose_kernel(ChoiceArgs args) {
  NEAP_SHARED(Largest, warp_best, kChoiceWarps);
  NEAP_SHARED(double, scratch, kChoiceWarps);
  NEAP_SHARED(Passing, shared, 2);
  const int64_t pieces = choice_pieces(args.vocabulary);
  const ChoicePart* parts = args.parts + blockIdx.x * pieces;
  if (args.uniforms == nullptr) {
    Largest best{-INFINITY, -1};
    for (int64_t i = threadIdx.x; i < pieces; i += kChoiceThreads) {
      const Largest rival{parts[i].value, parts[i].index};
      if (rival.beats(best)) best = rival;
    }
    best = largest_of_block(best, warp_best);
    if (threadIdx.x == 0) args.choices[blockIdx.x] = is_finite(best.value) ? best.index : -1;
    return;
  }
  double total = 0;
  for (int64_t i = threadIdx.x; i < pieces; i += kChoiceThreads) total += parts[i].value;
  total = block_sum(total, scratch);
  int64_t token = -1;
  if (is_finite(total) && total > 0) {
    const double wanted = args.uniforms[blockIdx.x] * total;
    double before = 0;
    const int64_t piece = passing(pieces, wanted, before, shared[0], [=](int64_t i) { return parts[i].value; });
    const int64_t begin = piece * kChoicePiece;
    const E* scores = static_cast<const E*>(args.scores) + blockIdx.x * args.stride + begin;
    token = begin + passing(min(kChoicePiece, args.vocabulary - begin), wanted, before, shared[1],
                            [=](int64_t i) { return weight_of(scores[i]); });
  }
  if (threadIdx.x == 0) args.choices[blockIdx.x] = token;
}

}  // namespace neap::gpu
