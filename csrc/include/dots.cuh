// Dot products of a few rows of weights with up to kTile tokens, in float32. A token is read once for all rows.
#pragma once
#include "device.cuh"

namespace neap::gpu {

// Of a thread's share of the columns. `squares`: of the tokens' numbers, which a norm needs.
template <int kRows>
struct Sums {
  float dots[kRows][kTile], squares[kTile];
};

template <int kSize, int kRows, class X, class W>
__device__ __forceinline__ void add_columns(const X* x, int64_t x_stride, int tokens, const W* weight, int rows,
                                            int64_t columns, int thread, int threads, Sums<kRows>& sums) {
#pragma unroll 2
  for (int64_t k = thread * kSize; k < columns; k += threads * kSize) {
    float w[kRows][kSize] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (r < rows) load_numbers<kSize>(weight + r * columns + k, w[r]);
#pragma unroll
    for (int t = 0; t < kTile; ++t) {
      if (t >= tokens) break;
      float value[kSize];
      load_numbers<kSize>(x + t * x_stride + k, value);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) sums.dots[r][t] += w[r][i] * value[i];
        sums.squares[t] += value[i] * value[i];
      }
    }
  }
}

// The sums of thread number `thread` of `threads` over its columns of `rows` <= kRows rows, which begin at `weight`.
// Those of further rows and tokens are 0. `eights`: whether takes_eight holds for x and the weights.
template <int kRows, class X, class W>
__device__ __forceinline__ Sums<kRows> sums_of(const X* x, int64_t x_stride, int tokens, const W* weight, int rows,
                                               int64_t columns, bool eights, int thread, int threads) {
  Sums<kRows> sums;
#pragma unroll
  for (int t = 0; t < kTile; ++t) {
    sums.squares[t] = 0.f;
#pragma unroll
    for (int r = 0; r < kRows; ++r) sums.dots[r][t] = 0.f;
  }
  if (eights) add_columns<8>(x, x_stride, tokens, weight, rows, columns, thread, threads, sums);
  else add_columns<1>(x, x_stride, tokens, weight, rows, columns, thread, threads, sums);
  return sums;
}

// The warp's sum for row l / kTile and token l % kTile, in lane l. Written as a loop because indexing would move `dots`
// to memory.
template <int kRows>
__device__ __forceinline__ float warp_dot_of_lane(const float (&dots)[kRows][kTile], int tokens) {
  static_assert(kRows * kTile == kWarp, "a product per lane");
  float mine = 0.f;
#pragma unroll
  for (int t = 0; t < kTile; ++t) {
    if (t >= tokens) break;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float dot = warp_sum(dots[r][t]);
      if ((int)(threadIdx.x % kWarp) == r * kTile + t) mine = dot;
    }
  }
  return mine;
}

}  // namespace neap::gpu
