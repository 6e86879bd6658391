// Products of float16 rows with float32 tokens on matrix units. A token is the sum of two float16 numbers, which leave
// no more than 2^-22 of it, or 2^-25, out; from 65,520 on it counts as infinite, and its products as NaN.
#pragma once
#include "device.cuh"

namespace neap::gpu {

constexpr int kMatrixRows = 64, kMatrixWarps = 8;  // of a block
constexpr int kMostTiles = 4;                      // eight spill on some cards
// From one token's sums to the next: warps then write to 32 banks at once.
constexpr int kMatrixStride = kMatrixRows + 4;

// Two float16 numbers, the first in the lower half.
__device__ __forceinline__ uint32_t paired(float first, float second) {
#if defined(NEAP_EMULATED) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800)
  return from_float<Half>(first).bits | (uint32_t)from_float<Half>(second).bits << 16;
#else
  uint32_t out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(second), "f"(first));
  return out;
#endif
}
__device__ __forceinline__ float lower(uint32_t pair) { return to_float(Half{(uint16_t)pair}); }
__device__ __forceinline__ float upper(uint32_t pair) { return to_float(Half{(uint16_t)(pair >> 16)}); }

// sums += a @ b of a warp, for 16 rows and 8 tokens over 16 columns, in PTX's arrangement of m16n8k16.
__device__ __forceinline__ void multiply_add(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if defined(NEAP_EMULATED)
  emulator::multiply_add(sums, a, b);
#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
#pragma unroll
  for (int half = 0; half < 2; ++half)
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(b[half]));
#endif
}

// out[token * kMatrixStride + row] = weight[row] @ x[token] for kMatrixRows rows and up to kTiles * kTile tokens; what
// stands beyond `tokens` is undefined. takes_eight must hold for both. Warp w adds the columns whose number
// divided by 32 is w modulo kMatrixWarps, then the warps' sums are added in an order that depends on the row alone: a
// token has the same bits in any company. All threads of a block of kMatrixWarps warps must call it.
template <int kTiles>
__device__ __forceinline__ void matrix_products(const float* x, int tokens, const Half* weight, int columns,
                                                float* out) {
  constexpr int kParts = kMatrixRows / 16;
  static_assert(2 * kParts == kMatrixWarps, "in each round a warp adds half of a part");
  const int warp = threadIdx.x / kWarp, group = threadIdx.x % kWarp / 4, quarter = threadIdx.x % 4;
  float sums[kParts][kTiles][4] = {};
  // A lane takes eight neighbouring columns of a row, four of which each of two instructions multiplies. So these do
  // not have the columns in their order, but the same ones of rows and tokens.
#pragma unroll(kTiles == 1 ? 2 : 1)
  for (int first = warp * kWarp; first < columns; first += kMatrixWarps * kWarp) {
    // Past the last column a lane reads others again, and multiplies them by zeros.
    const int wanted = first + 8 * quarter, column = min(wanted, columns - 8);
    const uint32_t mask = wanted == column ? ~0u : 0u;
    Sixteen w[kParts][2];
#pragma unroll
    for (int i = 0; i < 2 * kParts; ++i) {
      w[i / 2][i % 2] = *reinterpret_cast<const Sixteen*>(weight + (8 * i + group) * columns + column);
      for (uint32_t& pair : w[i / 2][i % 2].v) pair &= mask;
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float value[8];
      load_numbers<8>(x + min(tile * kTile + group, tokens - 1) * columns + column, value);
      uint32_t high[2][2], low[2][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t pair = paired(value[2 * i], value[2 * i + 1]);
        high[i / 2][i % 2] = pair;
        low[i / 2][i % 2] = paired(value[2 * i] - lower(pair), value[2 * i + 1] - upper(pair));
      }
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const Sixteen &a = w[part][0], &b = w[part][1];
          const uint32_t row[4] = {a.v[2 * half], b.v[2 * half], a.v[2 * half + 1], b.v[2 * half + 1]};
          multiply_add(sums[part][tile], row, high[half]);
          multiply_add(sums[part][tile], row, low[half]);
        }
    }
  }
  // In a round no two warps add to the same rows.
  for (int round = 0; round < kMatrixWarps; ++round) {
#pragma unroll
    for (int i = 0; i < 2 * kParts; ++i) {
      if ((i + round) % kMatrixWarps != warp) continue;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          float* at = out + (tile * kTile + 2 * quarter + side) * kMatrixStride + 8 * i + group;
          *at = (round ? *at : 0.f) + sums[i / 2][tile][i % 2 * 2 + side];
        }
    }
    __syncthreads();
  }
}

}  // namespace neap::gpu
