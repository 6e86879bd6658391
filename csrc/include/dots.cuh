// Dot products of a few rows of weights with a few tokens, in float32. A token is read once for all rows.
#pragma once
#include "device.cuh"

namespace neap::gpu {

// Of a thread's share of the columns. `squares`: of the tokens' numbers, which a norm needs.
template <int kRows, int kTokens>
struct Sums {
  float dots[kRows * kTokens], squares[kTokens];
};

// Rows and tokens past the last are read as the last, so that no read waits for a comparison.
template <int kSize, int kRows, int kTokens, class X, class W>
__device__ __forceinline__ void add_columns(const X* x, int64_t x_stride, int tokens, const W* weight, int rows,
                                            int64_t columns, int thread, int threads, Sums<kRows, kTokens>& sums) {
#pragma unroll(kTokens == 1 ? 2 : 1)
  for (int64_t k = thread * kSize; k < columns; k += threads * kSize) {
    float w[kRows][kSize], value[kTokens][kSize];
#pragma unroll
    for (int r = 0; r < kRows; ++r) load_numbers<kSize>(weight + min(r, rows - 1) * columns + k, w[r]);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) load_numbers<kSize>(x + min(t, tokens - 1) * x_stride + k, value[t]);
#pragma unroll
    for (int t = 0; t < kTokens; ++t)
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) sums.dots[r * kTokens + t] += w[r][i] * value[t][i];
        sums.squares[t] += value[t][i] * value[t][i];
      }
  }
}

// The sums of thread number `thread` of `threads` over its columns of `rows` rows, which begin at `weight`. Those of
// further rows and tokens are undefined. `eights`: whether takes_eight holds for x and the weights.
template <int kRows, int kTokens, class X, class W>
__device__ __forceinline__ Sums<kRows, kTokens> sums_of(const X* x, int64_t x_stride, int tokens, const W* weight,
                                                        int rows, int64_t columns, bool eights, int thread,
                                                        int threads) {
  Sums<kRows, kTokens> sums{};
  if (eights) add_columns<8>(x, x_stride, tokens, weight, rows, columns, thread, threads, sums);
  else add_columns<1>(x, x_stride, tokens, weight, rows, columns, thread, threads, sums);
  return sums;
}

// Of values i and i + kCount / 2 a lane keeps the one that its number's bit kBit says, and adds what the lane that
// differs in this bit has of it; and so on with half as many values and the next lower bit.
template <int kCount, int kBit, int kSize>
__device__ __forceinline__ void add_halves(float (&values)[kSize]) {
  if constexpr (kCount > 1) {
    const bool upper = threadIdx.x & kBit;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      float low = values[i], high = values[i + kCount / 2];
      hold(low), hold(high);
      values[i] = (upper ? high : low) + __shfl_xor_sync(kAll, upper ? low : high, kBit);
    }
    add_halves<kCount / 2, kBit / 2>(values);
  }
}

// Of kCount values lane l gets the warp's sum of number l * kCount / (2 * kBit) modulo kCount, with few shuffles. A sum
// has the same order for any kCount.
template <int kBit, int kCount>
__device__ __forceinline__ float warp_sum_of_lane(float (&values)[kCount]) {
  static_assert(kCount <= 2 * kBit && kBit < kWarp && (kCount & (kCount - 1)) == 0);
  add_halves<kCount, kBit>(values);
  float sum = values[0];
#pragma unroll
  for (int step = kBit / kCount; step > 0; step /= 2) sum += __shfl_xor_sync(kAll, sum, step);
#pragma unroll
  for (int step = 2 * kBit; step < kWarp; step *= 2) sum += __shfl_xor_sync(kAll, sum, step);
  return sum;
}

}  // namespace neap::gpu
