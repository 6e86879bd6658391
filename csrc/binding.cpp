// The ops on packed weights, norms and rotary positions: argument checks, allocation of outputs, and calls of the CPU
// kernels. Also the schemas of the ops that run on the CPU only.
#include <cmath>
#include <limits>
#include <mutex>

#include "experts.h"
#include "packed.h"
#include "tensor_table.h"

namespace neap::binding {

namespace {

Tensor run_linear(const char* op, Tensor x, const Tensor& weight, const Tensor* up, int64_t out_features,
                  const std::optional<Tensor>& bias, neap::Activation activation) {
  check_float(op, "x", x, -1);
  NEAP_CHECK(out_features >= 0, op, ": out_features is negative");
  const int64_t k = x.size(x.dim() - 1), factor = up ? 2 : 1;
  Sizes shape = sizes_of(x);
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
  shape.back() = out_features;
  if (bias) check_vector(op, "bias", *bias, factor * out_features);
  neap::LinearArgs args = linear_args(op, up ? "gate" : "packed", weight, up, bias ? floats(*bias) : nullptr, rows, k,
                                      out_features, activation);
  if (!x.is_contiguous()) x = torch::stable::contiguous(x);
  args.x = floats(x);
  Tensor out = empty(shape);
  args.out = mutable_floats(out);
  const neap::Kernels& kernels = neap::kernels();
  const int64_t items = kernels.linear_items(args, torch::stable::get_num_threads());
  parallel(items, (double)rows * k * factor * out_features,
           [&](int64_t b, int64_t e) { kernels.linear(args, items, b, e); });
  return out;
}

Tensor packed_linear(Tensor x, Tensor packed, int64_t out_features, std::optional<Tensor> bias) {
  return run_linear("packed_linear", x, packed, nullptr, out_features, bias, neap::kIdentity);
}

Tensor packed_gated_linear(Tensor x, Tensor gate, Tensor up, int64_t out_features, std::string activation,
                           std::optional<Tensor> bias) {
  return run_linear("packed_gated_linear", x, gate, &up, out_features, bias,
                    activation_of("packed_gated_linear", activation));
}

// The first of the largest products of each row, or -1: see ChoiceArgs. They are compared where they are made.
Tensor choose_packed(Tensor x, Tensor packed, int64_t out_features) {
  const char* op = "choose_packed";
  check_float(op, "x", x, 2);
  NEAP_CHECK(out_features > 0, op, ": out_features must be positive");
  const int64_t rows = x.size(0), k = x.size(1);
  const neap::LinearArgs args = linear_args<Tensor>(op, "packed", packed, nullptr, nullptr, rows, k, out_features);
  if (!x.is_contiguous()) x = torch::stable::contiguous(x);
  Tensor choices = empty({rows}, aoti_torch_dtype_int64());
  const neap::Kernels& kernels = neap::kernels();
  const int64_t items = kernels.linear_items(args, torch::stable::get_num_threads());
  const std::vector<neap::Best> none(rows, {-std::numeric_limits<float>::infinity(), 0});
  std::vector<neap::Best> best = none;
  std::mutex joining;
  parallel(items, (double)rows * k * out_features, [&](int64_t b, int64_t e) {
    std::vector<neap::Best> own = none;
    neap::LinearArgs part = args;
    part.x = floats(x);
    part.best = own.data();
    kernels.linear(part, items, b, e);
    const std::lock_guard lock(joining);
    for (int64_t r = 0; r < rows; ++r)
      if (own[r].value > best[r].value || (own[r].value == best[r].value && own[r].place < best[r].place))
        best[r] = own[r];
  });
  for (int64_t r = 0; r < rows; ++r) mutable_integers(choices)[r] = std::isfinite(best[r].value) ? best[r].place : -1;
  return choices;
}

Tensor activate(Tensor x, std::string activation) {
  check_float("activate", "x", x, -1);
  const neap::Activation kind = activation_of("activate", activation);
  if (!x.is_contiguous()) x = torch::stable::contiguous(x);
  Tensor out = empty(sizes_of(x));
  parallel(x.numel(), 20.0 * x.numel(),
           [&](int64_t b, int64_t e) { neap::kernels().activate(kind, floats(x), mutable_floats(out), b, e); });
  return out;
}

// `bias`: see RowNormArgs.
Tensor row_norm(const char* op, Tensor x, const Tensor& weight, const Tensor* bias, double eps, double weight_offset) {
  check_float(op, "x", x, -1);
  const int64_t width = x.size(x.dim() - 1);
  check_vector(op, "weight", weight, width);
  if (bias) check_vector(op, "bias", *bias, width);
  NEAP_CHECK(eps >= 0, op, ": eps is negative");
  if (!x.is_contiguous()) x = torch::stable::contiguous(x);
  Tensor out = empty(sizes_of(x));
  if (x.numel() == 0) return out;
  const neap::RowNormArgs args{
      .x = floats(x),
      .weight = floats(weight),
      .bias = bias ? floats(*bias) : nullptr,
      .out = mutable_floats(out),
      .width = width,
      .x_stride = width,
      .eps = (float)eps,
      .weight_offset = (float)weight_offset,
  };
  parallel(x.numel() / width, 4.0 * x.numel(), [&](int64_t b, int64_t e) { neap::kernels().row_norm(args, b, e); });
  return out;
}

Tensor rms_norm(Tensor x, Tensor weight, double eps, double weight_offset) {
  return row_norm("rms_norm", x, weight, nullptr, eps, weight_offset);
}

Tensor layer_norm(Tensor x, Tensor weight, Tensor bias, double eps) {
  return row_norm("layer_norm", x, weight, &bias, eps, 0);
}

Tensor rotate(const char* name, const Tensor& x, const Tensor& cos, const Tensor& sin) {
  check_float("rotary", name, x, 4);
  const int64_t batch = x.size(0), length = x.size(2), width = x.size(3);
  NEAP_CHECK(cos.size(0) == batch || cos.size(0) == 1, "rotary: cos has ", cos.size(0), " rows for a batch of ", batch);
  NEAP_CHECK(cos.size(1) == length && cos.size(2) == width && width % 2 == 0, "rotary: ", name, " ", text(x),
             " wants cos and sin [B or 1, ", length, ", ", width, "] of even width, got ", text(cos));
  NEAP_CHECK(x.numel() == 0 || x.stride(3) == 1, "rotary: the last dimension of ", name, " must be contiguous");
  Tensor out = empty(sizes_of(x));
  if (x.numel() == 0) return out;
  const neap::RotaryArgs args{
      .x = floats(x),
      .cos = floats(cos),
      .sin = floats(sin),
      .out = mutable_floats(out),
      .heads = x.size(1),
      .length = length,
      .width = width,
      .x_batch = x.stride(0),
      .x_head = x.stride(1),
      .x_row = x.stride(2),
      .angle_batch = cos.size(0) == 1 ? 0 : cos.stride(0),
      .angle_row = cos.stride(1),
  };
  parallel(batch * x.size(1), 6.0 * x.numel(), [&](int64_t b, int64_t e) { neap::kernels().rotary(args, b, e); });
  return out;
}

std::tuple<Tensor, Tensor> rotary(Tensor q, Tensor k, Tensor cos, Tensor sin) {
  check_float("rotary", "cos", cos, 3);
  check_float("rotary", "sin", sin, 3);
  NEAP_CHECK(text(cos) == text(sin), "rotary: cos ", text(cos), " and sin ", text(sin), " differ in shape");
  if (!cos.is_contiguous()) cos = torch::stable::contiguous(cos);
  if (!sin.is_contiguous()) sin = torch::stable::contiguous(sin);
  return {rotate("q", q, cos, sin), rotate("k", k, cos, sin)};
}

std::string cpu_isa() { return neap::kernels().name; }

// What nvcc built: its CUDA, and the architectures in TORCH_CUDA_ARCH_LIST's form. Empty for the CPU alone.
std::string cuda_build() { return NEAP_CUDA_BUILD; }

void set_cpu_isa(std::string name) {
  NEAP_CHECK(neap::select_kernels(name.c_str()), "set_cpu_isa: this machine or build has no '", name,
             "'; names are auto, on x86-64 portable, avx2, avx512, avx512bf16, and on ARM64 neon, dotprod, i8mm");
}

}  // namespace
}  // namespace neap::binding

STABLE_TORCH_LIBRARY(neap, m) {
  m.def("pack_linear(Tensor weight) -> Tensor");
  m.def("pack_blocks(Tensor blocks, str kind, int in_features) -> Tensor");
  m.def("round_inputs_(Tensor(a!) packed) -> ()");
  m.def("unpack_linear(Tensor packed) -> Tensor");
  m.def("packed_rows(Tensor packed, Tensor indices) -> Tensor");
  m.def("packed_linear(Tensor x, Tensor packed, SymInt out_features, Tensor? bias=None) -> Tensor");
  m.def("choose_packed(Tensor x, Tensor packed, SymInt out_features) -> Tensor");
  m.def(
      "packed_gated_linear(Tensor x, Tensor gate, Tensor up, SymInt out_features, str activation, Tensor? bias=None) "
      "-> Tensor");
  m.def("activate(Tensor x, str activation) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps, float weight_offset=0.0) -> Tensor");
  m.def("layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor");
  m.def("rotary(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor, Tensor)");
  m.def(
      "contiguous_attention(Tensor q, Tensor k, Tensor v, SymInt kv_length, Tensor? mask, bool causal, float scaling, "
      "float? softcap=None, Tensor? sinks=None) -> Tensor");
  m.def(
      "ragged_contiguous_attention(Tensor q, Tensor k, Tensor v, Tensor(a!)[] keys, Tensor(b!)[] values, "
      "SymInt[] bases, SymInt[] counts, Tensor[] masks, float scaling, float? softcap=None, Tensor? sinks=None) -> "
      "Tensor");
  m.def(
      "decoder_layers(Tensor x, Tensor[] cos, Tensor[] sin, Tensor norms, Tensor packed, Tensor biases, "
      "Tensor(a!)[] keys, Tensor(b!)[] values, SymInt[] bases, SymInt[] counts, Tensor[] masks, SymInt[] kinds, "
      "SymInt[] stops, SymInt num_layers, SymInt heads, SymInt[] intermediates, str activation, float eps, "
      "float weight_offset, float scaling, float? softcap=None, SymInt[] places=[], float query_scale=1.0, "
      "bool parallel_mlp=False, SymInt experts_per_token=0, bool norm_shares=False, Tensor? query_scales=None, "
      "bool norm_values=False, SymInt[] reads_kv=[], Tensor? ends=None, Tensor? per_layer_inputs=None) -> Tensor");
  m.def("expert_table(Tensor[] packed, Tensor? inner_bias=None, Tensor? bias=None) -> Tensor");
  m.def(
      "choose_experts(Tensor x, Tensor router, SymInt num_experts, SymInt chosen, bool normed, Tensor? bias=None) -> "
      "(Tensor, Tensor, Tensor)");
  m.def("experts(Tensor x, Tensor index, Tensor shares, Tensor table, str activation) -> Tensor");
  m.def(
      "paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor block_tables, "
      "Tensor table_indices, Tensor positions, float scaling, float softcap=0., int window=0, Tensor? sinks=None) -> "
      "Tensor");
  m.def("tensor_table(Tensor[] tensors) -> Tensor");
  m.def("profile_layers(bool is_on) -> Tensor");
  m.def(
      "draft_chains(Tensor states, Tensor outputs, int[] tokens, int[] counts, int[] places, int[] rooms, "
      "float[] survivals, float[] factors, float[] least, Tensor embedding, Tensor vocabulary, Tensor[] packed, "
      "Tensor[] vectors, float shift, float eps, float lowest, float highest, int max_drafts) -> (Tensor, Tensor, "
      "Tensor, Tensor)");
  m.def("cpu_isa() -> str");
  m.def("cuda_build() -> str");
  m.def("set_cpu_isa(str name) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(neap, CPU, m) {
  using namespace neap::binding;
  m.impl("pack_linear", TORCH_BOX(&pack_linear));
  m.impl("pack_blocks", TORCH_BOX(&pack_blocks));
  m.impl("round_inputs_", TORCH_BOX(&round_inputs_));
  m.impl("unpack_linear", TORCH_BOX(&unpack_linear));
  m.impl("packed_rows", TORCH_BOX(&packed_rows));
  m.impl("packed_linear", TORCH_BOX(&packed_linear));
  m.impl("choose_packed", TORCH_BOX(&choose_packed));
  m.impl("packed_gated_linear", TORCH_BOX(&packed_gated_linear));
  m.impl("activate", TORCH_BOX(&activate));
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("layer_norm", TORCH_BOX(&layer_norm));
  m.impl("rotary", TORCH_BOX(&rotary));
  m.impl("contiguous_attention", TORCH_BOX(&contiguous_attention));
  m.impl("ragged_contiguous_attention", TORCH_BOX(&ragged_contiguous_attention));
  m.impl("decoder_layers", TORCH_BOX(&decoder_layers));
  m.impl("choose_experts", TORCH_BOX(&choose_experts));
  m.impl("experts", TORCH_BOX(&experts));
  m.impl("draft_chains", TORCH_BOX(&draft_chains));
}

STABLE_TORCH_LIBRARY_IMPL(neap, CompositeExplicitAutograd, m) {
  using namespace neap::binding;
  m.impl("expert_table", TORCH_BOX(&expert_table));
  m.impl("tensor_table", TORCH_BOX(&tensor_table));
  m.impl("profile_layers", TORCH_BOX(&profile_layers));
  m.impl("cpu_isa", TORCH_BOX(&cpu_isa));
  m.impl("cuda_build", TORCH_BOX(&cuda_build));
  m.impl("set_cpu_isa", TORCH_BOX(&set_cpu_isa));
}
