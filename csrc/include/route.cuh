// Norm and router in one launch: see RouteArgs.
//
// A warp takes one row of the hidden layer and eight tokens. The last block of a tile of tokens joins what its blocks
// made. Every sum has one order, so that the result does not depend on who came last.
#pragma once
#include "dots.cuh"
#include "exits.h"

namespace neap::gpu {

static_assert(kRouteTokens == kTile && kRouteRows == kWarps, "a block's share");

struct Features { float v[kFeatures]; };

__device__ __forceinline__ Features features_of(const RouteArgs& args, int64_t token) {
  const float* top = args.top + token * args.k;
  const float first = top[0] - args.log_mass[token];
  const float second = args.k > 1 ? expf(top[1] - args.log_mass[token]) : 0.f;
  return {{first, expf(first) - second, (float)(args.distance[token] - 1) * 0.25f}};
}

// What one reading of the tokens gives: products with a row of weights, and the squares that the norm needs.
struct Sums { float dots[kTile], squares[kTile]; };

template <bool kFours, class X, class W>
__device__ __forceinline__ void add_products(const X* x, int64_t x_stride, int tokens, const W* weight, int64_t columns,
                                             Sums& sums) {
  constexpr int kWidth = kFours ? 4 : 1;
#pragma unroll 1
  for (int64_t k = threadIdx.x % kWarp * kWidth; k < columns; k += kWarp * kWidth) {
    float w[kWidth];
    if constexpr (kFours) {
      const Four four = load_four(weight + k);
      for (int i = 0; i < kWidth; ++i) w[i] = four.v[i];
    } else {
      w[0] = to_float(weight[k]);
    }
#pragma unroll
    for (int t = 0; t < kTile; ++t) {
      if (t >= tokens) break;
      float value[kWidth];
      if constexpr (kFours) {
        const Four four = load_four(x + t * x_stride + k);
        for (int i = 0; i < kWidth; ++i) value[i] = four.v[i];
      } else {
        value[0] = to_float(x[t * x_stride + k]);
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        sums.dots[t] += w[i] * value[i];
        sums.squares[t] += value[i] * value[i];
      }
    }
  }
}

// The normed products of a row of weights with up to kTile tokens, token t's in lane t.
template <class X, class W>
__device__ __forceinline__ float normed_dot(const X* x, int64_t x_stride, int tokens, const W* weight, int64_t columns,
                                            float eps, bool fours) {
  Sums s;
#pragma unroll
  for (int t = 0; t < kTile; ++t) s.dots[t] = s.squares[t] = 0.f;
  if (fours) add_products<true>(x, x_stride, tokens, weight, columns, s);
  else add_products<false>(x, x_stride, tokens, weight, columns, s);
  float mine = 0.f;
#pragma unroll
  for (int t = 0; t < kTile; ++t) {
    const float dot = warp_sum(s.dots[t]), square = warp_sum(s.squares[t]);
    if ((int)(threadIdx.x % kWarp) == t) mine = dot / sqrtf(square / (float)columns + eps);
  }
  return mine;
}

template <class X, class W>
__global__ void __launch_bounds__(kThreads, 1) route_kernel(RouteArgs args, bool fours) {
  NEAP_SHARED(float, parts, kWarps* kTile);
  NEAP_SHARED(unsigned, arrived, 1);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t width = args.hidden.rows, columns = args.hidden.columns, first = (int64_t)blockIdx.y * kTile;
  const int64_t row = (int64_t)blockIdx.x * kRouteRows + warp;
  const int tokens = (int)min((int64_t)kTile, args.tokens - first);
  float part = 0.f;
  if (row < width) {
    float value = normed_dot(static_cast<const X*>(args.x) + first * args.x_stride, args.x_stride, tokens,
                             static_cast<const W*>(args.hidden.data) + row * columns, columns, args.eps, fours);
    if (lane < tokens) {
      const Features features = features_of(args, first + lane);
      value += args.bias[row];
      for (int f = 0; f < kFeatures; ++f) value += features.v[f] * args.feature_weight[f * width + row];
      part = silu(value) * args.output[row];
    }
  }
  if (lane < kTile) parts[warp * kTile + lane] = part;
  __syncthreads();
  if (warp == 0 && lane < tokens) {
    float sum = 0.f;
    for (int w = 0; w < kWarps; ++w) sum += parts[w * kTile + lane];
    publish(args.inner + (first + lane) * gridDim.x + blockIdx.x, sum);
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
