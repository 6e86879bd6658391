// The microkernel of products that round their inputs to bfloat16, where BFMMLA multiplies two rows at once.
//
// BFMMLA adds to each sum what two BFDOT in turn add to it (BFMatMulAdd and BFDotAdd in the Arm Architecture Reference
// Manual, DDI 0487). So an odd last row, an odd last pair of inputs and every tile shape give the same bits.
#pragma once
#include "tile.h"

#if defined(NEAP_I8MM)
namespace neap::NEAP_ISA {

template <int kRows, int kPanels>
__attribute__((noinline)) void bfloat_tile(const TileArgs& t) {
  constexpr int kColumns = kPanels * kPanelVecs, kLine = kPanel * 4;  // bytes of 16 pairs
  const float* a = t.a;
  const uint8_t *b = t.b, *ahead = t.ahead.next;
  int64_t turn = t.ahead.turn;
  float32x4_t pairs[kRows / 2 + 1][kColumns][2] = {};  // see GroupSums
  Vec sum[kRows][kColumns] = {};
  const auto line = [&](int c, int64_t k) __attribute__((always_inline)) {
    return load_bits(b + c / kPanelVecs * t.panel_stride + k * kLine + c % kPanelVecs * kLanes * 4);
  };
  int64_t k = 0;
  for (; k + 2 <= t.depth; k += 2, ahead += 2 * t.ahead.step) {
    if (k >= turn) {
      ahead += t.ahead.jump;
      turn = kNever;
    }
    for (int p = 0; p < kPanels; ++p)
      for (int i = 0; i < 2; ++i) __builtin_prefetch(ahead + p * t.ahead.panel_stride + i * kLine);
#pragma GCC unroll 24
    for (int c = 0; c < kColumns; ++c) {
      const UintVec even = line(c, k), odd = line(c, k + 1);
      const bfloat16x8_t first = (bfloat16x8_t)vzip1q_u32((uint32x4_t)even, (uint32x4_t)odd);
      const bfloat16x8_t second = (bfloat16x8_t)vzip2q_u32((uint32x4_t)even, (uint32x4_t)odd);
#pragma GCC unroll 12
      for (int p = 0; p < kRows / 2; ++p) {
        const float* row = a + 2 * p * t.a_stride + k;
        const bfloat16x8_t rows = (bfloat16x8_t)vcombine_f32(vld1_f32(row), vld1_f32(row + t.a_stride));
        pairs[p][c][0] = vbfmmlaq_f32(pairs[p][c][0], rows, first);
        pairs[p][c][1] = vbfmmlaq_f32(pairs[p][c][1], rows, second);
      }
      if constexpr (kRows % 2 == 1) {
        const float* row = a + (kRows - 1) * t.a_stride + k;
        Vec& last = sum[kRows - 1][c];
        last = dot_pairs(splat(row[1]), (Vec)odd, dot_pairs(splat(row[0]), (Vec)even, last));
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 24
    for (int c = 0; c < kColumns; ++c) {
      const float64x2_t first = (float64x2_t)pairs[r / 2][c][0], second = (float64x2_t)pairs[r / 2][c][1];
      if (r / 2 < kRows / 2) sum[r][c] = (Vec)(r % 2 == 0 ? vtrn1q_f64(first, second) : vtrn2q_f64(first, second));
      if (k < t.depth) sum[r][c] = dot_pairs(splat(a[r * t.a_stride + k]), (Vec)line(c, k), sum[r][c]);
    }
  store_sums(t.c, t.c_stride, t.accumulate, sum);
}

template <int kRows, int kPanels>
struct TileOf<BfloatDots, kRows, kPanels> {
  static constexpr TileFn kTile = bfloat_tile<kRows, kPanels>;
};

}  // namespace neap::NEAP_ISA
#endif
