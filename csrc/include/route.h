// A router's probability from the product of its hidden layer: see RouteArgs.
#pragma once
#include "exits.h"
#include "half_simd.h"

namespace neap::NEAP_ISA {

inline void route_finish(const RouteArgs& args, int64_t begin, int64_t end) {
  const int64_t width = args.hidden.rows;
  for (int64_t token = begin; token < end; ++token) {
    const float* top = args.top + token * args.k;
    const float first = top[0] - args.log_mass[token];
    const float second = args.k > 1 ? __builtin_expf(top[1] - args.log_mass[token]) : 0.f;
    const float features[kFeatures] = {first, __builtin_expf(first) - second,
                                       (float)(args.distance[token] - 1) * 0.25f};
    const float *inner = args.inner + token * width, *weight = args.feature_weight;
    Vec sums = {};
    for_lanes(width, [&](int64_t i, auto get, auto) {
      Vec value = get(inner + i) + get(args.bias + i);
      for (int f = 0; f < kFeatures; ++f) value = value + splat(features[f]) * get(weight + f * width + i);
      sums = sums + value * sigmoid(value) * get(args.output + i);
    });
    float score = sum_lanes(sums) + args.shift;
    for (int f = 0; f < kFeatures; ++f) score += args.skip[f] * features[f];
    const float probability = 1.f / (1.f + __builtin_expf(-score));
    args.probability[token] = probability < args.lowest    ? args.lowest
                              : probability > args.highest ? args.highest
                                                           : probability;
  }
}

}  // namespace neap::NEAP_ISA
