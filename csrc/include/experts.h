// What is special about layers with experts: the choice of each token's, and the sum of what they make.
#pragma once
#include "half_simd.h"
#include "kernels.h"

namespace neap::NEAP_ISA {

inline void choose_experts(const ExpertChoiceArgs& args, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    const float* logits = args.logits + token * args.experts;
    float* shares = args.shares + token * args.chosen;
    int64_t* index = args.index + token * args.chosen;
    for (int64_t choice = 0; choice < args.chosen; ++choice) {
      const int64_t last = choice ? index[choice - 1] : 0;
      int64_t best = -1;
      for (int64_t e = 0; e < args.experts; ++e) {
        const bool later = !choice || logits[e] < logits[last] || (logits[e] == logits[last] && e > last);
        if (later && (best < 0 || logits[e] > logits[best])) best = e;
      }
      index[choice] = best < 0 ? choice : best;  // no number is larger than NaN
    }
    const float largest = logits[index[0]];
    Vec sums = {};
    for_lanes(args.experts, [&](int64_t e, auto get, auto) {
      float lanes[kLanes] = {};
      store(lanes, exp(get(logits + e) - splat(largest)));
      for (int64_t i = args.experts - e; i < kLanes; ++i) lanes[i] = 0.f;
      sums = sums + load(lanes);
    });
    float total = sum_lanes(sums), chosen = 0.f;
    for (int64_t choice = 0; choice < args.chosen; ++choice)
      chosen += shares[choice] = exp(splat(logits[index[choice]] - largest))[0] / total;
    for (int64_t choice = 0; args.normed && choice < args.chosen; ++choice) shares[choice] /= chosen;
  }
}

inline void sum_experts(const ExpertSumArgs& args, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    const int64_t* places = args.places + token * args.chosen;
    const float* shares = args.shares + token * args.chosen;
    const int64_t at = token * args.width;
    for_lanes(args.width, [&](int64_t i, auto get, auto put) {
      Vec sum = {};
      for (int64_t choice = 0; choice < args.chosen; ++choice)
        if (places[choice] >= 0) sum = sum + get(args.made + places[choice] * args.width + i) * splat(shares[choice]);
      for (const float* residual : args.residuals)
        if (residual) sum = get(residual + at + i) + sum;
      put(args.out + at + i, sum);
    });
  }
}

}  // namespace neap::NEAP_ISA
