// The attention ops on the CPU: a batch over one cache, and a ragged batch of sequences, each over its own cache.
#include "attention_problem.h"
#include "team.h"

namespace neap::binding {

namespace {

// `count` queries of q [B, Hq, Q, D] from number `begin` on; `out` is where the first one's result belongs.
Queries queries_of(const Tensor& q, int64_t begin, int64_t count, float* out) {
  return {
      .first = floats(q) + begin * q.stride(2),
      .out = out,
      .batch = q.size(0),
      .heads = q.size(1),
      .count = count,
      .batch_stride = q.stride(0),
      .head_stride = q.stride(1),
      .row_stride = q.stride(2),
      .column_stride = q.stride(3),
  };
}

// Attention with keys split over threads, for few items with many keys.
void attend_split(AttentionArgs args) {
  const Kernels& kernels = neap::kernels();
  const int64_t items = num_items(args), blocks = num_blocks(args), scratch = kernels.attention_scratch(args);
  const int64_t padded_width = ceil_div(args.value_width, kPanel) * kPanel;
  Tensor partials = empty({items, blocks, tile_queries(args) * (args.heads / args.kv_heads), kPanel + padded_width});
  args.partials = mutable_floats(partials);
  parallel(items * blocks, num_flops(args),
           [&](int64_t b, int64_t e) { kernels.attention_split(args, thread_scratch(scratch), b, e); });
  parallel(items, (double)partials.numel(),
           [&](int64_t b, int64_t e) { kernels.attention_join(args, thread_scratch(scratch), b, e); });
}

// Runs problems of different sizes in one parallel loop over all their items.
void attend_together(const std::vector<AttentionArgs>& problems) {
  const Kernels& kernels = neap::kernels();
  std::vector<int64_t> ends;
  int64_t items = 0, scratch = 0;
  double flops = 0;
  for (const AttentionArgs& problem : problems) {
    ends.push_back(items += num_items(problem));
    scratch = std::max(scratch, kernels.attention_scratch(problem));
    flops += num_flops(problem);
  }
  parallel(items, flops, [&](int64_t begin, int64_t end) {
    each_loop(ends, begin, end,
              [&](size_t at, int64_t b, int64_t e) { kernels.attention(problems[at], thread_scratch(scratch), b, e); });
  });
}

// Rounds tokens [from, from + count) of new keys or values [1, H, T, D] into slots [base, base + count) of a contiguous
// cache [1, H, S, D].
void write_slots(const Tensor& fresh, int64_t from, int64_t count, const Tensor& cache, Dtype dtype, int64_t base) {
  const Kernels& kernels = neap::kernels();
  uint8_t* slots = static_cast<uint8_t*>(cache.mutable_data_ptr());
  for (int64_t head = 0; head < fresh.size(1); ++head)
    for (int64_t token = 0; token < count; ++token)
      kernels.round_row(floats(fresh) + head * fresh.stride(1) + (from + token) * fresh.stride(2), fresh.size(3), dtype,
                        slots + (head * cache.stride(1) + (base + token) * cache.stride(2)) * element_bytes(dtype));
}

}  // namespace

Tensor contiguous_attention(Tensor q, Tensor k, Tensor v, int64_t kv_length, std::optional<Tensor> mask, bool causal,
                            double scaling, std::optional<double> softcap, std::optional<Tensor> sinks) {
  const char* op = "contiguous_attention";
  check_float(op, "q", q, 4);
  const Dtype kv_dtype = check_kv(op, k, v);
  const int64_t batch = q.size(0), heads = q.size(1), queries = q.size(2), kv_heads = k.size(1);
  NEAP_CHECK(k.size(0) == batch && v.size(0) == batch && v.size(1) == kv_heads && k.size(3) == q.size(3) &&
                 k.size(2) == v.size(2),
             op, ": q ", text(q), ", k ", text(k), " and v ", text(v),
             " do not fit [B, Hq, Q, D], [B, Hkv, S, D], [B, Hkv, S, Dv]");
  NEAP_CHECK(kv_heads > 0 && heads % kv_heads == 0, op, ": ", heads, " query heads cannot share ", kv_heads,
             " key heads");
  NEAP_CHECK(kv_length >= 0 && kv_length <= k.size(2), op, ": kv_length ", kv_length, " exceeds the ", k.size(2),
             " slots given");
  NEAP_CHECK((k.numel() == 0 || k.stride(3) == 1) && (v.numel() == 0 || v.stride(3) == 1), op,
             ": the last dimension of k and v must be contiguous");
  NEAP_CHECK(!softcap || *softcap > 0, op, ": softcap must be positive");
  if (mask) check_mask(op, *mask, batch, queries, kv_length);
  if (sinks) check_vector(op, "sinks", *sinks, heads);
  Tensor out = empty({batch, queries, heads, v.size(3)});
  if (out.numel() == 0) return out;
  const AttentionArgs args =
      attention_args(queries_of(q, 0, queries, mutable_floats(out)), k, v, kv_dtype, kv_length, mask ? &*mask : nullptr,
                     causal, scaling, softcap, sinks ? floats(*sinks) : nullptr);
  if (keeps_threads_busy(num_items(args), num_blocks(args), torch::stable::get_num_threads())) attend_together({args});
  else attend_split(args);
  return out;
}

Tensor ragged_contiguous_attention(Tensor q, Tensor k, Tensor v, std::vector<Tensor> keys, std::vector<Tensor> values,
                                   std::vector<int64_t> bases, std::vector<int64_t> counts, std::vector<Tensor> masks,
                                   double scaling, std::optional<double> softcap, std::optional<Tensor> sinks) {
  const char* op = "ragged_contiguous_attention";
  check_float(op, "q", q, 4);
  check_float(op, "k", k, 4);
  check_float(op, "v", v, 4);
  const int64_t heads = q.size(1), tokens = q.size(2), kv_heads = k.size(1);
  const size_t sequences = keys.size();
  NEAP_CHECK(q.size(0) == 1 && k.size(0) == 1 && v.size(0) == 1 && k.size(2) == tokens && v.size(2) == tokens &&
                 v.size(1) == kv_heads && k.size(3) == q.size(3),
             op, ": q ", text(q), ", k ", text(k), " and v ", text(v),
             " do not fit [1, Hq, T, D], [1, Hkv, T, D], [1, Hkv, T, Dv]");
  NEAP_CHECK(kv_heads > 0 && heads % kv_heads == 0, op, ": ", heads, " query heads cannot share ", kv_heads,
             " key heads");
  NEAP_CHECK(values.size() == sequences && bases.size() == sequences && counts.size() == sequences &&
                 masks.size() == sequences,
             op, ": ", sequences, " caches of keys, ", values.size(), " of values, ", bases.size(), " bases, ",
             counts.size(), " counts and ", masks.size(), " masks");
  NEAP_CHECK(tokens == 0 || (k.stride(3) == 1 && v.stride(3) == 1), op,
             ": the last dimension of k and v must be contiguous");
  NEAP_CHECK(!softcap || *softcap > 0, op, ": softcap must be positive");
  int64_t covered = 0;
  std::vector<Dtype> kv_dtypes;
  for (size_t s = 0; s < sequences; ++s) {
    kv_dtypes.push_back(check_cache(op, keys[s], values[s], kv_heads, k.size(3), v.size(3), bases[s], counts[s]));
    covered += counts[s];
  }
  NEAP_CHECK(covered == tokens, op, ": the counts sum to ", covered, " tokens, but q has ", tokens);
  for (size_t s = 0; s < sequences; ++s)
    if (masks[s].numel() > 0) check_mask(op, masks[s], 1, counts[s], bases[s] + counts[s]);
  if (sinks) check_vector(op, "sinks", *sinks, heads);

  const int64_t value_width = v.size(3);
  Tensor out = empty({1, tokens, heads, value_width});
  if (out.numel() == 0) return out;
  std::vector<AttentionArgs> problems;
  int64_t from = 0, items = 0, blocks = 0;
  for (size_t s = 0; s < sequences; ++s) {
    write_slots(k, from, counts[s], keys[s], kv_dtypes[s], bases[s]);
    write_slots(v, from, counts[s], values[s], kv_dtypes[s], bases[s]);
    const bool masked = masks[s].numel() > 0;
    const Queries queries = queries_of(q, from, counts[s], mutable_floats(out) + from * heads * value_width);
    problems.push_back(attention_args(queries, keys[s], values[s], kv_dtypes[s], bases[s] + counts[s],
                                      masked ? &masks[s] : nullptr, !masked, scaling, softcap,
                                      sinks ? floats(*sinks) : nullptr));
    from += counts[s];
    items += num_items(problems.back());
    blocks = std::max(blocks, num_blocks(problems.back()));
  }
  if (keeps_threads_busy(items, blocks, torch::stable::get_num_threads())) attend_together(problems);
  else
    for (const AttentionArgs& problem : problems) attend_split(problem);
  return out;
}

}  // namespace neap::binding
