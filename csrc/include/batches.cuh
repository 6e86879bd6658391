// Copying rows and verifying drafts: see RowCopyArgs and VerifyArgs.
#pragma once
#include "batches.h"
#include "device.cuh"

namespace neap::gpu {

constexpr int kChoiceThreads = 256, kChoiceWarps = kChoiceThreads / kWarp;

// One block per row. `Unit`: the type that is copied; its size must divide all addresses and sizes.
template <class Unit>
__global__ void __launch_bounds__(kThreads) row_copy_kernel(RowCopyArgs args) {
  const int64_t row = blockIdx.x, count = args.count ? *args.count : args.rows, at = args.index[row];
  const bool used = row < count && at >= 0 && at < args.limit;
  if (args.scatter && !used) return;
  const Unit* from = reinterpret_cast<const Unit*>(args.from + (args.scatter ? row : used ? at : 0) * args.from_stride);
  Unit* to = reinterpret_cast<Unit*>(args.to + (args.scatter ? at : row) * args.to_stride);
  for (int64_t i = threadIdx.x; i < args.row_bytes / (int64_t)sizeof(Unit); i += blockDim.x) to[i] = used ? from[i] : Unit{};
}

struct Largest {
  double value;
  int64_t index;
  // NaN is larger than any number, as in PyTorch. Of equal values the first is the largest.
  __device__ __forceinline__ bool beats(const Largest& other) const {
    if (index < 0 || other.index < 0) return other.index < 0 && index >= 0;
    const bool nan = value != value, other_nan = other.value != other.value;
    if (nan != other_nan) return nan;
    return (!nan && value > other.value) || ((nan || value == other.value) && index < other.index);
  }
};

__device__ __forceinline__ double weight_of(double value) { return value; }
template <class E>
__device__ __forceinline__ double weight_of(E value) { return (double)to_float(value); }

// Greedy choice of one row: the index of the largest score.
template <class E>
__device__ __forceinline__ void choose_largest(const E* scores, const VerifyArgs& args, Largest* found) {
  Largest best{0, -1};
  for (int64_t i = threadIdx.x; i < args.vocabulary; i += blockDim.x) {
    const Largest seen{weight_of(scores[i]), i};
    if (seen.beats(best)) best = seen;
  }
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const Largest other{__shfl_xor_sync(kAll, best.value, step), __shfl_xor_sync(kAll, best.index, step)};
    if (other.beats(best)) best = other;
  }
  if (threadIdx.x % kWarp == 0) found[threadIdx.x / kWarp] = best;
  __syncthreads();
  if (threadIdx.x) return;
  for (int warp = 1; warp < kChoiceWarps; ++warp)
    if (found[warp].beats(best)) best = found[warp];
  args.choices[blockIdx.x] = best.index;
}

// Draws from the distribution with weights weight(i): the first i whose running total exceeds `point` times the total. Every thread sums a
// piece of the weights; the thread whose piece contains the point then searches it. Returns -1 if all weights are 0. All threads of
// the block must call it and get the result.
template <class F>
__device__ __forceinline__ int64_t at_point(int64_t size, double point, double* ends, int64_t* answer, const F& weight) {
  const int64_t piece = (size + blockDim.x - 1) / blockDim.x, begin = min(size, threadIdx.x * piece), end = min(size, begin + piece);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  double own = 0;
  for (int64_t i = begin; i < end; ++i) own += weight(i);
  double sum = own;
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
  // Rounding can make neighbouring sums an ulp out of order, so several pieces may contain the point. The first one counts.
  const bool passes = own > 0 && before + sum > wanted;
  const unsigned passing = __ballot_sync(kAll, passes);
  NEAP_SHARED(int, firsts, kChoiceWarps);
  if (lane == 0) firsts[warp] = passing ? warp * kWarp + __ffs((int)passing) - 1 : kChoiceThreads;
  __syncthreads();
  int chosen = kChoiceThreads;
  for (int w = 0; w < kChoiceWarps; ++w) chosen = min(chosen, firsts[w]);
  if ((int)threadIdx.x == chosen) {
    double running = before + sum - own;
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
  const int64_t found = *answer;
  __syncthreads();
  return found < size ? found : -1;
}

// Sampled choice of one row. Without `proposed`: draws from `scores`. With it: accepts the draft or draws from the remaining distribution
// (speculative sampling), so that the choice has the distribution of `scores`.
template <class E>
__device__ __forceinline__ void draw(const E* scores, const VerifyArgs& args, double* ends, int64_t* answer) {
  const int64_t row = blockIdx.x, draft = args.drafts[row];
  const double uniform = args.uniforms[row];
  int64_t token;
  if (args.proposed == nullptr || draft < 0 || draft >= args.vocabulary) {
    token = at_point(args.vocabulary, uniform, ends, answer, [=](int64_t i) { return weight_of(scores[i]); });
    if (token < 0) token = 0;
  } else {
    const E* proposed = static_cast<const E*>(args.proposed) + row * args.proposed_stride;
    const double wanted = weight_of(scores[draft]), offered = weight_of(proposed[draft]);
    token = draft;
    if (uniform * offered >= wanted) {
      // Given the rejection, the uniform number is uniform over the rest of [0, 1), so it can be rescaled and used for the second draw.
      const double bound = wanted / offered;
      token = at_point(args.vocabulary, (uniform - bound) / (1 - bound), ends, answer, [=](int64_t i) {
        const double difference = weight_of(scores[i]) - weight_of(proposed[i]);
        return difference > 0 ? difference : 0.;
      });
      if (token < 0) token = draft;  // the two differ by rounding alone
    }
  }
  if (threadIdx.x == 0) args.choices[row] = token;
}

// One block per row of scores.
template <class E>
__global__ void __launch_bounds__(kChoiceThreads) choose_kernel(VerifyArgs args) {
  NEAP_SHARED(Largest, found, kChoiceWarps);
  NEAP_SHARED(double, ends, kChoiceWarps);
  NEAP_SHARED(int64_t, answer, 1);
  const E* scores = static_cast<const E*>(args.scores) + blockIdx.x * args.stride;
  if (args.uniforms) draw(scores, args, ends, answer); else choose_largest(scores, args, found);
}

// Counts the accepted drafts. One thread per sequence. A sequence's last row has no draft to test.
__global__ void __launch_bounds__(kThreads) accept_kernel(VerifyArgs args) {
  const int64_t sequence = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (sequence >= args.sequences) return;
  const int64_t begin = max((int64_t)0, args.starts[sequence]), end = min(args.rows, args.starts[sequence + 1]);
  int64_t row = begin;
  while (row + 1 < end && args.choices[row] == args.drafts[row]) ++row;
  args.accepted[sequence] = row - begin;
}

}  // namespace neap::gpu
