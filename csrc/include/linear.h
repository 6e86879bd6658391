// x @ weight.T over packed weights of any format.
#pragma once
#include <cstdlib>

#include "bfloat_tile.h"
#include "rounded.h"
#if defined(NEAP_AVX512VNNI)
#include "amx.h"
#elif defined(NEAP_AVX512) || defined(NEAP_AVX2)
#include "byte_block.h"
#endif

namespace neap::NEAP_ISA {

constexpr int64_t kRowChunk = 96;  // rows per chunk: their inputs stay in L2 while a thread processes its panels

// Size of the buffer of partial sums of one matrix: a chunk of rows times the panels of the tallest tile.
constexpr int64_t kChunkFloats = kRowChunk * kPanel * panels_for<Rows<float>>(kMaxTileRows);

// So many tiles of one row's gate are multiplied before those of `up`: each switch ends a stream of reading.
constexpr int64_t kTilesInTurn = 8;

constexpr int64_t kDequantisedPanels = 2;  // panels whose dequantised depth blocks lie in the L1 cache together

// The kernels of one format.
struct Matmul {
  int (*panels)(int rows);
  TileFn (*tile)(int rows, int panels);
  void (*dequantise)(const uint8_t* block, int64_t depth, float* out);
  bool shared;  // see dequantise.h
};

template <Format kFormat>
constexpr Matmul matmul_of() {
  using Reader = typename ReaderOf<kFormat>::Type;
  return {panels_for<Reader>, pick_tile<Reader>, dequantise_block<Reader>, Reader::kShared};
}

constexpr Matmul kMatmuls[kFormats] = {
    matmul_of<kPlain32>(), matmul_of<kPlain16>(), matmul_of<kPlainBf16>(), matmul_of<kQ4_0>(),
    matmul_of<kQ4_1>(),    matmul_of<kQ5_0>(),    matmul_of<kQ5_1>(),      matmul_of<kQ8_0>(),
    matmul_of<kQ4_K>(),    matmul_of<kQ5_K>(),    matmul_of<kQ6_K>(),      matmul_of<kMxfp4>(),
};

constexpr Matmul kDots = {panels_for<BfloatDots>, pick_tile<BfloatDots>, dequantise_block<BfloatPairs>, false};

template <Format kFormat>
constexpr Matmul rounded_matmul_of() {
  using Reader = RoundedQuants<kFormat>;
  return {panels_for<Reader>, pick_tile<Reader>, dequantise_block<Quants<kFormat>>, false};
}

// From kQ4_0 on.
constexpr Matmul kRoundedMatmuls[kFormats - kQ4_0] = {
    rounded_matmul_of<kQ4_0>(), rounded_matmul_of<kQ4_1>(), rounded_matmul_of<kQ5_0>(),
    rounded_matmul_of<kQ5_1>(), rounded_matmul_of<kQ8_0>(), rounded_matmul_of<kQ4_K>(),
    rounded_matmul_of<kQ5_K>(), rounded_matmul_of<kQ6_K>(), rounded_matmul_of<kMxfp4>(),
};

// What tiles read of an input row: floats, pairs of bfloat16 in floats' places, or InputGroups.
enum InputKind { kFloats, kPairs, kGroups };

inline InputKind input_kind(const Matrix& matrix) {
  return !matrix.rounds_inputs ? kFloats : is_quantised(matrix.format) ? kGroups : kPairs;
}

// A gate and `up` share their inputs, so these are rounded only if both want the same.
inline InputKind input_kind(const LinearArgs& args) {
  const InputKind kind = input_kind(args.weight);
  return args.gated && kind != input_kind(args.up) ? kFloats : kind;
}

// The kernels that multiply a matrix by inputs of a kind.
inline const Matmul& matmul_for(const Matrix& matrix, InputKind kind) {
  return kind == kGroups ? kRoundedMatmuls[matrix.format - kQ4_0] : kind == kPairs ? kDots : kMatmuls[matrix.format];
}

// Rows of x as tiles read them, `stride` floats apart.
struct Inputs {
  const float* rows;
  int64_t stride;
  InputKind kind;
  // Where input k, the first of a depth block, stands in a row.
  int64_t place(int64_t k) const {
    return kind == kGroups ? k / kRoundedInputs * kGroupFloats : kind == kPairs ? k / 2 : k;
  }
};

// A thread's memory for rounded inputs. It grows, and lasts as long as the thread.
struct RoundedBuffer {
  float* floats = nullptr;
  int64_t size = 0;
  ~RoundedBuffer() { free(floats); }
  float* take(int64_t wanted) {
    if (wanted > size) {
      free(floats);
      floats = static_cast<float*>(malloc((size_t)(size = wanted) * sizeof(float)));
      if (!floats) abort();
    }
    return floats;
  }
};

// Rows [row, row + rows) of x. Rounded ones are valid until this thread's next call.
inline Inputs inputs_of(const LinearArgs& args, int64_t row, int64_t rows) {
  const float* x = args.x + row * args.x_stride;
  const InputKind kind = input_kind(args);
  if (kind == kFloats) return {x, args.x_stride, kind};
  static thread_local RoundedBuffer buffer;
  const int64_t stride =
      kind == kGroups ? args.in_features / kRoundedInputs * kGroupFloats : ceil_div(args.in_features, 2);
  float* rounded = buffer.take(rows * stride);
  for (int64_t r = 0; r < rows; ++r, x += args.x_stride)
    if (kind == kGroups) round_groups(x, args.in_features, reinterpret_cast<InputGroup*>(rounded + r * stride));
    else round_pairs(x, args.in_features, rounded + r * stride);
  return {rounded, stride, kind};
}

inline void dequantise(Format format, const uint8_t* block, int64_t depth, float* out) {
  kMatmuls[format].dequantise(block, depth, out);
}

// An item is one output panel (gated: a pair of panels) of one range of rows. Rows are split only if the panels alone
// are too few to keep the threads busy.
inline int64_t linear_items(const LinearArgs& args, int64_t threads) {
  const int64_t units = ceil_div(args.out_features, kPanel);
  if (units == 0 || args.rows == 0) return 0;
  const int64_t wanted = ceil_div(4 * threads, units);
  return units * max64(1, min64(wanted, ceil_div(args.rows, kRowChunk)));
}

constexpr float kClamp = 7.f;

NEAP_INLINE Vec activate(Activation activation, Vec x) {
  if (activation == kSilu) return x * sigmoid(x);
  if (activation == kClampedSwish) {
    x = x > splat(kClamp) ? splat(kClamp) : x;
    return x * sigmoid(splat(1.702f) * x);
  }
  if (activation == kRelu) return max(splat(0.f), x);
  if (activation == kGelu) return splat(0.5f) * x * (splat(1.f) + erf(splat(0.70710678118654752f) * x));
  const Vec inner = splat(0.7978845608028654f) * fma(splat(0.044715f) * x * x, x, x);
  return splat(0.5f) * x * (splat(1.f) + tanh(inner));
}

inline void activate_numbers(Activation activation, const float* x, float* out, int64_t begin, int64_t end) {
  for_lanes(end - begin,
            [&](int64_t i, auto get, auto put) { put(out + begin + i, activate(activation, get(x + begin + i))); });
}

// For activations that are few: inlined, their constants would take the time of each panel of all others.
__attribute__((noinline)) inline Vec activate_apart(Activation activation, Vec x) { return activate(activation, x); }

// What activated gates are multiplied by, of the sums of `up`.
NEAP_INLINE Vec gated(Activation activation, Vec up) {
  if (activation != kClampedSwish) return up;
  return max(splat(-kClamp), up > splat(kClamp) ? splat(kClamp) : up) + splat(1.f);
}

// Applies bias, activation and residuals to the sums c [rows, 16] (and those of `up`, if gated) of output panel `unit`,
// and writes them to out.
inline void finish_panel(const LinearArgs& args, const float* c, const float* up, int64_t c_stride, int64_t unit,
                         int64_t row, int64_t rows) {
  const int64_t first = unit * kPanel, width = min64(kPanel, args.out_features - first);
  alignas(64) float bias[2 * kPanel] = {};
  if (args.bias)
    for (int64_t i = 0; i < width; ++i) {
      bias[i] = args.bias[first + i];
      if (args.gated) bias[kPanel + i] = args.bias[args.out_features + first + i];
    }
  const float *added = args.residuals[0], *added_last = args.residuals[1];
  for (int64_t r = 0; r < rows; ++r, c += c_stride, up += c_stride) {
    const int64_t at = (row + r) * args.out_features + first;
    float* out = args.out + at;
    alignas(64) float line[kPanel];
    for (int v = 0; v < kPanelVecs; ++v) {
      Vec value = load(c + v * kLanes) + load(bias + v * kLanes);
      if (args.activation == kSilu) value = value * sigmoid(value);
      else if (args.activation != kIdentity) value = activate_apart(args.activation, value);
      if (args.gated) value = value * gated(args.activation, load(up + v * kLanes) + load(bias + kPanel + v * kLanes));
      if (added && width == kPanel) value = load(added + at + v * kLanes) + value;
      if (added_last && width == kPanel) value = load(added_last + at + v * kLanes) + value;
      store((width == kPanel ? out : line) + v * kLanes, value);
    }
    if (width < kPanel)
      for (int64_t i = 0; i < width; ++i) {
        if (added) line[i] = added[at + i] + line[i];
        out[i] = added_last ? added_last[at + i] + line[i] : line[i];
      }
  }
}

// Keeps the first of the largest of the sums c [rows, panels * 16] of output panels from `unit` on.
inline void keep_best(const LinearArgs& args, const float* c, int64_t panels, int64_t unit, int64_t row, int64_t rows) {
  const int64_t first = unit * kPanel, width = min64(panels * kPanel, args.out_features - first);
  for (int64_t r = 0; r < rows; ++r, c += panels * kPanel) {
    Best& best = args.best[row + r];
    IntVec above = {};  // or a NaN
    for (int64_t i = 0; i < panels * kPanel; i += kLanes) above |= ~(load(c + i) <= splat(best.value));
    int32_t any = 0;
    for (int i = 0; i < kLanes; ++i) any |= above[i];
    if (!any) continue;
    for (int64_t i = 0; i < width; ++i)
      if (!(c[i] <= best.value)) best = {c[i] == c[i] ? c[i] : __builtin_inff(), first + i};
  }
}

// What tile number `tile` of `tiles` prefetches while it reads `depth` inputs of depth block `block` of `panels` panels
// from `panel` on. `next`: the panel that is read after `panel`. Reading and multiplying overlap if there is always
// something on its way.
inline Ahead prefetched(const Matrix& matrix, const uint8_t* panel, int64_t panels, const uint8_t* next, int64_t block,
                        int64_t depth, int64_t step, int64_t tile, int64_t tiles) {
  const int64_t begin = block_begin(matrix.format, block), end = begin + depth * step,
                distance = kPrefetchBytes / panels;
  Ahead ahead{panel + begin + distance, step, matrix.panel_bytes};
  if (tiles == 1) {
    ahead.turn = (matrix.panel_bytes - begin - distance) / step;
    ahead.jump = next - panel - matrix.panel_bytes;
  } else {  // the first tile reads the block, and all of them prefetch a part of the next one
    ahead.step = step / tiles;
    ahead.next = (end < matrix.panel_bytes ? panel + end : next) + tile * depth * ahead.step;
  }
  return ahead;
}

// c [rows, panels * 16] = `rows` rows of x times `panels` panels of `matrix` from number `first` on. `next`: the panel
// that is multiplied after them.
inline void multiply_panels(const LinearArgs& args, const Matrix& matrix, const Inputs& x, int64_t rows, int64_t first,
                            int64_t panels, const uint8_t* next, float* c) {
  const Matmul& matmul = matmul_for(matrix, x.kind);
  const int64_t pair = x.kind == kPairs ? 2 : 1;
  const RowTiles tiles(rows);
  const bool dequantises = matmul.shared && tiles.count > kOwnTiles;
  const Matmul& tile_matmul = dequantises ? kMatmuls[kPlain32] : matmul;
  const int64_t c_stride = panels * kPanel;
  const int64_t max_panels = min64(tile_matmul.panels((int)tiles.height), dequantises ? kDequantisedPanels : panels);
  alignas(64) float dequantised[kDepthBlock * kPanel * kDequantisedPanels];
  TileArgs t{.a_stride = x.stride, .panel_stride = matrix.panel_bytes, .c_stride = c_stride};
  if (args.in_features == 0)
    for (int64_t i = 0; i < rows * c_stride; ++i) c[i] = 0.f;
  for (int64_t p = 0; p < panels; p += max_panels) {
    const int width = (int)min64(max_panels, panels - p);
    const TileFn tall = tile_matmul.tile((int)tiles.height, width);
    const TileFn low = tiles.height > 1 ? tile_matmul.tile((int)tiles.height - 1, width) : tall;
    const uint8_t* panel = matrix.panels + (first + p) * matrix.panel_bytes;
    const uint8_t* following = p + width < panels ? panel + width * matrix.panel_bytes : next;
    for (int64_t k = 0; k < args.in_features; k += kDepthBlock) {
      const int64_t depth = min64(kDepthBlock, args.in_features - k), block = k / kDepthBlock;
      t.depth = ceil_div(depth, pair);
      t.accumulate = k > 0;
      const int64_t step = block_bytes(matrix.format, depth) / t.depth;
      t.b = panel + block_begin(matrix.format, block);
      if (dequantises) {
        for (int64_t i = 0; i < width; ++i)
          matmul.dequantise(t.b + i * matrix.panel_bytes, depth, dequantised + i * kDepthBlock * kPanel);
        t.b = reinterpret_cast<const uint8_t*>(dequantised);
        t.panel_stride = kDepthBlock * kPanel * 4;
      }
      for (int64_t i = 0, r = 0; i < tiles.count; r += tiles.rows(i++)) {
        t.ahead = prefetched(matrix, panel, width, following, block, t.depth, step, i, tiles.count);
        t.a = x.rows + r * x.stride + x.place(k);
        t.c = c + r * c_stride + p * kPanel;
        (i < tiles.taller ? tall : low)(t);
      }
    }
  }
}

// Products that take a matrix's depth blocks apart, from kQ4_0 on, and the rows from which they serve. `kByBlocks`:
// whether they serve at all.
#if defined(NEAP_AVX512VNNI)
constexpr bool kByBlocks = false;  // amx_table's do
constexpr auto& kBlockProducts = kUnitProducts;
constexpr int64_t kLeastBlockRows = kLeastUnitRows, kBlockPanels = kUnitPanels;
#elif defined(NEAP_AVX512) || defined(NEAP_AVX2)
constexpr bool kByBlocks = true;
constexpr auto& kBlockProducts = kByteProducts;
constexpr int64_t kLeastBlockRows = kLeastByteRows, kBlockPanels = 1;
#else
constexpr bool kByBlocks = false;
constexpr int64_t kLeastBlockRows = kNever, kBlockPanels = 1;
#endif

// As multiply_panels.
#if defined(NEAP_AVX512) || defined(NEAP_AVX2)
inline void multiply_blocks(const LinearArgs& args, const Matrix& matrix, const Inputs& x, int64_t rows, int64_t first,
                            int64_t panels, const uint8_t* next, float* c) {
  kBlockProducts[matrix.format - kQ4_0](matrix, args.in_features, x.rows, x.stride, rows, first, panels, next, c);
}
#else
constexpr auto& multiply_blocks = multiply_panels;
#endif

// Rows [row, row + rows), at most kRowChunk of them, times output panels [begin, end).
template <bool kBlocks>
inline void linear_chunk(const LinearArgs& args, int64_t row, int64_t rows, int64_t begin, int64_t end) {
  const Inputs x = inputs_of(args, row, rows);
  const Matmul& matmul = matmul_for(args.weight, x.kind);
  alignas(64) float c[kChunkFloats], up[kChunkFloats];
  const bool by_blocks = kBlocks && x.kind == kGroups && rows >= kLeastBlockRows && args.in_features > 0;
  const auto multiply = by_blocks ? multiply_blocks : multiply_panels;
  // As many panels as tiles take, and as the buffers hold.
  const int64_t tiles = rows == 1 || args.best ? kTilesInTurn : 1;
  const int64_t wanted = by_blocks ? kBlockPanels : tiles * matmul.panels((int)RowTiles(rows).height);
  const int64_t group = max64(1, min64(wanted, kChunkFloats / (rows * kPanel)));
  for (int64_t unit = begin; unit < end; unit += group) {
    const int64_t panels = min64(group, end - unit);
    const uint8_t* following = args.weight.panels + (unit + panels) * args.weight.panel_bytes;
    if (args.gated) {
      multiply(args, args.weight, x, rows, unit, panels, args.up.panels + unit * args.up.panel_bytes, c);
      multiply(args, args.up, x, rows, unit, panels, following, up);
    } else {
      multiply(args, args.weight, x, rows, unit, panels, following, c);
    }
    if (args.best) keep_best(args, c, panels, unit, row, rows);
    else
      for (int64_t p = 0; p < panels; ++p)
        finish_panel(args, c + p * kPanel, up + p * kPanel, panels * kPanel, unit + p, row, rows);
  }
}

template <bool kBlocks>
inline void linear(const LinearArgs& args, int64_t items, int64_t begin, int64_t end) {
  const int64_t units = ceil_div(args.out_features, kPanel), splits = items / units;
  const int64_t split_rows = ceil_div(args.rows, splits);
  for (int64_t item = begin; item < end;) {
    const int64_t split = item / units, first = item % units, last = min64(units, first + end - item);
    const int64_t stop = min64(args.rows, (split + 1) * split_rows);
    for (int64_t row = split * split_rows; row < stop; row += kRowChunk)
      linear_chunk<kBlocks>(args, row, min64(kRowChunk, stop - row), first, last);
    item += last - first;
  }
}

}  // namespace neap::NEAP_ISA
