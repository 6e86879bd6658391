// Products of quantised weights and rounded inputs by the matrix unit of processors with AMX.
//
// Its sums of bytes are exact, as those of ByteSums are, and they are scaled and added in the same order, so the bits
// of a result are those of `rounded_tile`. A depth block of a panel is taken apart once for all rows. Then the unit
// sums each group for up to 16 rows at once. All sums of the block lie in memory before they are scaled, because the
// unit answers late.
#pragma once
#include "taken_block.h"

namespace neap::NEAP_ISA {

constexpr int64_t kUnitRows = 16;  // of a tile's inputs
// Fewer rows take longer than with ByteSums: a tile of one row costs the unit what one of eight does. Measured of whole
// passes (bench.passes).
constexpr int64_t kLeastUnitRows = 13;
// Panels whose results are written together: a page of each row is touched once for all of them.
constexpr int64_t kUnitPanels = 4;

// The eight registers, used in turn: two of inputs, two of quants, four of sums.
constexpr int kInputTiles = 0, kQuantTiles = 2, kSumTiles = 4;

struct alignas(64) UnitConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles of `rows` rows and `inputs` inputs, for this thread, until `release_unit`.
inline void configure_unit(int64_t rows, int64_t inputs) {
  UnitConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = (uint16_t)(tile < kQuantTiles ? inputs : kPanel * 4);
    config.rows[tile] = (uint8_t)(tile < kQuantTiles || tile >= kSumTiles ? rows : inputs / 4);
  }
  __asm__ volatile("ldtilecfg %0" : : "m"(config));
}

// Registers in use would be saved whenever the thread is interrupted.
inline void release_unit() { __asm__ volatile("tilerelease"); }

template <int kTile> NEAP_INLINE void zero_tile() { __asm__ volatile("tilezero %%tmm%c0" : : "i"(kTile)); }

template <int kTile> NEAP_INLINE void load_tile(const void* from, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile> NEAP_INLINE void store_tile(void* to, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kTile) : "memory");
}

// Adds products of signed inputs and of quants.
template <int kSum, int kInput, int kQuant, bool kSignedQuants> NEAP_INLINE void add_tile() {
  if constexpr (kSignedQuants)
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kInput), "i"(kQuant));
  else __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kInput), "i"(kQuant));
}

template <Format kFormat>
struct UnitBlock : TakenBlock<kFormat, true> {
  typedef TakenBlock<kFormat, true> Taken;
  typedef typename Taken::Reader Reader;
  using Taken::kGroup, Taken::kGroups, Taken::quants, Taken::scales, Taken::offsets;
  static constexpr bool kSigned = Reader::kBias != 0 || Reader::kLayout.bits == 8;

  // sums [groups, kUnitRows, 16] of a tile of rows, whose first group is at x. A sum is stored two groups after it was
  // begun. Prefetches `lines` cache lines per group: spread like this, reading takes no time of its own.
  NEAP_INLINE void sum_groups(const float* x, int64_t stride, int64_t groups, int32_t* sums, const uint8_t* ahead,
                              int64_t lines) const {
    for_inputs<kGroups + 2>([&](auto number) __attribute__((always_inline)) {
      constexpr int kAt = decltype(number)::value, kIn = kAt * kGroup;
      if (kAt < kGroups && kAt < groups) {
        const InputGroup& group = reinterpret_cast<const InputGroup*>(x)[kIn / kRoundedInputs];
        load_tile<kInputTiles + kAt % 2>(group.words + kIn % kRoundedInputs / 4, stride * 4);
        load_tile<kQuantTiles + kAt % 2>(quants + kIn / 4, kPanel * 4);
        zero_tile<kSumTiles + kAt % 4>();
        add_tile<kSumTiles + kAt % 4, kInputTiles + kAt % 2, kQuantTiles + kAt % 2, kSigned>();
      }
      if (kAt >= 2 && kAt - 2 < groups)
        store_tile<kSumTiles + (kAt + 2) % 4>(sums + (kAt - 2) * kUnitRows * kPanel, kPanel * 4);
      for (int64_t line = 0; line < lines; ++line, ahead += 64) __builtin_prefetch(ahead);
    });
  }

  // Scales the sums of the rows at x and writes them to c, or adds them.
  template <int kRows>
  NEAP_INLINE void scale_rows(const float* x, int64_t stride, int64_t groups, const int32_t* sums, float* c,
                              int64_t c_stride, bool accumulate) const {
    Vec total[kRows] = {};
    for (int64_t group = 0; group < groups; ++group, sums += kUnitRows * kPanel) {
      const int64_t at = group * kGroup / kRoundedInputs;
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const InputGroup& input = reinterpret_cast<const InputGroup*>(x + r * stride)[at];
        const Vec sum = __builtin_convertvector(*reinterpret_cast<const IntVec*>(sums + r * kPanel), Vec);
        total[r] = fma(sum * splat(input.scale), scales[group], total[r]);
        if constexpr (Reader::kHasOffset) total[r] = fma(splat(input.scaled_sum), offsets[group], total[r]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      float* out = c + r * c_stride;
      store(out, accumulate ? load(out) + total[r] : total[r]);
    }
  }
};

// As multiply_panels, of one format, for kLeastUnitRows rows or more.
template <Format kFormat>
__attribute__((noinline)) void unit_panels(const Matrix& matrix, int64_t in_features, const float* x, int64_t stride,
                                           int64_t rows, int64_t first, int64_t panels, const uint8_t* next, float* c) {
  typedef UnitBlock<kFormat> Block;
  alignas(64) int32_t sums[Block::kGroups * kUnitRows * kPanel];
  const int64_t height = ceil_div(rows, ceil_div(rows, kUnitRows)), c_stride = panels * kPanel;
  configure_unit(height, Block::kGroup);
  const auto multiply_block = [&](const Block& taken, int64_t p, int64_t k, int64_t groups, const uint8_t* ahead,
                                  int64_t lines) {
    const float* inputs = x + k / kRoundedInputs * kGroupFloats;
    float* out = c + p * kPanel;
    for (int64_t row = 0, stop; row < rows; row = stop) {
      // All tiles are equally high: the last one begins early in place of ending late.
      stop = min64(rows, row + height);
      const int64_t tile = stop - height;
      taken.sum_groups(inputs + tile * stride, stride, groups, sums, ahead, row ? 0 : lines);
      const auto scale = [&](auto count, int64_t r) __attribute__((always_inline)) {
        taken.template scale_rows<decltype(count)::value>(
            inputs + r * stride, stride, groups, sums + (r - tile) * kPanel, out + r * c_stride, c_stride, k > 0);
      };
      int64_t r = row;
      for (; r + 4 <= stop; r += 4) scale(Number<4>(), r);
      for (; r < stop; ++r) scale(Number<1>(), r);
    }
  };
  for_blocks<Block>(matrix, in_features, first, panels, next, multiply_block);
  release_unit();
}

// From kQ4_0 on.
constexpr BlockProduct kUnitProducts[kFormats - kQ4_0] = {
    unit_panels<kQ4_0>, unit_panels<kQ4_1>, unit_panels<kQ5_0>, unit_panels<kQ5_1>,  unit_panels<kQ8_0>,
    unit_panels<kQ4_K>, unit_panels<kQ5_K>, unit_panels<kQ6_K>, unit_panels<kMxfp4>,
};

}  // namespace neap::NEAP_ISA
