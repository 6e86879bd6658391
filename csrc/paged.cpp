// Paged attention: the binding, and the CPU kernel. The CPU kernel is simple rather than fast.
#include "include/paged.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cmath>
#include <cstring>

#include "device.h"
#include "team.h"

namespace neap::binding {

namespace {

constexpr int64_t kLanes = 16;  // independent partial sums of a dot product

// Index of the slot of a position in a pool of slots [block, kv head, slot].
int64_t slot_at(const PagedArgs& args, int64_t table, int64_t position, int64_t head) {
  const int64_t block = args.block_tables[table * args.table_blocks + position / args.block_tokens];
  return (block * args.kv_heads + head) * args.block_tokens + position % args.block_tokens;
}

// Index of the slot from which token t reads position p: those of its branch are where they are kept.
int64_t slot_seen(const PagedArgs& args, int64_t t, int64_t p, int64_t head) {
  return slot_at(args, args.table_indices[t], p < args.branches[t] ? p : p + args.slot_mapping[t] - args.positions[t],
                 head);
}

// Checks the contents of block_tables, table_indices, positions, slot_mapping and branches. CPU only: on a GPU this
// would need a synchronisation.
void check_indices(const PagedArgs& args) {
  for (int64_t t = 0; t < args.tokens; ++t) {
    const int64_t table = args.table_indices[t], position = args.positions[t], place = args.slot_mapping[t],
                  branch = args.branches[t];
    if (position < 0) continue;
    NEAP_CHECK(table >= 0 && table < args.num_tables, "paged_attention: token ", t, " has table index ", table,
               ", but there are ", args.num_tables, " block tables");
    NEAP_CHECK(position < args.table_blocks * args.block_tokens, "paged_attention: token ", t, " has position ",
               position, ", but its block table has ", args.table_blocks, " blocks of ", args.block_tokens, " tokens");
    NEAP_CHECK(branch >= 0 && branch <= position, "paged_attention: token ", t, " has position ", position,
               ", but its branch begins at ", branch);
    NEAP_CHECK(place >= position && place < args.table_blocks * args.block_tokens, "paged_attention: token ", t,
               " is kept at position ", place, ", but its block table has ", args.table_blocks, " blocks of ",
               args.block_tokens, " tokens");
    const auto check_block = [&](int64_t i) {
      const int64_t block = args.block_tables[table * args.table_blocks + i];
      NEAP_CHECK(block >= 0 && block < args.num_blocks, "paged_attention: entry ", i, " of block table ", table, " is ",
                 block, ", but the pool has ", args.num_blocks, " blocks");
    };
    const auto check_blocks = [&](int64_t from, int64_t end) {
      for (int64_t i = from / args.block_tokens; from < end && i <= (end - 1) / args.block_tokens; ++i) check_block(i);
    };
    check_blocks(first_seen(args, position), branch);
    check_blocks(std::max(first_seen(args, position), branch) + place - position, place + 1);
  }
}

template <class E>
void write(const PagedArgs& args) {
  const E *k = static_cast<const E*>(args.k), *v = static_cast<const E*>(args.v);
  E *keys = static_cast<E*>(args.keys), *values = static_cast<E*>(args.values);
  for (int64_t t = 0; t < args.tokens; ++t) {
    if (args.positions[t] < 0) continue;
    for (int64_t h = 0; h < args.kv_heads; ++h) {
      const int64_t slot = slot_at(args, args.table_indices[t], args.slot_mapping[t], h);
      std::memcpy(keys + slot * args.width, k + t * args.k_token + h * args.k_head, args.width * sizeof(E));
      std::memcpy(values + slot * args.value_width, v + t * args.v_token + h * args.v_head,
                  args.value_width * sizeof(E));
    }
  }
}

template <class E>
float dot(const float* query, const E* key, int64_t width) {
  float sums[kLanes] = {}, total = 0.f;
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += query[i + lane] * (float)key[i + lane];
  for (; i < width; ++i) total += query[i] * (float)key[i];
  for (float sum : sums) total += sum;
  return total;
}

// Item: a (token, query head). `scratch`: room for a query, an output row, and a score per key of the longest one.
template <class E>
void attend(const PagedArgs& args, float* scratch, int64_t begin, int64_t end) {
  const E *keys = static_cast<const E*>(args.keys), *values = static_cast<const E*>(args.values);
  float *query = scratch, *sums = query + args.width, *weights = sums + args.value_width;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t t = item / args.heads, head = item % args.heads, kv_head = head / (args.heads / args.kv_heads),
                  position = args.positions[t];
    E* out = static_cast<E*>(args.out) + item * args.value_width;
    std::fill_n(sums, args.value_width, 0.f);
    if (position < 0) {
      std::fill_n(out, args.value_width, E(0.f));
      continue;
    }
    const E* q = static_cast<const E*>(args.q) + t * args.q_token + head * args.q_head;
    std::copy_n(q, args.width, query);
    const int64_t first = first_seen(args, position), count = position - first + 1;
    float largest = -INFINITY, total = 0.f;
    for (int64_t i = 0; i < count; ++i) {
      float score = args.scaling * dot(query, keys + slot_seen(args, t, first + i, kv_head) * args.width, args.width);
      if (args.softcap > 0) score = args.softcap * std::tanh(score / args.softcap);
      weights[i] = score;
      largest = std::max(largest, score);
    }
    for (int64_t i = 0; i < count; ++i) {
      const float weight = std::exp(weights[i] - largest);
      const E* value = values + slot_seen(args, t, first + i, kv_head) * args.value_width;
      total += weight;
      for (int64_t c = 0; c < args.value_width; ++c) sums[c] += weight * (float)value[c];
    }
    for (int64_t c = 0; c < args.value_width; ++c) out[c] = E(sums[c] / total);
  }
}

template <class E>
void run_on_cpu(const PagedArgs& args) {
  write<E>(args);
  int64_t longest = 0;
  double pairs = 0;
  for (int64_t t = 0; t < args.tokens; ++t) {
    const int64_t count = args.positions[t] < 0 ? 0 : args.positions[t] - first_seen(args, args.positions[t]) + 1;
    longest = std::max(longest, count);
    pairs += (double)count * args.heads;
  }
  parallel(args.tokens * args.heads, pairs * (args.width + args.value_width), [&](int64_t b, int64_t e) {
    attend<E>(args, thread_scratch(args.width + args.value_width + longest), b, e);
  });
}

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
                       Tensor table_indices, Tensor positions, Tensor slot_mapping, Tensor branches, double scaling,
                       double softcap, int64_t window) {
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
      .slot_mapping = call.integers("slot_mapping", slot_mapping, {tokens}),
      .branches = call.integers("branches", branches, {tokens}),
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
  if (!call.on_cpu()) {
    const PagedPlan plan = paged_plan(args);
    NEAP_CHECK(width <= kQueryFloats && plan.tiles <= UINT16_MAX, "paged_attention: heads of width ", width,
               " are too wide, or there are too many of them, for a GPU");
    Tensor partials = call.empty({plan.num_partials(tokens)}, aoti_torch_dtype_float32());
    Tensor tickets = call.empty({plan.num_tickets(tokens)}, aoti_torch_dtype_int32());
    args.partials = mutable_floats(partials);
    args.tickets = static_cast<uint32_t*>(tickets.mutable_data_ptr());
    call.on_gpu([&](void* stream) { return launch_paged_attention(args, plan, stream); });
    return out;
  }
  check_indices(args);
  switch (dtype) {
    case kFloat32: run_on_cpu<float>(args); break;
    case kFloat16: run_on_cpu<torch::headeronly::Half>(args); break;
    case kBfloat16: run_on_cpu<torch::headeronly::BFloat16>(args); break;
  }
  return out;
}

}  // namespace
}  // namespace neap::binding

STABLE_TORCH_LIBRARY_FRAGMENT(neap, m) {
  m.def(
      "paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor block_tables, "
      "Tensor table_indices, Tensor positions, Tensor slot_mapping, Tensor branches, float scaling, float softcap=0., "
      "int window=0) -> Tensor");
}

#define NEAP_REGISTER(device) \
  STABLE_TORCH_LIBRARY_IMPL(neap, device, m) { m.impl("paged_attention", TORCH_BOX(&neap::binding::paged_attention)); }
NEAP_REGISTER(CPU)
#if defined(NEAP_WITH_CUDA)
NEAP_REGISTER(CUDA)
#endif
