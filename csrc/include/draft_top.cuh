// The k largest logits of a draft vocabulary and the log of the sum of exponentials of all. Logits stay in
// shared memory.
#pragma once
#include "dots.cuh"
#include "exits.h"

namespace neap::gpu {

constexpr int kTopThreads = kTile * kWarp;  // one warp per token selects the largest

struct Candidate {
  float value;
  int64_t index;
  // Order: descending values; of equal values the lower index first.
  __device__ __forceinline__ bool before(const Candidate& rival) const {
    return value > rival.value || (value == rival.value && index < rival.index);
  }
};

// no_candidate: the initial best, and the result if only -infinity and NaN are left.
// above_all: comes before every candidate.
__device__ __forceinline__ Candidate no_candidate() { return {-INFINITY, 0}; }
__device__ __forceinline__ Candidate above_all() { return {INFINITY, -1}; }

// Replaces `best` by `seen` if `seen` comes after `last` (the previously selected candidate) and before `best`.
__device__ __forceinline__ void consider(const Candidate& seen, const Candidate& last, Candidate& best) {
  if (seen.value > -INFINITY && last.before(seen) && (best.value == -INFINITY || seen.before(best))) best = seen;
}

__device__ __forceinline__ Candidate warp_best(Candidate best) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const Candidate rival{__shfl_xor_sync(kAll, best.value, step), __shfl_xor_sync(kAll, best.index, step)};
    if (rival.value > -INFINITY && (best.value == -INFINITY || rival.before(best))) best = rival;
  }
  return best;
}

// One block per (tile of tokens, kDeviceVocabularyBlock rows): finds the k largest logits of the block and their mass.
// The tiles of the same rows run at the same time, so that only one of them reads the rows from memory.
template <class W>
__global__ void __launch_bounds__(kTopThreads) draft_block_kernel(DraftTopArgs args, bool eights) {
  constexpr int kRows = (int)kDeviceVocabularyBlock / kTile;  // of a warp
  static_assert(kDeviceVocabularyBlock == kWarp, "a row per lane");
  NEAP_SHARED(float, logits, kTile* kWarp);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, row = warp * kRows;
  const int64_t columns = args.rows.columns, begin = (int64_t)blockIdx.y * kDeviceVocabularyBlock,
                first = (int64_t)blockIdx.x * kTile;
  const int count = (int)min(kDeviceVocabularyBlock, args.rows.rows - begin),
            tokens = (int)min((int64_t)kTile, args.tokens - first);
  const W* weight = static_cast<const W*>(args.rows.data) + (begin + row) * columns;
  const Sums<kRows> sums = sums_of<kRows>(args.x + first * columns, columns, tokens, weight, min(kRows, count - row),
                                          columns, eights, lane, kWarp);
  const float dot = warp_dot_of_lane(sums.dots, tokens);
  const int lane_row = row + lane / kTile;
  if (lane_row < count) logits[lane % kTile * kWarp + lane_row] = dot + (args.bias ? args.bias[begin + lane_row] : 0.f);
  __syncthreads();
  if (warp >= tokens) return;
  const float logit = lane < count ? logits[warp * kWarp + lane] : -INFINITY;
  const int64_t at = blockIdx.y * args.tokens + first + warp;
  Candidate last = above_all();
  float shift = 0.f;
  for (int i = 0; i < args.k; ++i) {
    Candidate best = no_candidate();
    consider({logit, begin + lane}, last, best);
    last = warp_best(best);
    if (i == 0 && last.value > -INFINITY) shift = last.value;
    if (lane == 0) {
      args.block_values[at * args.k + i] = last.value;
      args.block_indices[at * args.k + i] = (int32_t)last.index;
    }
  }
  const float mass = warp_sum(expf(logit - shift));
  if (lane == 0) {
    args.block_mass[at * 2] = shift;
    args.block_mass[at * 2 + 1] = mass;
  }
}

// One block per token: joins the results of all vocabulary blocks.
__global__ void __launch_bounds__(kTopThreads) draft_join_kernel(DraftTopArgs args) {
  NEAP_SHARED(Candidate, bests, kTopThreads / kWarp);
  NEAP_SHARED(float, scratch, kTopThreads / kWarp);
  const int64_t token = blockIdx.x, blocks = device_vocabulary_blocks(args.rows.rows);
  Candidate last = above_all();
  float shift = 0.f;
  for (int i = 0; i < args.k; ++i) {
    Candidate best = no_candidate();
    for (int64_t j = threadIdx.x; j < blocks * args.k; j += blockDim.x) {
      const int64_t at = (j / args.k * args.tokens + token) * args.k + j % args.k;
      consider({args.block_values[at], args.block_indices[at]}, last, best);
    }
    best = warp_best(best);
    if (threadIdx.x % kWarp == 0) bests[threadIdx.x / kWarp] = best;
    __syncthreads();
    last = no_candidate();
    for (int warp = 0; warp < kTopThreads / kWarp; ++warp) consider(bests[warp], above_all(), last);
    __syncthreads();
    if (i == 0 && last.value > -INFINITY) shift = last.value;
    if (threadIdx.x == 0) {
      args.values[token * args.k + i] = last.value;
      args.indices[token * args.k + i] = last.index;
    }
  }
  float mass = 0.f;
  for (int64_t block = threadIdx.x; block < blocks; block += blockDim.x) {
    const float* part = args.block_mass + (block * args.tokens + token) * 2;
    mass += part[1] * expf(part[0] - shift);
  }
  mass = block_sum(mass, scratch);
  if (threadIdx.x == 0) args.log_mass[token] = shift + logf(mass);
}

}  // namespace neap::gpu
