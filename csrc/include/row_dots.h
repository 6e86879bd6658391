// x @ weight.T for a few tokens over row-major weights of any type: products of heads, draft vocabularies and routers.
//
// The time is that of reading the weights, so they are read in their stored type, and each row once for up to
// kTokenGroup tokens. Each lane sums one chain of products in order, so the bits of a result do not depend on the
// number of tokens or threads.
#pragma once
#include "exits.h"
#include "half_simd.h"

namespace neap::NEAP_ISA {

constexpr int64_t kRowGroup = 4, kTokenGroup = 4;
constexpr int64_t kDotRows = 16;  // weight rows per item

template <class W, int kRows, int kTokens>
NEAP_INLINE void dot_group(const W* w, const float* x, int64_t x_stride, int64_t columns, float* out,
                           int64_t out_stride) {
  Vec sum[kRows][kTokens] = {};
  const W* row[kRows];
  for (int r = 0; r < kRows; ++r) row[r] = w + r * columns;
  int64_t k = 0;
  for (; k + kLanes <= columns; k += kLanes) {
    Vec token[kTokens];
    for (int t = 0; t < kTokens; ++t) token[t] = load(x + t * x_stride + k);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Vec weight = load(row[r] + k);
      __builtin_prefetch(row[r] + k + kRows * columns);
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; ++t) sum[r][t] = fma(weight, token[t], sum[r][t]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int t = 0; t < kTokens; ++t) {
      float total = sum_lanes(sum[r][t]);
      for (int64_t i = k; i < columns; ++i) total += to_float(row[r][i]) * x[t * x_stride + i];
      out[t * out_stride + r] = total;
    }
}

// Takes as many rows at once as there are registers for the sums: eight independent sums hide a multiply-add's latency.
template <class W, int kTokens>
NEAP_INLINE void dot_rows_of(const W* rows, int64_t count, const float* x, int64_t x_stride, int64_t columns,
                             float* out, int64_t out_stride) {
  constexpr int kRows = kTokens == kTokenGroup ? kRowGroup / 2 : kRowGroup;
  int64_t r = 0;
  for (; r + kRows <= count; r += kRows)
    dot_group<W, kRows, kTokens>(rows + r * columns, x, x_stride, columns, out + r, out_stride);
  for (; r < count; ++r) dot_group<W, 1, kTokens>(rows + r * columns, x, x_stride, columns, out + r, out_stride);
}

// Tokens [0, tokens) against rows [begin, end): out[t * out_stride + row - begin].
template <class W>
inline void dot_rows(const W* w, const float* x, int64_t x_stride, int64_t columns, int64_t begin, int64_t end,
                     int64_t tokens, float* out, int64_t out_stride) {
  for (int64_t r = begin; r < end; r += kRowGroup) {
    const W* rows = w + r * columns;
    const int64_t count = min64(kRowGroup, end - r);
    float* to = out + r - begin;
    int64_t t = 0;
    for (; t + kTokenGroup <= tokens; t += kTokenGroup)
      dot_rows_of<W, kTokenGroup>(rows, count, x + t * x_stride, x_stride, columns, to + t * out_stride, out_stride);
    for (; t + 2 <= tokens; t += 2)
      dot_rows_of<W, 2>(rows, count, x + t * x_stride, x_stride, columns, to + t * out_stride, out_stride);
    if (t < tokens)
      dot_rows_of<W, 1>(rows, count, x + t * x_stride, x_stride, columns, to + t * out_stride, out_stride);
  }
}

inline void dot_rows(const Weight& w, const float* x, int64_t x_stride, int64_t begin, int64_t end, int64_t tokens,
                     float* out, int64_t out_stride) {
  switch (w.dtype) {
    case kFloat32: return dot_rows((const float*)w.data, x, x_stride, w.columns, begin, end, tokens, out, out_stride);
    case kFloat16: return dot_rows((const Half*)w.data, x, x_stride, w.columns, begin, end, tokens, out, out_stride);
    case kBfloat16: return dot_rows((const Bfloat*)w.data, x, x_stride, w.columns, begin, end, tokens, out, out_stride);
  }
}

inline void row_dots(const RowDotsArgs& args, int64_t begin, int64_t end) {
  const int64_t first = begin * kDotRows, last = min64(args.weight.rows, end * kDotRows);
  dot_rows(args.weight, args.x, args.x_stride, first, last, args.tokens, args.out + first, args.weight.rows);
}

}  // namespace neap::NEAP_ISA
