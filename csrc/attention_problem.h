// The arguments of attention of one sequence's queries over its cache, and the amount of work.
#pragma once
#include "binding.h"

namespace neap::binding {

inline void check_mask(const char* op, const Tensor& mask, int64_t batch, int64_t queries, int64_t keys) {
  NEAP_CHECK(mask.is_cpu() && mask.scalar_type() == ScalarType::Bool, op, ": mask must be a bool tensor on the CPU");
  NEAP_CHECK(mask.dim() == 4 && (mask.size(0) == batch || mask.size(0) == 1) && mask.size(1) == 1 &&
                 mask.size(2) == queries && mask.size(3) == keys,
             op, ": mask has shape ", text(mask), ", want [", batch, " or 1, 1, ", queries, ", ", keys, "]");
}

// The dtype of a contiguous cache that takes keys of `width` and values of `value_width` of one sequence: `count`
// tokens at positions from `base` on.
template <class T>
Dtype check_cache(const char* op, const T& keys, const T& values, int64_t heads, int64_t width, int64_t value_width,
                  int64_t base, int64_t count) {
  const Dtype dtype = check_kv(op, keys, values);
  const auto fits = [&](const T& cache, int64_t size) {
    return cache.size(0) == 1 && cache.size(1) == heads && cache.size(3) == size && cache.stride(3) == 1 && base >= 0 &&
           count > 0 && base + count <= cache.size(2);
  };
  NEAP_CHECK(fits(keys, width) && fits(values, value_width), op, ": caches ", text(keys), " and ", text(values),
             " cannot take ", count, " tokens from position ", base, " on");
  return dtype;
}

// The queries of a problem. `first` and `out` point to the first one.
struct Queries {
  const float* first;
  float* out;
  int64_t batch, heads, count;
  int64_t batch_stride, head_stride, row_stride, column_stride;
};

// Attention over a cache. `k` and `v` [B, Hkv, >= keys, D] of one dtype; the first `keys` slots are attended over.
// `sinks` [Hq] or null.
template <class T>
AttentionArgs attention_args(const Queries& queries, const T& k, const T& v, Dtype kv_dtype, int64_t keys,
                             const Tensor* mask, bool causal, double scaling, const std::optional<double>& softcap,
                             const float* sinks = nullptr) {
  return {
      .q = queries.first,
      .k = k.const_data_ptr(),
      .v = v.const_data_ptr(),
      .kv_dtype = kv_dtype,
      .mask = mask ? static_cast<const uint8_t*>(mask->const_data_ptr()) : nullptr,
      .sinks = sinks,
      .out = queries.out,
      .batch = queries.batch,
      .heads = queries.heads,
      .kv_heads = k.size(1),
      .queries = queries.count,
      .keys = keys,
      .width = k.size(3),
      .value_width = v.size(3),
      .q_batch = queries.batch_stride,
      .q_head = queries.head_stride,
      .q_row = queries.row_stride,
      .q_column = queries.column_stride,
      .k_batch = k.stride(0),
      .k_head = k.stride(1),
      .k_row = k.stride(2),
      .v_batch = v.stride(0),
      .v_head = v.stride(1),
      .v_row = v.stride(2),
      .mask_batch = mask && mask->size(0) > 1 ? mask->stride(0) : 0,
      .mask_row = mask ? mask->stride(2) : 0,
      .mask_column = mask ? mask->stride(3) : 0,
      .causal = causal,
      .scaling = (float)scaling,
      .softcap = softcap ? (float)*softcap : 0.f,
  };
}

inline int64_t tile_queries(const AttentionArgs& a) {
  return std::max<int64_t>(1, kQueryRows / (a.heads / a.kv_heads));
}
inline int64_t num_items(const AttentionArgs& a) { return a.batch * a.kv_heads * ceil_div(a.queries, tile_queries(a)); }
inline int64_t num_blocks(const AttentionArgs& a) { return ceil_div(a.keys, kKeyBlock); }
inline double num_flops(const AttentionArgs& a) {
  return (double)a.batch * a.heads * a.queries * a.keys * (a.width + a.value_width);
}

// False if keys should be split over threads because there are too few (head, query tile) items. The result has the
// same bits either way.
inline bool keeps_threads_busy(int64_t items, int64_t blocks, int64_t threads) {
  return items >= 4 * threads || blocks < 2;
}

// Runs the part [begin, end) of several loops laid end to end. ends[i] is the total length of loops 0 to i. Calls
// f(loop, begin, end) with the range of each loop that overlaps.
template <class F>
void each_loop(const std::vector<int64_t>& ends, int64_t begin, int64_t end, const F& f) {
  for (size_t at = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin(); begin < end; ++at) {
    const int64_t start = at ? ends[at - 1] : 0, stop = std::min(end, ends[at]);
    if (begin < stop) f(at, begin - start, stop - start);
    begin = stop;
  }
}

}  // namespace neap::binding
