// Attention over a preallocated cache: grouped heads read in place, softmax over blocks of 256 keys.
//
// Keys and values are float32 or 16 bits wide. Products and sums are float32 in either case, so a result has the bits
// of attention over the same numbers in float32.
//
// Keys are cut into blocks, counted from key 0. A block yields, per row (a query of one head), the maximum score, the
// sum of exponentials and the weighted sum of values. Blocks are joined in order. A row's result of a block depends on
// the keys that the row sees alone: later keys get a weight of exactly 0, which changes no bit of a sum. So a row's
// result does not depend on the number of queries in the pass, the length of the cache beyond the row's keys, or the
// number of threads. Blocks may also be computed separately (attention_split) and joined later (attention_join). Online
// softmax as in FlashAttention (2205.14135), split keys as in Flash-Decoding.
#pragma once
#include "attention_block.h"

namespace neap::NEAP_ISA {

inline void begin_rows(const AttentionArgs& a, const QueryTile& t, const Scratch& s) {
  for (int64_t row = 0; row < t.rows; ++row) {
    s.total_max[row] = kMinusInfinity;
    s.total_sum[row] = 0.f;
  }
  for (int64_t i = 0; i < t.rows * padded_width(a); ++i) s.total[i] = 0.f;
}

// Adds a block's maximum, sum and values to the running ones of a row: one step of the online softmax.
inline void join_row(int64_t width, const float* block, float block_max, float block_sum, float* total,
                     float* total_max, float* total_sum) {
  if (block_max == kMinusInfinity) return;
  const float largest = block_max > *total_max ? block_max : *total_max;
  const Vec keep = exp(splat(*total_max - largest)), add = exp(splat(block_max - largest));
  for (int64_t i = 0; i < width; i += kLanes) store(total + i, fma(load(block + i), add, load(total + i) * keep));
  *total_sum = *total_sum * keep[0] + block_sum * add[0];
  *total_max = largest;
}

// What a row's sum of values is multiplied by at the end. The sink joins here, when all keys have, so that it changes
// no sum of a block.
inline float inverse_sum(float total_max, float total_sum, const float* sink) {
  float keep = 1.f;
  if (sink && total_max != kMinusInfinity) {
    const float largest = *sink > total_max ? *sink : total_max;
    keep = exp(splat(total_max - largest))[0];
    total_sum = total_sum * keep + exp(splat(*sink - largest))[0];
  }
  // 0 stays 0, and NaN is passed on.
  return total_sum > 0.f ? keep / total_sum : total_sum;
}

inline void finish_rows(const AttentionArgs& a, const QueryTile& t, const Scratch& s) {
  for (int64_t row = 0; row < t.rows; ++row) {
    const int64_t head = t.kv_head * t.group + row % t.group, query = t.query + row / t.group;
    float* out = a.out + ((t.batch * a.queries + query) * a.heads + head) * a.value_width;
    const float inverse = inverse_sum(s.total_max[row], s.total_sum[row], a.sinks ? a.sinks + head : nullptr);
    const float* total = s.total + row * padded_width(a);
    for (int64_t i = 0; i < a.value_width; ++i) out[i] = total[i] * inverse;
  }
}

inline void attention(const AttentionArgs& a, float* scratch, int64_t begin, int64_t end) {
  Scratch s;
  lay_out(a, scratch, &s);
  for (int64_t item = begin; item < end; ++item) {
    const QueryTile t = query_tile(a, item);
    gather_queries(a, t, s.q);
    begin_rows(a, t, s);
    for (int64_t first = 0; first < t.last_key; first += kKeyBlock)
      if (attend_block(a, t, s, first))
        for (int64_t row = 0, width = padded_width(a); row < t.rows; ++row)
          join_row(width, s.block + row * width, s.block_max[row], s.block_sum[row], s.total + row * width,
                   s.total_max + row, s.total_sum + row);
    finish_rows(a, t, s);
  }
}

// partials: [item][key block][row][maximum, sum, 14 unused, values], all rows of a full tile.
inline float* partial(const AttentionArgs& a, int64_t item, int64_t block, int64_t row) {
  const int64_t rows = tile_queries(a) * (a.heads / a.kv_heads), blocks = ceil_div(a.keys, kKeyBlock);
  return a.partials + ((item * blocks + block) * rows + row) * (kPanel + padded_width(a));
}

inline void attention_split(const AttentionArgs& a, float* scratch, int64_t begin, int64_t end) {
  Scratch s;
  lay_out(a, scratch, &s);
  const int64_t blocks = ceil_div(a.keys, kKeyBlock), width = padded_width(a);
  for (int64_t item = begin; item < end; ++item) {
    const QueryTile t = query_tile(a, item / blocks);
    gather_queries(a, t, s.q);
    const bool seen = attend_block(a, t, s, item % blocks * kKeyBlock);
    for (int64_t row = 0; row < t.rows; ++row) {
      float* out = partial(a, item / blocks, item % blocks, row);
      out[0] = seen ? s.block_max[row] : kMinusInfinity;
      out[1] = s.block_sum[row];
      if (seen)
        for (int64_t i = 0; i < width; i += kLanes) store(out + kPanel + i, load(s.block + row * width + i));
    }
  }
}

inline void attention_join(const AttentionArgs& a, float* scratch, int64_t begin, int64_t end) {
  Scratch s;
  lay_out(a, scratch, &s);
  const int64_t blocks = ceil_div(a.keys, kKeyBlock), width = padded_width(a);
  for (int64_t item = begin; item < end; ++item) {
    const QueryTile t = query_tile(a, item);
    begin_rows(a, t, s);
    for (int64_t block = 0; block < blocks; ++block)
      for (int64_t row = 0; row < t.rows; ++row) {
        const float* in = partial(a, item, block, row);
        join_row(width, in + kPanel, in[0], in[1], s.total + row * width, s.total_max + row, s.total_sum + row);
      }
    finish_rows(a, t, s);
  }
}

}  // namespace neap::NEAP_ISA
