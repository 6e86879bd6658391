// Operations on single rows: norms and rotary embedding.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace neap::NEAP_ISA {

inline float row_mean(const float* x, int64_t width) {
  Vec sum = {};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) sum = sum + load(x + i);
  float total = sum_lanes(sum);
  for (; i < width; ++i) total += x[i];
  return total / (float)width;
}

inline void row_norm(const RowNormArgs& args, int64_t begin, int64_t end) {
  const int64_t width = args.width, whole = width / kLanes * kLanes;
  const Vec offset = splat(args.weight_offset);
  for (int64_t row = begin; row < end; ++row) {
    const float* x = args.x + row * args.x_stride;
    const float* residual = args.residual ? args.residual + row * width : nullptr;
    float* out = args.out + row * width;
    const float mean = args.bias ? row_mean(x, width) : 0.f;
    const Vec means = splat(mean);
    Vec sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * kLanes <= whole; i += 4 * kLanes)
      for (int v = 0; v < 4; ++v) {
        const Vec value = load(x + i + v * kLanes) - means;
        sums[v] = fma(value, value, sums[v]);
      }
    for (; i < whole; i += kLanes) sums[0] = fma(load(x + i) - means, load(x + i) - means, sums[0]);
    float total = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < width; ++i) total += (x[i] - mean) * (x[i] - mean);
    const float scale = 1.f / __builtin_sqrtf(total / (float)width + args.eps);
    const Vec scales = splat(scale);
    for (i = 0; i < whole; i += kLanes) {
      Vec value = (load(x + i) - means) * scales;
      if (args.weight) value = value * (load(args.weight + i) + offset);
      if (args.bias) value = value + load(args.bias + i);
      if (residual) value = load(residual + i) + value;
      store(out + i, args.scale ? value * splat(*args.scale) : value);
    }
    for (; i < width; ++i) {
      float value = (x[i] - mean) * scale;
      if (args.weight) value *= args.weight[i] + args.weight_offset;
      if (args.bias) value += args.bias[i];
      if (residual) value = residual[i] + value;
      out[i] = args.scale ? value * *args.scale : value;
    }
  }
}

// No fused multiply-add, so that the result has the bits of x * cos + rotate_half(x) * sin in PyTorch.
inline void rotary(const RotaryArgs& args, int64_t begin, int64_t end) {
  const int64_t half = args.width / 2, whole = half / kLanes * kLanes;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t batch = item / args.heads, head = item % args.heads;
    for (int64_t row = 0; row < args.length; ++row) {
      const float* x = args.x + batch * args.x_batch + head * args.x_head + row * args.x_row;
      const float* cos = args.cos + batch * args.angle_batch + row * args.angle_row;
      const float* sin = args.sin + batch * args.angle_batch + row * args.angle_row;
      float* out = args.out + (item * args.length + row) * args.width;
      int64_t i = 0;
      for (; i < whole; i += kLanes) {
        const Vec low = load(x + i), high = load(x + half + i);
        store(out + i, low * load(cos + i) + (-high) * load(sin + i));
        store(out + half + i, high * load(cos + half + i) + low * load(sin + half + i));
      }
      for (; i < half; ++i) {
        const float low = x[i], high = x[half + i];
        out[i] = low * cos[i] + (-high) * sin[i];
        out[half + i] = high * cos[half + i] + low * sin[half + i];
      }
    }
  }
}

}  // namespace neap::NEAP_ISA
