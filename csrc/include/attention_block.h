// One tile of queries against one block of keys: scores, softmax and weighted values. attention.h explains the blocks.
#pragma once
#include "tile.h"

namespace neap::NEAP_ISA {

constexpr float kMinusInfinity = -__builtin_inff();
constexpr int64_t kRowBytes = kPanel * 4;  // of a row of 16 numbers

inline const uint8_t* bytes_of(const void* p) { return static_cast<const uint8_t*>(p); }

struct QueryTile {
  int64_t batch, kv_head, query, queries;  // queries [query, query + queries)
  int64_t group, rows, last_key;           // rows = queries * group; keys [0, last_key) are visible to some row
};

struct Scratch { float *q, *keys, *scores, *tail, *block, *block_max, *block_sum, *total, *total_max, *total_sum; };

inline int64_t tile_queries(const AttentionArgs& a) { return max64(1, kQueryRows / (a.heads / a.kv_heads)); }
inline int64_t query_tiles(const AttentionArgs& a) { return ceil_div(a.queries, tile_queries(a)); }
inline int64_t padded_width(const AttentionArgs& a) { return ceil_div(a.value_width, kPanel) * kPanel; }

// Points `s` at pieces of the memory at `base` and returns their total size in floats. A null `base` only gives it.
inline int64_t lay_out(const AttentionArgs& a, float* base, Scratch* s) {
  const int64_t rows = tile_queries(a) * (a.heads / a.kv_heads), padded_rows = ceil_div(rows, kPanel) * kPanel;
  float* p = base;
  const auto take = [&p](int64_t n) {
    float* taken = p;
    p += n;
    return taken;
  };
  s->q = take(ceil_div(rows * a.width, kPanel) * kPanel);
  s->keys = take(kKeyBlock * a.width);
  s->scores = take(rows * kKeyBlock);
  s->tail = take(kKeyBlock * kPanel);
  s->block = take(rows * padded_width(a));
  s->total = take(rows * padded_width(a));
  s->block_max = take(padded_rows);
  s->block_sum = take(padded_rows);
  s->total_max = take(padded_rows);
  s->total_sum = take(padded_rows);
  return p - base;
}

inline int64_t attention_scratch(const AttentionArgs& args) {
  Scratch s;
  return lay_out(args, nullptr, &s);
}

// How many keys a query sees causally.
inline int64_t end_of_keys(const AttentionArgs& a, int64_t query) { return a.keys - a.queries + query + 1; }

inline QueryTile query_tile(const AttentionArgs& a, int64_t item) {
  const int64_t tiles = query_tiles(a), head = item / tiles, place = item % tiles;
  // Later causal tiles see more keys. Items take tiles alternately from both ends, so that consecutive ranges have
  // about equal work.
  const int64_t index = place % 2 ? tiles - 1 - place / 2 : place / 2;
  QueryTile t;
  t.batch = head / a.kv_heads;
  t.kv_head = head % a.kv_heads;
  t.query = index * tile_queries(a);
  t.queries = min64(tile_queries(a), a.queries - t.query);
  t.group = a.heads / a.kv_heads;
  t.rows = t.queries * t.group;
  t.last_key = a.causal ? max64(0, end_of_keys(a, t.query + t.queries - 1)) : a.keys;
  return t;
}

// Copies the tile's queries to contiguous rows, in the order (query, head of the group).
inline void gather_queries(const AttentionArgs& a, const QueryTile& t, float* out) {
  for (int64_t j = 0; j < t.queries; ++j)
    for (int64_t g = 0; g < t.group; ++g) {
      const float* q = a.q + t.batch * a.q_batch + (t.kv_head * t.group + g) * a.q_head + (t.query + j) * a.q_row;
      for (int64_t d = 0; d < a.width; ++d) *out++ = q[d * a.q_column];
    }
}

// Keys that are fetched to the L1 cache before they are read.
constexpr int64_t kKeysAhead = 16;

// Fetches a row to the L1 cache, or to the L2 cache only.
template <bool kNear, class E>
NEAP_INLINE void prefetch_row(const E* row, int64_t width) {
  for (int64_t i = 0; i < width; i += 64 / (int64_t)sizeof(E)) __builtin_prefetch(row + i, 0, kNear ? 3 : 2);
}

// Turns keys [key, key + kLanes) of `count`: calls f(d, column) for each of their `width` numbers, number d of every
// key, in order. Places beyond the last key repeat it: their scores are never looked at. `row_of(i)`: key i. Calls
// `prefetch(i)` for each key before it reads it.
template <class RowOf, class Prefetch, class F>
NEAP_INLINE void turn_keys(const RowOf& row_of, const Prefetch& prefetch, int64_t key, int64_t count, int64_t width,
                           const F& f) {
  decltype(row_of(key)) rows[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    const int64_t place = min64(key + i, count - 1);
    rows[i] = row_of(place);
    prefetch(place);
  }
  int64_t d = 0;
  for (; d + 4 <= width; d += 4) {
    Vec columns[4];
    load_columns(rows, d, columns);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) f(d + i, columns[i]);
  }
  for (; d < width; ++d) {
    Vec column;
    for (int i = 0; i < kLanes; ++i) column[i] = to_float(rows[i][d]);
    f(d, column);
  }
}

// Packs keys [count, width] into panels [ceil(count / 16)][width][16] of float32. See `turn_keys`.
template <class RowOf, class Prefetch>
void pack_keys(const RowOf& row_of, const Prefetch& prefetch, int64_t count, int64_t width, float* out) {
  for (int64_t key = 0; key < ceil_div(count, kPanel) * kPanel; key += kLanes) {
    float* panel = out + key / kPanel * kPanel * width + key % kPanel;
    turn_keys(row_of, prefetch, key, count, width,
              [&](int64_t d, Vec column) __attribute__((always_inline)) { store(panel + d * kPanel, column); });
  }
}

// Scores [kRows, count] of queries [kRows, width] and keys: the bits of products with packed keys, which are packed for
// more queries only. See `turn_keys`.
template <int kRows, class RowOf, class Prefetch>
void score_keys(const float* q, const RowOf& row_of, const Prefetch& prefetch, int64_t count, int64_t width,
                float* scores) {
  for (int64_t key = 0; key < ceil_div(count, kPanel) * kPanel; key += kLanes) {
    Vec sum[kRows] = {};
    turn_keys(row_of, prefetch, key, count, width, [&](int64_t d, Vec column) __attribute__((always_inline)) {
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) sum[r] = fma(splat(q[r * width + d]), column, sum[r]);
    });
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) store(scores + r * kKeyBlock + key, sum[r]);
  }
}

// The same for `rows` <= kMost queries.
template <int kMost, class RowOf, class Prefetch>
void score_few(int64_t rows, const float* q, const RowOf& row_of, const Prefetch& prefetch, int64_t count,
               int64_t width, float* scores) {
  if constexpr (kMost > 1)
    if (rows < kMost) return score_few<kMost - 1>(rows, q, row_of, prefetch, count, width, scores);
  score_keys<kMost>(q, row_of, prefetch, count, width, scores);
}

// c [rows, panels * 16] = a [rows, depth] @ b. `t.ahead`: of the first panel, for the whole depth.
template <class Reader>
void multiply(TileArgs t, int64_t rows, int64_t panels, int64_t depth) {
  const RowTiles tiles(rows);
  const int64_t group = panels_for<Reader>((int)tiles.height);
  const TileArgs base = t;
  for (int64_t p = 0; p < panels; p += group)
    for (int64_t k = 0; k < depth; k += kDepthBlock)
      for (int64_t i = 0, r = 0; i < tiles.count; r += tiles.rows(i++)) {
        t.a = base.a + r * base.a_stride + k;
        t.b = base.b + p * base.panel_stride + k * base.row_bytes;
        t.c = base.c + r * base.c_stride + p * kPanel;
        t.depth = min64(kDepthBlock, depth - k);
        t.accumulate = k > 0;
        t.ahead.next = base.ahead.next + p * base.ahead.panel_stride + k * base.ahead.step;
        t.ahead.turn = base.ahead.turn - k;
        pick_tile<Reader>((int)tiles.rows(i), (int)min64(group, panels - p))(t);
      }
}

// Turns the scores of one row into softmax weights, in place. Keys from `visible` on get weight 0. `mask`: the mask's
// part for this row and block, or null.
inline void softmax_row(const AttentionArgs& a, float* s, int64_t count, int64_t visible, const uint8_t* mask,
                        float* max_out, float* sum_out) {
  const int64_t padded = ceil_div(count, kPanel) * kPanel;
  const Vec scale = splat(a.scaling), cap = splat(a.softcap),
            inverse_cap = splat(a.softcap > 0.f ? 1.f / a.softcap : 0.f);
  for (int64_t i = 0; i < padded; i += kLanes) {
    Vec x = load(s + i) * scale;
    if (a.softcap > 0.f) x = cap * tanh(x * inverse_cap);
    store(s + i, x);
  }
  for (int64_t i = max64(0, visible); i < padded; ++i) s[i] = kMinusInfinity;
  if (mask)
    for (int64_t i = 0; i < visible; ++i)
      if (!mask[i * a.mask_column]) s[i] = kMinusInfinity;
  Vec largest = splat(kMinusInfinity);
  for (int64_t i = 0; i < padded; i += kLanes) largest = max(load(s + i), largest);
  *max_out = max_lanes(largest);
  const Vec shift = splat(*max_out == kMinusInfinity ? 0.f : *max_out);
  Vec sums = {};
  for (int64_t i = 0; i < padded; i += kLanes) {
    const Vec weight = exp(load(s + i) - shift);
    store(s + i, weight);
    sums += weight;
  }
  *sum_out = sum_lanes(sums);
}

inline const uint8_t* mask_row(const AttentionArgs& a, const QueryTile& t, int64_t row, int64_t first) {
  return a.mask ? a.mask + t.batch * a.mask_batch + (t.query + row / t.group) * a.mask_row + first * a.mask_column
                : nullptr;
}

inline bool all_masked(const AttentionArgs& a, const QueryTile& t, int64_t first, int64_t count) {
  if (!a.mask) return false;
  for (int64_t row = 0; row < t.rows; row += t.group) {
    const uint8_t* mask = mask_row(a, t, row, first);
    for (int64_t i = 0; i < count; ++i)
      if (mask[i * a.mask_column]) return false;
  }
  return true;
}

// Fills s.block, s.block_max and s.block_sum for keys [first, first + count), numbers of type E.
template <class E>
void attend_keys(const AttentionArgs& a, const QueryTile& t, const Scratch& s, int64_t first, int64_t count) {
  const E* k = static_cast<const E*>(a.k) + t.batch * a.k_batch + t.kv_head * a.k_head + first * a.k_row;
  const E* v = static_cast<const E*>(a.v) + t.batch * a.v_batch + t.kv_head * a.v_head + first * a.v_row;
  const int64_t width = a.value_width, panels = width / kPanel, c_stride = padded_width(a), bytes = sizeof(E);
  // The keys that are read next, of this head or of the next one, are fetched while values are summed: few queries wait
  // for memory. Many wait for arithmetic.
  const bool is_last = first + count >= t.last_key, is_few = t.rows <= kMaxTileRows;
  const E* next = is_last ? k + a.k_head - first * a.k_row : k + count * a.k_row;
  const int64_t num_next = !is_few || (is_last && t.kv_head + 1 == a.kv_heads) ? 0
                           : is_last ? min64(kKeyBlock, t.last_key)
                                     : min64(kKeyBlock, t.last_key - first - count);
  const auto prefetch = [&](int64_t i) {
    prefetch_row<true>(k + min64(i + kKeysAhead, count - 1) * a.k_row, a.width);
    prefetch_row<false>(v + i * a.v_row, width);
  };
  const auto key_of = [&](int64_t i) { return k + i * a.k_row; };
  if (t.rows <= kMaxTileRows && a.width <= kDepthBlock) {
    score_few<kMaxTileRows>(t.rows, s.q, key_of, prefetch, count, a.width, s.scores);
  } else {
    pack_keys(key_of, prefetch, count, a.width, s.keys);
    const TileArgs dots{
        .a = s.q,
        .a_stride = a.width,
        .b = bytes_of(s.keys),
        .panel_stride = a.width * kRowBytes,
        .row_bytes = kRowBytes,
        .c = s.scores,
        .c_stride = kKeyBlock,
        .ahead = {bytes_of(s.keys) + kKeysAhead * kRowBytes, kRowBytes, a.width * kRowBytes},
    };
    multiply<Rows<float>>(dots, t.rows, ceil_div(count, kPanel), a.width);
  }
  for (int64_t r = 0; r < t.rows; ++r) {
    const int64_t visible = a.causal ? end_of_keys(a, t.query + r / t.group) - first : count;
    softmax_row(a, s.scores + r * kKeyBlock, count, min64(count, visible), mask_row(a, t, r, first), s.block_max + r,
                s.block_sum + r);
  }
  TileArgs sums{
      .a = s.scores,
      .a_stride = kKeyBlock,
      .b = bytes_of(v),
      .panel_stride = kPanel * bytes,
      .row_bytes = a.v_row * bytes,
      .c = s.block,
      .c_stride = c_stride,
      .ahead = num_next ? Ahead{bytes_of(next), a.k_row * bytes, kPanel * bytes, num_next, -num_next * a.k_row * bytes}
                        : Ahead{bytes_of(v) + kKeysAhead * a.v_row * bytes, a.v_row * bytes, kPanel * bytes},
  };
  multiply<Rows<E, 0>>(sums, t.rows, panels, count);
  if (width % kPanel) {  // the last columns are copied and padded first, so that no load reads past a row
    for (int64_t i = 0; i < count; ++i)
      for (int64_t c = 0; c < kPanel; ++c)
        s.tail[i * kPanel + c] = panels * kPanel + c < width ? to_float(v[i * a.v_row + panels * kPanel + c]) : 0.f;
    sums.b = bytes_of(s.tail);
    sums.row_bytes = kRowBytes;
    sums.c = s.block + panels * kPanel;
    multiply<Rows<float>>(sums, t.rows, 1, count);
  }
}

// The same for keys [first, first + 256) of any type. Returns false if no row sees any of them.
inline bool attend_block(const AttentionArgs& a, const QueryTile& t, const Scratch& s, int64_t first) {
  const int64_t count = min64(kKeyBlock, t.last_key - first);
  if (count <= 0 || all_masked(a, t, first, count)) return false;
  with_type(a.kv_dtype, [&](auto* type) { attend_keys<__typeof__(*type)>(a, t, s, first, count); });
  return true;
}

}  // namespace neap::NEAP_ISA
