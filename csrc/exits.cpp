// The ops of a layer exit after its head: the best of the draft vocabulary, and the router.
#include <tuple>

#include "device.h"
#include "team.h"

namespace neap::binding {

namespace {

std::tuple<Tensor, Tensor, Tensor> draft_top(Tensor x, Tensor rows, std::optional<Tensor> bias, int64_t k) {
  const Call call("draft_top", x);
  const float* inputs = call.floats("x", x, {-1, -1});
  const int64_t tokens = x.size(0);
  const Weight weight = call.weight("rows", rows, -1, x.size(1));
  DraftTopArgs args{
      .x = inputs,
      .rows = weight,
      .bias = bias ? call.floats("bias", *bias, {weight.rows}) : nullptr,
      .tokens = tokens,
      .k = (int)k,
  };
  NEAP_CHECK(k >= 1 && k <= kMaxTop && k <= args.rows.rows && args.rows.rows < INT32_MAX, "draft_top: k is ", k,
             ", want 1 to ", (int)kMaxTop, " of ", args.rows.rows, " rows");
  Tensor values = call.empty({tokens, k}, aoti_torch_dtype_float32());
  Tensor indices = call.empty({tokens, k}, aoti_torch_dtype_int64());
  Tensor log_mass = call.empty({tokens}, aoti_torch_dtype_float32());
  if (tokens == 0) return {values, indices, log_mass};
  const int64_t blocks = vocabulary_blocks(args.rows.rows), items = blocks * tokens;
  Tensor scratch = call.empty({items * (2 * k + 2)}, aoti_torch_dtype_float32());
  args.block_values = mutable_floats(scratch);
  args.block_indices = reinterpret_cast<int32_t*>(args.block_values + items * k);
  args.block_mass = args.block_values + items * 2 * k;
  args.values = mutable_floats(values);
  args.indices = mutable_integers(indices);
  args.log_mass = mutable_floats(log_mass);
  if (call.on_cpu()) {
    const Kernels& kernels = neap::kernels();
    parallel(blocks, (double)args.rows.rows * args.rows.columns * tokens,
             [&](int64_t b, int64_t e) { kernels.draft_blocks(args, b, e); });
    kernels.draft_join(args, 0, tokens);
  } else {
    call.on_gpu([&](void* stream) { return launch_draft_top(args, stream); });
  }
  return {values, indices, log_mass};
}

Tensor route(Tensor x, Tensor hidden, Tensor bias, Tensor output, Tensor feature_weight, Tensor skip, Tensor top,
             Tensor log_mass, Tensor distance, double shift, double eps, double lowest, double highest,
             Tensor tickets) {
  const Call call("route", x);
  call.rows("x", x, {-1, -1});
  const int64_t tokens = x.size(0), columns = x.size(1);
  const Weight weight = call.weight("hidden", hidden, -1, columns);
  const int64_t width = weight.rows;
  RouteArgs args{
      .x = x.const_data_ptr(),
      .dtype = call.dtype("x", x),
      .hidden = weight,
      .bias = call.floats("bias", bias, {width}),
      .output = call.floats("output", output, {width}),
      .feature_weight = call.floats("feature_weight", feature_weight, {kFeatures, width}),
      .skip = call.floats("skip", skip, {kFeatures}),
      .top = call.floats("top", top, {tokens, -1}),
      .log_mass = call.floats("log_mass", log_mass, {tokens}),
      .distance = call.integers("distance", distance, {tokens}),
      .tokens = tokens,
      .x_stride = x.stride(0),
      .k = (int)top.size(1),
      .shift = (float)shift,
      .eps = (float)eps,
      .lowest = (float)lowest,
      .highest = (float)highest,
  };
  NEAP_CHECK(args.dtype == kFloat32 || args.dtype == args.hidden.dtype,
             "route: x must be float32 or of hidden's dtype");
  NEAP_CHECK(args.k >= 1, "route: top has no columns");
  call.contiguous("tickets", tickets, {-1});
  NEAP_CHECK(tickets.scalar_type() == ScalarType::Int && tickets.size(0) >= route_tiles(tokens),
             "route: tickets must be int32 zeros, at least ", route_tiles(tokens), " of them");
  Tensor probability = call.empty({tokens}, aoti_torch_dtype_float32());
  if (tokens == 0) return probability;
  args.probability = mutable_floats(probability);
  if (!call.on_cpu()) {
    Tensor partial = call.empty({tokens, route_blocks(width)}, aoti_torch_dtype_float32());
    args.inner = mutable_floats(partial);
    args.tickets = static_cast<uint32_t*>(tickets.mutable_data_ptr());
    call.on_gpu([&](void* stream) { return launch_route(args, stream); });
    return probability;
  }
  const Kernels& kernels = neap::kernels();
  float* units = thread_scratch(tokens * (columns + width));
  args.inner = units + tokens * columns;
  const NormArgs norm{
      .x = args.x,
      .dtype = args.dtype,
      .out = units,
      .width = columns,
      .x_stride = args.x_stride,
      .out_stride = columns,
      .eps = args.eps,
  };
  kernels.norm(norm, 0, tokens);
  const RowDotsArgs dots{.x = units, .weight = args.hidden, .out = args.inner, .tokens = tokens, .x_stride = columns};
  parallel(ceil_div(width, kernels.dot_rows), (double)width * columns * tokens,
           [&](int64_t b, int64_t e) { kernels.row_dots(dots, b, e); });
  kernels.route_finish(args, 0, tokens);
  return probability;
}

}  // namespace
}  // namespace neap::binding

STABLE_TORCH_LIBRARY_FRAGMENT(neap, m) {
  m.def("draft_top(Tensor x, Tensor rows, Tensor? bias, int k) -> (Tensor, Tensor, Tensor)");
  m.def(
      "route(Tensor x, Tensor hidden, Tensor bias, Tensor output, Tensor feature_weight, Tensor skip, Tensor top, "
      "Tensor log_mass, Tensor distance, float shift, float eps, float lowest, float highest, Tensor(a!) tickets) "
      "-> Tensor");
}

#define NEAP_REGISTER(device)                   \
  STABLE_TORCH_LIBRARY_IMPL(neap, device, m) {  \
    using namespace neap::binding;              \
    m.impl("draft_top", TORCH_BOX(&draft_top)); \
    m.impl("route", TORCH_BOX(&route));         \
  }
NEAP_REGISTER(CPU)
#if defined(NEAP_WITH_CUDA)
NEAP_REGISTER(CUDA)
#endif
