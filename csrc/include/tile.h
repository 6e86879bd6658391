// The microkernel of packed products and attention: a few rows times a few 16-wide panels, summed over depth in order.
//
// Every output element is the same chain of fused multiply-adds in every tile shape, so its bits do not depend on the
// number of rows, the number of threads or its position.
#pragma once
#include "kernels.h"
#include "dequantise.h"

namespace neap::NEAP_ISA {

// The number of panels per tile of `rows` rows: as many as their accumulators fit in registers, so that enough chains
// of multiply-adds are independent to hide the latency, but at most Reader::kMost. A reader takes registers, too.
template <class Reader>
constexpr int panels_for(int rows) {
  if (rows <= Reader::kStreamRows) return 1;
  const int fitting = Reader::kHeld ? (kRegisters - 3) / (kPanelVecs * (Reader::kSums * rows + Reader::kHeld))
                                    : kAccumulators / (rows * kPanelVecs);
  return fitting < 1 ? 1 : fitting > Reader::kMost ? Reader::kMost : fitting;
}

// How far ahead of its reading a tile prefetches, in bytes of all its panels together: far enough for the latency of
// memory, and little enough for the L1 cache.
constexpr int64_t kPrefetchBytes = 6144;

// What a tile prefetches while it multiplies: at input k the byte `next` + k * `step` of its first panel, and the same
// of the others, `panel_stride` bytes apart; `jump` bytes farther from input `turn` on.
struct Ahead {
  const uint8_t* next;
  int64_t step, panel_stride, turn = kNever, jump = 0;
};

struct TileArgs {
  const float* a;  // [rows, depth], rows `a_stride` apart
  int64_t a_stride;
  const uint8_t* b;  // a depth block of each panel, `panel_stride` bytes apart
  int64_t panel_stride;
  int64_t row_bytes;  // Rows<E, 0> only: from one input's row to the next
  int64_t depth;
  float* c;  // [rows, panels * 16], rows `c_stride` apart
  int64_t c_stride;
  bool accumulate;  // add to c instead of overwriting it
  Ahead ahead;
};

// Writes a tile's sums to c, whose rows lie `c_stride` apart, or adds them.
template <int kRows, int kColumns>
NEAP_INLINE void store_sums(float* c, int64_t c_stride, bool accumulate, const Vec (&sum)[kRows][kColumns]) {
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 24
    for (int column = 0; column < kColumns; ++column) {
      float* out = c + r * c_stride + column * kLanes;
      store(out, accumulate ? load(out) + sum[r][column] : sum[r][column]);
    }
}

template <class Reader, int kRows, int kPanels>
__attribute__((noinline)) void tile(const TileArgs& t) {
  constexpr int kColumns = kPanels * kPanelVecs, kUnit = Reader::kUnit;
  const int64_t a_stride = t.a_stride;
  const float* a = t.a;
  const uint8_t* ahead = t.ahead.next;
  const int64_t ahead_step = kUnit * t.ahead.step, ahead_stride = t.ahead.panel_stride;
  int64_t turn = t.ahead.turn;
  Reader readers[kPanels];
  for (int p = 0; p < kPanels; ++p) readers[p].begin(t.b + p * t.panel_stride, t.depth, t.row_bytes);
  Vec sum[kRows][kColumns] = {};
  const auto add_input = [&](auto input, const float* from) __attribute__((always_inline)) {
    Vec column[kColumns];
#pragma GCC unroll 24
    for (int p = 0; p < kPanels; ++p)
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVecs; ++v)
        column[p * kPanelVecs + v] = readers[p].template column<decltype(input)::value>(v);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const Vec value = splat(from[r * a_stride + decltype(input)::value]);
#pragma GCC unroll 24
      for (int c = 0; c < kColumns; ++c) sum[r][c] = Reader::add(value, column[c], sum[r][c]);
    }
  };
  int64_t k = 0;
  while (k + kUnit <= t.depth) {
#pragma GCC unroll 24
    for (int p = 0; p < kPanels; ++p) readers[p].open(k);
    if (k >= turn) {
      ahead += t.ahead.jump;
      turn = kNever;
    }
    for (int u = 0; u < Reader::kGroup / kUnit; ++u, k += kUnit, a += kUnit, ahead += ahead_step) {
#pragma GCC unroll 24
      for (int p = 0; p < kPanels; ++p) {
        readers[p].load(k);
        if (k % Reader::kLineInputs == 0) __builtin_prefetch(ahead + p * ahead_stride, 0, Reader::kNear ? 3 : 2);
        if (kUnit > Reader::kLineInputs) __builtin_prefetch(ahead + p * ahead_stride + 64);
      }
      for_inputs<kUnit>([&](auto input) __attribute__((always_inline)) { add_input(input, a); });
    }
  }
  if (kUnit == 2 && k < t.depth) {  // the last of an odd number of inputs
    for (int p = 0; p < kPanels; ++p) readers[p].load(k);
    add_input(Number<0>(), a);
  }
  store_sums(t.c, t.c_stride, t.accumulate, sum);
}

using TileFn = void (*)(const TileArgs&);

template <class Reader, int kRows, int kPanels>
struct TileOf {
  static constexpr TileFn kTile = tile<Reader, kRows, kPanels>;
};

template <class Reader, int kRows, int kPanels>
struct TilePicker {
  static TileFn pick(int rows, int panels) {
    if (rows != kRows) {
      if constexpr (kRows > 1) return TilePicker<Reader, kRows - 1, panels_for<Reader>(kRows - 1)>::pick(rows, panels);
    } else if (panels != kPanels) {
      if constexpr (kPanels > 1) return TilePicker<Reader, kRows, kPanels - 1>::pick(rows, panels);
    }
    return TileOf<Reader, kRows, kPanels>::kTile;
  }
};

template <class Reader>
TileFn pick_tile(int rows, int panels) {
  return TilePicker<Reader, kMaxTileRows, panels_for<Reader>(kMaxTileRows)>::pick(rows, panels);
}

// Cuts rows into tiles of nearly equal height: 14 rows become 7 + 7 rather than 12 + 2, because a tile of 2 rows has
// few independent chains.
struct RowTiles {
  int64_t count, height, taller;  // the first `taller` tiles have `height` rows, the others one less
  explicit RowTiles(int64_t rows) {
    count = ceil_div(rows, kMaxTileRows);
    height = count ? ceil_div(rows, count) : 0;
    taller = count ? rows - (height - 1) * count : 0;
  }
  int64_t rows(int64_t i) const { return i < taller ? height : height - 1; }
};

}  // namespace neap::NEAP_ISA
