// Products of quantised weights and many rounded inputs where products of bytes are summed in 16 bits: AVX2, and
// AVX-512 without VNNI.
//
// 16 registers hold the sums of three rows. So `rounded_tile` keeps taking apart what it multiplies by, and moves its
// sums to memory and back. Here a depth block is taken apart once for all rows. The additions are those of
// `rounded_tile`, in its order, and so are the bits.
#pragma once
#include "taken_block.h"

namespace neap::NEAP_ISA {

// Fewer rows take longer than by `rounded_tile`. Measured of whole passes.
constexpr int64_t kLeastByteRows = 24;

template <Format kFormat>
struct ByteBlock : TakenBlock<kFormat, false> {
  typedef TakenBlock<kFormat, false> Taken;
  typedef typename Taken::Reader Reader;
  typedef ByteSums<Reader::kQuadBits> Quads;
  using Taken::kGroup, Taken::quants, Taken::scales, Taken::offsets;
  static constexpr int kWords = kGroup / 4;

  // c [kRows, 16] = the rows at x times the block's `groups` groups, or adds that to c. Prefetches `lines` cache lines
  // per group.
  template <int kRows>
  __attribute__((noinline)) void multiply(const float* x, int64_t stride, int64_t groups, float* c, int64_t c_stride,
                                          bool accumulate, const uint8_t* ahead, int64_t lines) const {
    const InputGroup* rows[kRows];
    for (int r = 0; r < kRows; ++r) rows[r] = reinterpret_cast<const InputGroup*>(x + r * stride);
    Vec sum[kRows][kPanelVecs] = {};
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t at = group * kGroup / kRoundedInputs, half = group * kGroup % kRoundedInputs / 16;
      const UintVec* column = quants + group * kWords * kPanelVecs;
      for (int64_t line = 0; line < lines; ++line, ahead += 64) __builtin_prefetch(ahead);
      Quads quads[kRows][kPanelVecs];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kPanelVecs; ++v) quads[r][v].begin(0);
      for_inputs<kWords>([&](auto word) __attribute__((always_inline)) {
        constexpr int kWord = decltype(word)::value;
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r)
          for (int v = 0; v < kPanelVecs; ++v)
            quads[r][v].template add<kWord, kWords - 1>(column[kWord * kPanelVecs + v],
                                                        rows[r][at].words[half * 4 + kWord]);
      });
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const InputGroup& input = rows[r][at];
        for (int v = 0; v < kPanelVecs; ++v) {
          const int64_t place = group * kPanelVecs + v;
          IntVec total = quads[r][v].total;
          if constexpr (Reader::kBias != 0)
            total -= Reader::kBias * (kGroup == 16 ? input.sums[half] : input.sums[0] + input.sums[1]);
          sum[r][v] = fma(__builtin_convertvector(total, Vec) * splat(input.scale), scales[place], sum[r][v]);
          if constexpr (Reader::kHasOffset) sum[r][v] = fma(splat(input.scaled_sum), offsets[place], sum[r][v]);
        }
      }
    }
    store_sums(c, c_stride, accumulate, sum);
  }
};

// `rows`: more than one.
template <Format kFormat>
__attribute__((noinline)) void byte_panels(const Matrix& matrix, int64_t in_features, const float* x, int64_t stride,
                                           int64_t rows, int64_t first, int64_t panels, const uint8_t* next, float* c) {
  typedef ByteBlock<kFormat> Block;
  const auto multiply_block = [&](const Block& taken, int64_t p, int64_t k, int64_t groups, const uint8_t* ahead,
                                  int64_t lines) {
    const int64_t c_stride = panels * kPanel;
    int64_t row = 0;
    const auto multiply = [&](auto count) __attribute__((always_inline)) {
      taken.template multiply<decltype(count)::value>(x + k / kRoundedInputs * kGroupFloats + row * stride, stride,
                                                      groups, c + p * kPanel + row * c_stride, c_stride, k > 0, ahead,
                                                      row ? 0 : lines);
      row += decltype(count)::value;
    };
    while (row + 3 <= rows && row + 4 != rows) multiply(Number<3>());
    while (row < rows) multiply(Number<2>());
  };
  for_blocks<Block>(matrix, in_features, first, panels, next, multiply_block);
}

// From kQ4_0 on.
constexpr BlockProduct kByteProducts[kFormats - kQ4_0] = {
    byte_panels<kQ4_0>, byte_panels<kQ4_1>, byte_panels<kQ5_0>, byte_panels<kQ5_1>,  byte_panels<kQ8_0>,
    byte_panels<kQ4_K>, byte_panels<kQ5_K>, byte_panels<kQ6_K>, byte_panels<kMxfp4>,
};

}  // namespace neap::NEAP_ISA
