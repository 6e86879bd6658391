// Norm and router in one launch: see RouteArgs.
//
// A block takes four rows of the hidden layer and eight tokens, or one if there is but one, and each of its warps a
// part of the columns. The last block of a tile of tokens joins what its blocks made. Every sum has one order, so that
// the result depends neither on who came last nor on the other tokens. What is small is read first, while memory is
// waited for anyway.
#pragma once
#include "dots.cuh"
#include "exits.h"

namespace neap::gpu {

constexpr int kRouteThreads = 256, kRouteWarps = kRouteThreads / kWarp;
static_assert(kRouteTokens == kTile && kRouteRows * kTile == kWarp, "a product per lane of a warp");

// What the features of a draft are made of.
struct Evidence {
  float first, second, log_mass;
  int64_t distance;
};
struct Features { float v[kFeatures]; };

__device__ __forceinline__ Evidence evidence_of(const RouteArgs& args, int64_t token) {
  const float* top = args.top + token * args.k;
  return {top[0], args.k > 1 ? top[1] : -INFINITY, args.log_mass[token], args.distance[token]};
}

__device__ __forceinline__ Features features_of(const Evidence& seen) {
  const float first = seen.first - seen.log_mass, second = expf(seen.second - seen.log_mass);
  return {{first, expf(first) - second, (float)(seen.distance - 1) * 0.25f}};
}

template <class X, class W, int kTokens>
__global__ void __launch_bounds__(kRouteThreads, 1) route_kernel(RouteArgs args, bool eights) {
  constexpr int kRows = (int)kRouteRows;
  NEAP_SHARED(float, dots, kRouteWarps* kWarp);
  NEAP_SHARED(float, squares, kRouteWarps* kTile);
  NEAP_SHARED(unsigned, arrived, 1);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t width = args.hidden.rows, columns = args.hidden.columns, first = (int64_t)blockIdx.y * kTokens;
  const int64_t row = (int64_t)blockIdx.x * kRows;
  const int tokens = (int)min((int64_t)kTokens, args.tokens - first), rows = (int)min((int64_t)kRows, width - row);
  // Of this lane's token and row.
  const int t = lane % kTile, r = lane / kTile;
  const Evidence seen = evidence_of(args, first + min(t, tokens - 1));
  const int64_t lane_row = row + min(r, rows - 1);
  const float bias = args.bias[lane_row], output = args.output[lane_row];
  float weights[kFeatures], skip[kFeatures];
#pragma unroll
  for (int f = 0; f < kFeatures; ++f) {
    weights[f] = args.feature_weight[f * width + lane_row];
    skip[f] = args.skip[f];
  }
  Sums<kRows, kTokens> sums = sums_of<kRows, kTokens>(
      static_cast<const X*>(args.x) + first * args.x_stride, args.x_stride, tokens,
      static_cast<const W*>(args.hidden.data) + row * columns, rows, columns, eights, (int)threadIdx.x, kRouteThreads);
  dots[warp * kWarp + lane] = warp_sum_of_lane<kWarp / 2>(sums.dots);
  const float square_of_warp = warp_sum_of_lane<kTile / 2>(sums.squares);
  if (lane < kTile) squares[warp * kTile + lane] = square_of_warp;
  __syncthreads();
  const Features features = features_of(seen);
  if (warp == 0) {
    float dot = 0.f, square = 0.f;
#pragma unroll
    for (int w = 0; w < kRouteWarps; ++w) {
      dot += dots[w * kWarp + lane];
      square += squares[w * kTile + t];
    }
    float value = dot / sqrtf(square / (float)columns + args.eps) + bias;
#pragma unroll
    for (int f = 0; f < kFeatures; ++f) value += features.v[f] * weights[f];
    float part = r < rows ? silu(value) * output : 0.f;
#pragma unroll
    for (int step = kTile; step < kWarp; step *= 2) part += __shfl_xor_sync(kAll, part, step);
    if (lane < tokens) publish(args.inner + (first + lane) * gridDim.x + blockIdx.x, part);
  }
  if (!is_last_block(args.tickets + blockIdx.y, gridDim.x, arrived)) return;
  if (warp >= tokens) return;
  const int64_t token = first + warp;
  float score = 0.f;
  for (int64_t block = lane; block < gridDim.x; block += kWarp) score += __ldcg(args.inner + token * gridDim.x + block);
  score = warp_sum(score) + args.shift;
  if (lane == warp) {  // whose token it is
#pragma unroll
    for (int f = 0; f < kFeatures; ++f) score += skip[f] * features.v[f];
    args.probability[token] = fminf(fmaxf(1.f / (1.f + expf(-score)), args.lowest), args.highest);
  }
}

}  // namespace neap::gpu
