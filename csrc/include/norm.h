// Norms of rows without gain: see NormArgs.
#pragma once
#include "exits.h"
#include "half_simd.h"

namespace neap::NEAP_ISA {

// out = x / sqrt(mean(x^2) + eps).
template <class E>
inline void norm_row(const E* x, int64_t width, float eps, float* out) {
  Vec squares = {};
  const int64_t whole = width / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    const Vec value = load(x + i);
    squares = fma(value, value, squares);
  }
  float total = sum_lanes(squares);
  for (int64_t i = whole; i < width; ++i) {
    const float value = to_float(x[i]);
    total += value * value;
  }
  const Vec scale = splat(1.f / __builtin_sqrtf(total / (float)width + eps));
  for_lanes(width, [&](int64_t i, auto get, auto put) { put(out + i, get(x + i) * scale); });
}

inline void norm(const NormArgs& args, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    float* out = args.out + token * args.out_stride;
    const int64_t at = token * args.x_stride;
    switch (args.dtype) {
      case kFloat32: norm_row((const float*)args.x + at, args.width, args.eps, out); break;
      case kFloat16: norm_row((const Half*)args.x + at, args.width, args.eps, out); break;
      case kBfloat16: norm_row((const Bfloat*)args.x + at, args.width, args.eps, out); break;
    }
  }
}

}  // namespace neap::NEAP_ISA
