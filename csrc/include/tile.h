// The microkernel of packed products and attention: a few rows times a few 16-wide panels, summed over depth in order.
//
// Every output element is the same chain of fused multiply-adds in every tile shape, so its bits do not depend on the number of rows,
// the number of threads or its position.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace neap::NEAP_ISA {

constexpr int kPanelVecs = kPanel / kLanes;

// The number of panels per tile of `rows` rows: as many as their accumulators fit in registers, so that enough chains of multiply-adds
// are independent to hide the latency.
constexpr int panels_for(int rows) {
  const int panels = kAccumulators / (rows * kPanelVecs);
  return panels < 1 ? 1 : panels;
}

// The largest number of rows whose tiles span at least kFollowedPanels panels, so that the hardware prefetcher follows; 0: none do.
constexpr int low_tile_rows() {
  int rows = kMaxTileRows;
  while (rows > 0 && panels_for(rows) < kFollowedPanels) --rows;
  return rows;
}
constexpr int kLowTileRows = low_tile_rows();

struct TileArgs {
  const float* a;        // [rows, depth], rows `a_stride` apart
  int64_t a_stride;
  const float* b;        // panels, `panel_stride` apart; each [depth, 16] with rows `b_stride` apart
  int64_t panel_stride, b_stride;
  int64_t depth;
  float* c;              // [rows, panels * 16], rows `c_stride` apart
  int64_t c_stride;
  bool accumulate;       // add to c instead of overwriting it
  // What this call prefetches for later ones: in each panel, `prefetch_step` floats per depth, beginning `prefetch` floats ahead of b.
  int64_t prefetch, prefetch_step;
};

// kStride: b_stride if known at compile time (16 for packed weights), else 0.
template <int kRows, int kPanels, int kStride>
__attribute__((noinline)) void tile(const TileArgs& t) {
  constexpr int kColumns = kPanels * kPanelVecs;
  const int64_t stride = kStride ? kStride : t.b_stride;
  const int64_t a_stride = t.a_stride, panel_stride = t.panel_stride;
  const float* a = t.a;
  const float* b = t.b;
  const float* ahead = t.b + t.prefetch;
  Vec sum[kRows][kColumns] = {};
  for (int64_t k = 0; k < t.depth; ++k, ++a, b += stride, ahead += t.prefetch_step) {
    Vec column[kColumns];
#pragma GCC unroll 24
    for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVecs; ++v)
        column[p * kPanelVecs + v] = load(b + p * panel_stride + v * kLanes);
      if (kStride && kRows > kLowTileRows) __builtin_prefetch(ahead + p * panel_stride);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec value = splat(a[r * a_stride]);
#pragma GCC unroll 24
      for (int c = 0; c < kColumns; ++c) sum[r][c] = fma(value, column[c], sum[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 24
    for (int c = 0; c < kColumns; ++c) {
      float* out = t.c + r * t.c_stride + c * kLanes;
      store(out, t.accumulate ? load(out) + sum[r][c] : sum[r][c]);
    }
}

using TileFn = void (*)(const TileArgs&);

template <int kStride, int kRows, int kPanels>
struct TilePicker {
  static TileFn pick(int rows, int panels) {
    if (rows != kRows) {
      if constexpr (kRows > 1) return TilePicker<kStride, kRows - 1, panels_for(kRows - 1)>::pick(rows, panels);
    } else if (panels != kPanels) {
      if constexpr (kPanels > 1) return TilePicker<kStride, kRows, kPanels - 1>::pick(rows, panels);
    }
    return tile<kRows, kPanels, kStride>;
  }
};

template <int kStride>
TileFn pick_tile(int rows, int panels) {
  return TilePicker<kStride, kMaxTileRows, panels_for(kMaxTileRows)>::pick(rows, panels);
}

// Cuts rows into tiles of nearly equal height: 8 rows become 4 + 4 rather than 6 + 2, because a tile of 2 rows has few independent
// chains. Rows that fit in two tiles of kLowTileRows are cut into these: the first tile reads more panels at once from memory, and the
// second finds them in the cache.
struct RowTiles {
  int64_t count, height, taller;  // the first `taller` tiles have `height` rows, the others one less
  explicit RowTiles(int64_t rows) {
    count = ceil_div(rows, rows <= 2 * kLowTileRows ? kLowTileRows : kMaxTileRows);
    height = count ? ceil_div(rows, count) : 0;
    taller = count ? rows - (height - 1) * count : 0;
  }
  int64_t rows(int64_t i) const { return i < taller ? height : height - 1; }
};

}  // namespace neap::NEAP_ISA
