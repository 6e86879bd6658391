// The k largest logits of a draft vocabulary and the log of the sum of exponentials of all. Logits stay in
// shared memory.
#pragma once
#include "dots.cuh"
#include "exits.h"
#include "matrix.cuh"

namespace neap::gpu {

constexpr int kTopThreads = kMatrixWarps * kWarp, kTopRows = (int)kVocabularyBlock;
static_assert(kTopRows == kMatrixRows);
constexpr int kTokenLanes = kWarp / kTile;  // that select a token's largest: a warp for kTile of them

struct Candidate {
  float value;
  int index;
  // Order: descending values; of equal values the lower index first.
  __device__ __forceinline__ bool before(const Candidate& rival) const {
    return (value > rival.value) | ((value == rival.value) & (index < rival.index));
  }
};

// no_candidate: the initial best, and the result if only -infinity and NaN are left.
// above_all: comes before every candidate.
__device__ __forceinline__ Candidate no_candidate() { return {-INFINITY, 0}; }
__device__ __forceinline__ Candidate above_all() { return {INFINITY, -1}; }

// Replaces `best` by `seen` if `seen` comes after `last` (the previously selected candidate) and before `best`.
__device__ __forceinline__ void consider(const Candidate& seen, const Candidate& last, Candidate& best) {
  if ((seen.value > -INFINITY) & last.before(seen) & seen.before(best)) best = seen;
}

// The best of each kLanes neighbouring lanes.
template <int kLanes>
__device__ __forceinline__ Candidate best_of_lanes(Candidate best) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2)
    consider({__shfl_xor_sync(kAll, best.value, step), __shfl_xor_sync(kAll, best.index, step)}, above_all(), best);
  return best;
}

// One block per (kTiles * kTile tokens, kVocabularyBlock rows): finds the k largest logits of the block and their mass.
// The tokens of the same rows run at the same time, so that only one of them reads the rows from memory. kMatrix: on
// matrix units, where the rows are float16, takes_eight holds and one block is whole: for any number of tokens or none.
template <class W, int kTiles, bool kMatrix>
__global__ void __launch_bounds__(kTopThreads, 1) draft_block_kernel(DraftTopArgs args, bool eights) {
  NEAP_SHARED(float, logits, kTiles * kTile * kMatrixStride);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t columns = args.rows.columns, begin = (int64_t)blockIdx.y * kTopRows,
                first = (int64_t)blockIdx.x * kTiles * kTile;
  // The last block begins with rows of the one before, which it leaves out below, so that it is whole.
  const int64_t base = max((int64_t)0, min(begin, args.rows.rows - kTopRows));
  const int left_out = (int)(begin - base), end = (int)min((int64_t)kTopRows, args.rows.rows - base),
            tokens = (int)min((int64_t)kTiles * kTile, args.tokens - first);
  const float* x = args.x + first * columns;
  const W* weight = static_cast<const W*>(args.rows.data) + base * columns;
  if constexpr (kMatrix) {
    matrix_products<kTiles>(x, tokens, weight, (int)columns, logits);
  } else {
    static_assert(kTiles == 1);
    constexpr int kRows = kWarp / kTile;
    for (int row = warp * kRows; row < kTopRows; row += kTopThreads / kWarp * kRows) {
      if (row >= end) break;
      Sums<kRows, kTile> sums =
          sums_of<kRows, kTile>(x, columns, tokens, weight + row * columns, end - row, columns, eights, lane, kWarp);
      logits[lane % kTile * kMatrixStride + row + lane / kTile] = warp_sum_of_lane<kWarp / 2>(sums.dots);
    }
    __syncthreads();
  }
  if (warp >= kTiles) return;
  const int token = threadIdx.x / kTokenLanes, part = threadIdx.x % kTokenLanes;
  float logit[kTopRows / kTokenLanes];
#pragma unroll
  for (int i = 0; i < kTopRows / kTokenLanes; ++i) {
    const int row = i * kTokenLanes + part;
    logit[i] = row >= left_out && row < end
                   ? logits[token * kMatrixStride + row] + (args.bias ? args.bias[base + row] : 0.f)
                   : -INFINITY;
  }
  const int64_t at = blockIdx.y * args.tokens + first + token;
  const bool writes = token < tokens && part == 0;
  Candidate last = above_all();
  float shift = 0.f;
  for (int place = 0; place < args.k; ++place) {
    Candidate best = no_candidate();
#pragma unroll
    for (int i = 0; i < kTopRows / kTokenLanes; ++i) consider({logit[i], i * kTokenLanes + part}, last, best);
    last = best_of_lanes<kTokenLanes>(best);
    if (place == 0 && last.value > -INFINITY) shift = last.value;
    if (writes) {
      args.block_values[at * args.k + place] = last.value;
      args.block_indices[at * args.k + place] = (int)base + last.index;
    }
  }
  float mass = 0.f;
#pragma unroll
  for (int i = 0; i < kTopRows / kTokenLanes; ++i) mass += expf(logit[i] - shift);
#pragma unroll
  for (int step = kTokenLanes / 2; step > 0; step /= 2) mass += __shfl_xor_sync(kAll, mass, step);
  if (writes) {
    args.block_mass[at * 2] = shift;
    args.block_mass[at * 2 + 1] = mass;
  }
}

// One block per token: joins the results of all vocabulary blocks.
__global__ void __launch_bounds__(kTopThreads) draft_join_kernel(DraftTopArgs args) {
  NEAP_SHARED(Candidate, bests, kTopThreads / kWarp);
  NEAP_SHARED(float, scratch, kTopThreads / kWarp);
  const int64_t token = blockIdx.x, blocks = vocabulary_blocks(args.rows.rows);
  Candidate last = above_all();
  float shift = 0.f;
  for (int i = 0; i < args.k; ++i) {
    Candidate best = no_candidate();
    for (int64_t j = threadIdx.x; j < blocks * args.k; j += blockDim.x) {
      const int64_t at = (j / args.k * args.tokens + token) * args.k + j % args.k;
      consider({args.block_values[at], args.block_indices[at]}, last, best);
    }
    best = best_of_lanes<kWarp>(best);
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
