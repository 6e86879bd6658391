// Paged attention: the binding. Only a GPU has a kernel; on a CPU, Python runs the op's reference.
#include "include/paged.h"

#include "device.h"

namespace neap::binding {

namespace {

// Checks q, k or v and returns the strides of a token and of a head. The numbers of a head must be contiguous.
void strided(const Call& call, const char* name, const Tensor& t, const Sizes& sizes, Dtype dtype) {
  call.shape(name, t, sizes);
  NEAP_CHECK(call.dtype(name, t) == dtype, "paged_attention: ", name, " is of another dtype than q");
  NEAP_CHECK(t.numel() == 0 || t.size(2) == 1 || t.stride(2) == 1, "paged_attention: the last dimension of ", name,
             " must be contiguous");
}

void* pool(const Call& call, const char* name, Tensor& t, const Sizes& sizes, Dtype dtype) {
  call.contiguous(name, t, sizes);
  NEAP_CHECK(call.dtype(name, t) == dtype, "paged_attention: ", name, " is of another dtype than q");
  return t.mutable_data_ptr();
}

Tensor paged_attention(Tensor q, Tensor k, Tensor v, Tensor keys, Tensor values, Tensor block_tables,
                       Tensor table_indices, Tensor positions, double scaling, double softcap, int64_t window) {
  const Call call("paged_attention", q);
  const Dtype dtype = call.dtype("q", q);
  strided(call, "q", q, {-1, -1, -1}, dtype);
  const int64_t tokens = q.size(0), heads = q.size(1), width = q.size(2);
  strided(call, "k", k, {tokens, -1, width}, dtype);
  const int64_t kv_heads = k.size(1);
  strided(call, "v", v, {tokens, kv_heads, -1}, dtype);
  const int64_t value_width = v.size(2);
  NEAP_CHECK(kv_heads > 0 && heads > 0 && heads % kv_heads == 0, "paged_attention: ", heads,
             " query heads cannot share ", kv_heads, " key heads");
  NEAP_CHECK(width > 0 && value_width > 0, "paged_attention: the heads' width is 0");
  void* key_pool = pool(call, "keys", keys, {-1, kv_heads, -1, width}, dtype);
  const int64_t num_blocks = keys.size(0), block_tokens = keys.size(2);
  PagedArgs args{
      .q = q.const_data_ptr(),
      .k = k.const_data_ptr(),
      .v = v.const_data_ptr(),
      .keys = key_pool,
      .values = pool(call, "values", values, {num_blocks, kv_heads, block_tokens, value_width}, dtype),
      .block_tables = call.integers("block_tables", block_tables, {-1, -1}),
      .table_indices = call.integers("table_indices", table_indices, {tokens}),
      .positions = call.integers("positions", positions, {tokens}),
      .dtype = dtype,
      .tokens = tokens,
      .heads = heads,
      .kv_heads = kv_heads,
      .width = width,
      .value_width = value_width,
      .num_blocks = num_blocks,
      .block_tokens = block_tokens,
      .num_tables = block_tables.size(0),
      .table_blocks = block_tables.size(1),
      .q_token = q.stride(0),
      .q_head = q.stride(1),
      .k_token = k.stride(0),
      .k_head = k.stride(1),
      .v_token = v.stride(0),
      .v_head = v.stride(1),
      .window = window,
      .scaling = (float)scaling,
      .softcap = (float)softcap,
  };
  NEAP_CHECK(block_tokens > 0 && block_tokens * args.table_blocks < INT32_MAX, "paged_attention: block tables of ",
             args.table_blocks, " blocks of ", block_tokens, " tokens are empty or too long");
  NEAP_CHECK(softcap >= 0 && window >= 0, "paged_attention: softcap and window must be at least 0 (0: none)");
  int32_t torch_dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(q.get(), &torch_dtype));
  Tensor out = call.empty({tokens, heads, value_width}, torch_dtype);
  args.out = out.mutable_data_ptr();
  if (tokens == 0) return out;
  const PagedPlan plan = paged_plan(args);
  NEAP_CHECK(width <= kQueryFloats && plan.tiles <= UINT16_MAX, "paged_attention: heads of width ", width,
             " are too wide, or there are too many of them");
  Tensor partials = call.empty({plan.num_partials(tokens)}, aoti_torch_dtype_float32());
  Tensor tickets = call.empty({plan.num_tickets(tokens)}, aoti_torch_dtype_int32());
  args.partials = mutable_floats(partials);
  args.tickets = static_cast<uint32_t*>(tickets.mutable_data_ptr());
  call.on_gpu([&](void* stream) { return launch_paged_attention(args, plan, stream); });
  return out;
}

}  // namespace
}  // namespace neap::binding

STABLE_TORCH_LIBRARY_IMPL(neap, CUDA, m) { m.impl("paged_attention", TORCH_BOX(&neap::binding::paged_attention)); }
