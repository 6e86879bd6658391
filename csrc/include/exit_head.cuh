// An exit head: see ExitHeadArgs. Three launches after the norms, because each needs the whole result of the one before.
#pragma once
#include "dots.cuh"
#include "exits.h"

namespace neap::gpu {

// out = x / sqrt(mean(x^2) + eps), all threads of the block on one row.
template <class X, class F>
__device__ __forceinline__ void norm_row(const X* x, int64_t width, float eps, float* scratch, const F& write) {
  float squares = 0.f;
  for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
    const float value = to_float(x[i]);
    squares += value * value;
  }
  const float scale = 1.f / sqrtf(block_sum(squares, scratch) / (float)width + eps);
  for (int64_t i = threadIdx.x; i < width; i += blockDim.x) write(i, to_float(x[i]) * scale);
}

// Norms without gain. One block per token.
template <class X>
__global__ void __launch_bounds__(kThreads) norm_kernel(NormArgs args) {
  NEAP_SHARED(float, scratch, kWarps);
  float* out = args.out + blockIdx.x * args.out_stride;
  norm_row(static_cast<const X*>(args.x) + blockIdx.x * args.x_stride, args.width, args.eps, scratch,
           [=](int64_t i, float value) { out[i] = value; });
}

// The product with `mix`, the offset, and the gate. One warp per row of `mix` (gated: per pair of rows) and tile of tokens (blockIdx.y).
template <class W>
__global__ void __launch_bounds__(kThreads) exit_inner_kernel(ExitHeadArgs args, bool fours) {
  const bool gated = args.out.data != nullptr;
  const int64_t size = args.mix.rows, rank = size / 2, columns = args.mix.columns;
  const int64_t row = (int64_t)blockIdx.x * kWarps + threadIdx.x / kWarp, first = (int64_t)blockIdx.y * kTile;
  if (row >= (gated ? rank : size)) return;
  const int tokens = (int)min((int64_t)kTile, args.tokens - first), lane = threadIdx.x % kWarp;
  const W* weight = static_cast<const W*>(args.mix.data);
  const float* units = args.units + first * columns;
  float sums[kTile];
  warp_dots(units, columns, tokens, weight + row * columns, columns, fours, sums);
  float value = of_lane(sums);
  const int64_t offset = lane < tokens ? (max((int64_t)1, min(args.distance[first + lane], args.num_offsets)) - 1) * size : 0;
  value += args.offset[offset + row];
  if (gated) {
    warp_dots(units, columns, tokens, weight + (rank + row) * columns, columns, fours, sums);
    value = silu(value) * (of_lane(sums) + args.offset[offset + rank + row]);
  }
  if (lane < tokens) args.inner[(first + lane) * size + row] = value;
}

// The product with `out`, and the scaled states. One warp per row of `out` and tile of tokens (blockIdx.y).
template <class W>
__global__ void __launch_bounds__(kThreads) exit_out_kernel(ExitHeadArgs args, bool fours) {
  const int64_t size = args.out.rows, columns = args.out.columns, stride = args.mix.rows;
  const int64_t row = (int64_t)blockIdx.x * kWarps + threadIdx.x / kWarp, first = (int64_t)blockIdx.y * kTile;
  if (row >= size) return;
  const int tokens = (int)min((int64_t)kTile, args.tokens - first), lane = threadIdx.x % kWarp;
  float sums[kTile];
  warp_dots(args.inner + first * stride, stride, tokens, static_cast<const W*>(args.out.data) + row * columns, columns, fours, sums);
  float value = of_lane(sums);
  if (lane >= tokens) return;
  const float* units = args.units + (first + lane) * 2 * args.width;
  if (args.scale) value += args.scale[row] * units[row] + args.scale[size + row] * units[args.width + row];
  args.adapted[(first + lane) * size + row] = value;
}

// The norm and the gain of the result. One block per token.
__global__ void __launch_bounds__(kThreads) exit_finish_kernel(ExitHeadArgs args) {
  NEAP_SHARED(float, scratch, kWarps);
  const bool affine = args.out.data == nullptr;
  const int64_t size = affine ? args.mix.rows : args.out.rows;
  float* adapted = args.adapted + blockIdx.x * size;
  const float* gain = args.gain;
  norm_row(affine ? args.inner + blockIdx.x * size : adapted, size, args.eps, scratch,
           [=](int64_t i, float value) { adapted[i] = value * gain[i]; });
}

}  // namespace neap::gpu
