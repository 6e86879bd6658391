// The parts of an exit head between its matrix products: see ExitHeadArgs.
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

// Adds the offset to the product with `mix`. Gated: replaces the first half by silu(first half) * second half.
inline void exit_gate(const ExitHeadArgs& args, int64_t begin, int64_t end) {
  const int64_t size = args.mix.rows, rank = size / 2;
  for (int64_t token = begin; token < end; ++token) {
    float* inner = args.inner + token * size;
    const float* offset = args.offset + (max64(1, min64(args.distance[token], args.num_offsets)) - 1) * size;
    if (args.out.data == nullptr)
      for_lanes(size, [&](int64_t i, auto get, auto put) { put(inner + i, get(inner + i) + get(offset + i)); });
    else
      for_lanes(rank, [&](int64_t i, auto get, auto put) {
        const Vec gate = get(inner + i) + get(offset + i);
        put(inner + i, gate * sigmoid(gate) * (get(inner + rank + i) + get(offset + rank + i)));
      });
  }
}

// Adds the scaled states to the product of the last matrix, normalises the sum and applies the gain. The result is `adapted`.
inline void exit_finish(const ExitHeadArgs& args, int64_t begin, int64_t end) {
  const bool affine = args.out.data == nullptr;
  const int64_t size = affine ? args.mix.rows : args.out.rows;
  for (int64_t token = begin; token < end; ++token) {
    float* adapted = args.adapted + token * size;
    const float *own = args.units + token * 2 * args.width, *deep = own + args.width, *scale = args.scale;
    const float* from = affine ? args.inner + token * size : adapted;
    if (scale)
      for_lanes(size, [&](int64_t i, auto get, auto put) {
        put(adapted + i, (get(adapted + i) + get(scale + i) * get(own + i)) + get(scale + size + i) * get(deep + i));
      });
    norm_row(from, size, args.eps, adapted);
    for_lanes(size, [&](int64_t i, auto get, auto put) { put(adapted + i, get(adapted + i) * get(args.gain + i)); });
  }
}

}  // namespace neap::NEAP_ISA
