// Weight packing, and x @ weight.T over packed weights.
#pragma once
#include "tile.h"

namespace neap::NEAP_ISA {

inline void pack(const PackArgs& args, int64_t begin, int64_t end) {
  for (int64_t panel = begin; panel < end; ++panel) {
    float* out = args.packed + panel * args.in_features * kPanel;
    for (int64_t k = 0; k < args.in_features; ++k)
      for (int64_t c = 0; c < kPanel; ++c) {
        const int64_t row = panel * kPanel + c;
        *out++ = row < args.out_features ? args.weight[row * args.row_stride + k * args.column_stride] : 0.f;
      }
  }
}

constexpr int64_t kRowChunk = 96;  // rows per chunk: their inputs stay in L2 while a thread processes its panels

// Size of the buffer of partial sums: a chunk of rows times the panels of a tile, or of a gated pair.
constexpr int64_t kChunkFloats = kRowChunk * kPanel * (panels_for(kMaxTileRows) > 2 ? panels_for(kMaxTileRows) : 2);

// An item is one output panel (gated: a pair of panels) of one range of rows. Rows are split only if the panels alone are too few to keep
// the threads busy.
inline int64_t linear_items(const LinearArgs& args, int64_t threads) {
  const int64_t units = ceil_div(args.out_features, kPanel);
  if (units == 0 || args.rows == 0) return 0;
  const int64_t wanted = ceil_div(4 * threads, units);
  return units * max64(1, min64(wanted, ceil_div(args.rows, kRowChunk)));
}

NEAP_INLINE Vec activate(Activation activation, Vec x) {
  if (activation == kSilu) return x * sigmoid(x);
  const Vec inner = splat(0.7978845608028654f) * fma(splat(0.044715f) * x * x, x, x);
  return splat(0.5f) * x * (splat(1.f) + tanh(inner));
}

// Applies bias, activation and residual to the sums c [rows, 16] (gated: [rows, 32]) of output panel `unit`, and writes them to out.
inline void finish_panel(const LinearArgs& args, const float* c, int64_t c_stride, int64_t unit, int64_t row, int64_t rows) {
  const int64_t first = unit * kPanel, width = min64(kPanel, args.out_features - first);
  alignas(64) float bias[2 * kPanel] = {};
  if (args.bias)
    for (int64_t i = 0; i < width; ++i) {
      bias[i] = args.bias[first + i];
      if (args.gated) bias[kPanel + i] = args.bias[args.out_features + first + i];
    }
  for (int64_t r = 0; r < rows; ++r, c += c_stride) {
    float* out = args.out + (row + r) * args.out_features + first;
    const float* residual = args.residual ? args.residual + (row + r) * args.out_features + first : nullptr;
    alignas(64) float line[kPanel];
    for (int v = 0; v < kPanelVecs; ++v) {
      Vec value = load(c + v * kLanes) + load(bias + v * kLanes);
      if (args.gated)
        value = activate(args.activation, value) * (load(c + kPanel + v * kLanes) + load(bias + kPanel + v * kLanes));
      if (residual && width == kPanel) value = load(residual + v * kLanes) + value;
      store((width == kPanel ? out : line) + v * kLanes, value);
    }
    if (width < kPanel)
      for (int64_t i = 0; i < width; ++i) out[i] = residual ? residual[i] + line[i] : line[i];
  }
}

// Rows [row, row + rows), at most kRowChunk of them, times output panels [begin, end).
inline void linear_chunk(const LinearArgs& args, int64_t row, int64_t rows, int64_t begin, int64_t end) {
  const int64_t per_unit = args.gated ? 2 : 1;
  const RowTiles tiles(rows);
  const int64_t max_panels = panels_for((int)tiles.height);
  const int64_t fitting = min64(max_panels, kChunkFloats / (rows * kPanel));
  const int64_t group_panels = max64(per_unit, fitting / per_unit * per_unit);
  const int64_t panel_size = args.in_features * kPanel;
  alignas(64) float c[kChunkFloats];
  for (int64_t unit = begin; unit < end;) {
    const int64_t panels = min64(group_panels, (end - unit) * per_unit), c_stride = panels * kPanel;
    TileArgs t{nullptr, args.x_stride, nullptr, panel_size, kPanel, 0, nullptr, c_stride, false, 0, 0};
    for (int64_t k = 0; k < args.in_features; k += kDepthBlock) {
      t.depth = min64(kDepthBlock, args.in_features - k);
      t.accumulate = k > 0;
      // While this depth block is used, the next one is prefetched; each row tile prefetches a part of it.
      t.prefetch_step = kPanel / tiles.count;
      // At this tile height a gated pair can need more registers than there are. Then its panels are processed one after the other.
      for (int64_t p = 0; p < panels; p += max_panels) {
        const int width = (int)min64(max_panels, panels - p);
        const TileFn tall = pick_tile<kPanel>((int)tiles.height, width);
        const TileFn low = tiles.height > 1 ? pick_tile<kPanel>((int)tiles.height - 1, width) : tall;
        t.b = args.packed + (unit * per_unit + p) * panel_size + k * kPanel;
        for (int64_t i = 0, r = 0; i < tiles.count; r += tiles.rows(i++)) {
          t.prefetch = t.depth * kPanel + i * t.depth * t.prefetch_step;
          t.a = args.x + (row + r) * args.x_stride + k;
          t.c = c + r * c_stride + p * kPanel;
          (i < tiles.taller ? tall : low)(t);
        }
      }
    }
    if (args.in_features == 0)
      for (int64_t i = 0; i < rows * c_stride; ++i) c[i] = 0.f;
    for (int64_t p = 0; p < panels; p += per_unit) finish_panel(args, c + p * kPanel, c_stride, unit++, row, rows);
  }
}

inline void linear(const LinearArgs& args, int64_t items, int64_t begin, int64_t end) {
  const int64_t units = ceil_div(args.out_features, kPanel), splits = items / units;
  const int64_t split_rows = ceil_div(args.rows, splits);
  for (int64_t item = begin; item < end;) {
    const int64_t split = item / units, first = item % units, last = min64(units, first + end - item);
    const int64_t stop = min64(args.rows, (split + 1) * split_rows);
    for (int64_t row = split * split_rows; row < stop; row += kRowChunk)
      linear_chunk(args, row, min64(kRowChunk, stop - row), first, last);
    item += last - first;
  }
}

}  // namespace neap::NEAP_ISA
