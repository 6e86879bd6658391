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

// Sets the fields of a problem that concern the cache. `k` and `v` [B, Hkv, >= keys, D] of one dtype; the first `keys`
// slots are attended over, those from number `branch` on `apart` slots later.
template <class T>
void attend_over(AttentionArgs* args, const T& k, const T& v, Dtype kv_dtype, int64_t keys, const Tensor* mask,
                 bool causal, double scaling, const std::optional<double>& softcap, int64_t branch = 0,
                 int64_t apart = 0) {
  args->own = {0, args->queries, keys, branch, apart};
  args->k = k.const_data_ptr(), args->v = v.const_data_ptr(), args->kv_dtype = kv_dtype, args->keys = keys,
  args->kv_heads = k.size(1), args->width = k.size(3), args->value_width = v.size(3);
  args->k_batch = k.stride(0), args->k_head = k.stride(1), args->k_row = k.stride(2);
  args->v_batch = v.stride(0), args->v_head = v.stride(1), args->v_row = v.stride(2);
  if (mask) {
    args->mask = static_cast<const uint8_t*>(mask->const_data_ptr());
    args->mask_batch = mask->size(0) == 1 ? 0 : mask->stride(0), args->mask_row = mask->stride(2),
    args->mask_column = mask->stride(3);
  }
  args->causal = causal, args->scaling = (float)scaling, args->softcap = softcap ? (float)*softcap : 0.f;
}

inline int64_t tile_queries(const AttentionArgs& a) {
  return std::max<int64_t>(1, kQueryRows / (a.heads / a.kv_heads));
}
inline int64_t num_items(const AttentionArgs& a) {
  return a.batch * a.kv_heads * ((a.queries + tile_queries(a) - 1) / tile_queries(a));
}
inline int64_t num_blocks(const AttentionArgs& a) { return (a.keys + kKeyBlock - 1) / kKeyBlock; }
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
