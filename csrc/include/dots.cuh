// Dot products of one row of weights with up to kTile tokens, computed by one warp in float32.
#pragma once
#include "device.cuh"

namespace neap::gpu {

// All lanes get all sums; those of tokens past `tokens` are 0. `fours`: load_four can read x and weights.
template <class X, class W>
__device__ __forceinline__ void warp_dots(const X* x, int64_t x_stride, int tokens, const W* weight, int64_t columns,
                                          bool fours, float (&sums)[kTile]) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int t = 0; t < kTile; ++t) sums[t] = 0.f;
  if (fours) {
    for (int64_t k = lane * 4; k < columns; k += kWarp * 4) {
      const Four w = load_four(weight + k);
#pragma unroll
      for (int t = 0; t < kTile; ++t) {
        if (t >= tokens) break;
        const Four value = load_four(x + t * x_stride + k);
        sums[t] += w.v[0] * value.v[0] + w.v[1] * value.v[1] + (w.v[2] * value.v[2] + w.v[3] * value.v[3]);
      }
    }
  } else {
    for (int64_t k = lane; k < columns; k += kWarp) {
      const float w = to_float(weight[k]);
#pragma unroll
      for (int t = 0; t < kTile; ++t)
        if (t < tokens) sums[t] += w * to_float(x[t * x_stride + k]);
    }
  }
#pragma unroll
  for (int t = 0; t < kTile; ++t) sums[t] = warp_sum(sums[t]);
}

// sums[lane], or 0 for lanes from kTile on. Written as a loop because indexing would move `sums` to memory.
__device__ __forceinline__ float of_lane(const float (&sums)[kTile]) {
  float mine = 0.f;
#pragma unroll
  for (int t = 0; t < kTile; ++t)
    if ((int)(threadIdx.x % kWarp) == t) mine = sums[t];
  return mine;
}

}  // namespace neap::gpu
