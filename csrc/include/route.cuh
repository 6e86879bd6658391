// Norm and router in one launch: see RouteArgs.
//
// A block takes four rows of the hidden layer and eight tokens, and each of its warps a part of the columns. The last
// block of a tile of tokens joins what its blocks made. Every sum has one order, so that the result does not depend on
// who came last.
#pragma once
#include "dots.cuh"
#include "exits.h"

namespace neap::gpu {

static_assert(kRouteTokens == kTile && kRouteRows * kTile == kWarp, "a product per lane of a warp");

struct Features { float v[kFeatures]; };

__device__ __forceinline__ Features features_of(const RouteArgs& args, int64_t token) {
  const float* top = args.top + token * args.k;
  const float first = top[0] - args.log_mass[token];
  const float second = args.k > 1 ? expf(top[1] - args.log_mass[token]) : 0.f;
  return {{first, expf(first) - second, (float)(args.distance[token] - 1) * 0.25f}};
}

template <class X, class W>
__global__ void __launch_bounds__(kThreads, 1) route_kernel(RouteArgs args, bool eights) {
  constexpr int kRows = (int)kRouteRows;
  NEAP_SHARED(float, dots, kWarps* kWarp);
  NEAP_SHARED(float, squares, kWarps* kTile);
  NEAP_SHARED(unsigned, arrived, 1);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t width = args.hidden.rows, columns = args.hidden.columns, first = (int64_t)blockIdx.y * kTile;
  const int64_t row = (int64_t)blockIdx.x * kRows;
  const int tokens = (int)min((int64_t)kTile, args.tokens - first);
  const Sums<kRows> sums =
      sums_of<kRows>(static_cast<const X*>(args.x) + first * args.x_stride, args.x_stride, tokens,
                     static_cast<const W*>(args.hidden.data) + row * columns, (int)min((int64_t)kRows, width - row),
                     columns, eights, (int)threadIdx.x, kThreads);
  dots[warp * kWarp + lane] = warp_dot_of_lane(sums.dots, tokens);
#pragma unroll
  for (int t = 0; t < kTile; ++t) {
    if (t >= tokens) break;
    const float square = warp_sum(sums.squares[t]);
    if (lane == t) squares[warp * kTile + t] = square;
  }
  __syncthreads();
  if (warp == 0) {
    const int64_t lane_row = row + lane / kTile;
    const int t = lane % kTile;
    float part = 0.f;
    if (lane_row < width && t < tokens) {
      float dot = 0.f, square = 0.f;
      for (int w = 0; w < kWarps; ++w) {
        dot += dots[w * kWarp + lane];
        square += squares[w * kTile + t];
      }
      const Features features = features_of(args, first + t);
      float value = dot / sqrtf(square / (float)columns + args.eps) + args.bias[lane_row];
      for (int f = 0; f < kFeatures; ++f) value += features.v[f] * args.feature_weight[f * width + lane_row];
      part = silu(value) * args.output[lane_row];
    }
    for (int step = kTile; step < kWarp; step *= 2) part += __shfl_xor_sync(kAll, part, step);
    if (lane < tokens) publish(args.inner + (first + lane) * gridDim.x + blockIdx.x, part);
  }
  if (!is_last_block(args.tickets + blockIdx.y, gridDim.x, arrived)) return;
  for (int t = warp; t < tokens; t += kWarps) {
    const int64_t token = first + t;
    float score = 0.f;
    for (int64_t block = lane; block < gridDim.x; block += kWarp)
      score += __ldcg(args.inner + token * gridDim.x + block);
    score = warp_sum(score) + args.shift;
    if (lane == 0) {
      const Features features = features_of(args, token);
      for (int f = 0; f < kFeatures; ++f) score += args.skip[f] * features.v[f];
      args.probability[token] = fminf(fmaxf(1.f / (1.f + expf(-score)), args.lowest), args.highest);
    }
  }
}

}  // namespace neap::gpu
