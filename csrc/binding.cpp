// The ops as torch sees them; with tensors.h the only torch-facing files. LibTorch Stable ABI, so one library serves torch 2.11
// and later. Checks every argument, allocates what is returned, and hands plain pointers to the kernels inside torch's own
// thread pool.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>

#include "include/kernels.h"
#include "tensors.h"

namespace {

using namespace neap::binding;

Tensor pack_linear(Tensor weight) {
  check_float("pack_linear", "weight", weight, 2);
  const int64_t n = weight.size(0), k = weight.size(1), panels = (n + neap::kPanel - 1) / neap::kPanel;
  Tensor packed = empty({panels, k, neap::kPanel});
  advise_huge_pages(packed);
  const neap::PackArgs args{floats(weight), mutable_floats(packed), n, k, weight.stride(0), weight.stride(1)};
  parallel(panels, (double)n * k, [&](int64_t b, int64_t e) { neap::kernels().pack(args, b, e); });
  return packed;
}

Tensor run_linear(const char* op, Tensor x, const Tensor& packed, int64_t out_features, const std::optional<Tensor>& bias, bool gated,
                  neap::Activation activation) {
  check_float(op, "x", x, -1);
  check_float(op, "packed", packed, 3);
  const int64_t k = x.size(x.dim() - 1), factor = gated ? 2 : 1;
  NEAP_CHECK(out_features >= 0, op, ": out_features is negative");
  const int64_t panels = factor * ((out_features + neap::kPanel - 1) / neap::kPanel);
  NEAP_CHECK(packed.is_contiguous() && packed.size(0) == panels && packed.size(1) == k && packed.size(2) == neap::kPanel, op, ": packed has shape ",
             text(packed), ", but ", out_features, " outputs of x ", text(x), " want contiguous [", panels, ", ", k, ", ", neap::kPanel, "]");
  if (bias) check_vector(op, "bias", *bias, factor * out_features);
  if (!x.is_contiguous()) x = torch::stable::contiguous(x);
  Sizes shape = sizes_of(x);
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
  shape.back() = out_features;
  Tensor out = empty(shape);
  const neap::LinearArgs args{floats(x), floats(packed), bias ? floats(*bias) : nullptr, mutable_floats(out), rows, k, out_features, k, gated, activation};
  const neap::Kernels& kernels = neap::kernels();
  const int64_t items = kernels.linear_items(args, torch::stable::get_num_threads());
  parallel(items, (double)rows * k * panels * neap::kPanel, [&](int64_t b, int64_t e) { kernels.linear(args, items, b, e); });
  return out;
}

Tensor packed_linear(Tensor x, Tensor packed, int64_t out_features, std::optional<Tensor> bias) {
  return run_linear("packed_linear", x, packed, out_features, bias, false, neap::kIdentity);
}

Tensor packed_gated_linear(Tensor x, Tensor packed, int64_t out_features, std::string activation, std::optional<Tensor> bias) {
  NEAP_CHECK(activation == "silu" || activation == "gelu_tanh", "packed_gated_linear: activation is '", activation, "', want 'silu' or 'gelu_tanh'");
  return run_linear("packed_gated_linear", x, packed, out_features, bias, true, activation == "silu" ? neap::kSilu : neap::kGeluTanh);
}

Tensor rms_norm(Tensor x, Tensor weight, double eps, double weight_offset) {
  check_float("rms_norm", "x", x, -1);
  const int64_t width = x.size(x.dim() - 1);
  check_vector("rms_norm", "weight", weight, width);
  NEAP_CHECK(eps >= 0, "rms_norm: eps is negative");
  if (!x.is_contiguous()) x = torch::stable::contiguous(x);
  Tensor out = empty(sizes_of(x));
  if (x.numel() == 0) return out;
  const neap::RmsNormArgs args{floats(x), floats(weight), mutable_floats(out), width, width, (float)eps, (float)weight_offset};
  parallel(x.numel() / width, 4.0 * x.numel(), [&](int64_t b, int64_t e) { neap::kernels().rms_norm(args, b, e); });
  return out;
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
  const neap::RotaryArgs args{floats(x), floats(cos), floats(sin), mutable_floats(out), x.size(1), length, width,
                              x.stride(0), x.stride(1), x.stride(2), cos.size(0) == 1 ? 0 : cos.stride(0), cos.stride(1)};
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

Tensor slot_attention(Tensor q, Tensor k, Tensor v, int64_t kv_length, std::optional<Tensor> mask, bool causal, double scaling, std::optional<double> softcap) {
  const char* op = "slot_attention";
  check_float(op, "q", q, 4);
  check_float(op, "k", k, 4);
  check_float(op, "v", v, 4);
  const int64_t batch = q.size(0), heads = q.size(1), queries = q.size(2), kv_heads = k.size(1);
  NEAP_CHECK(k.size(0) == batch && v.size(0) == batch && v.size(1) == kv_heads && k.size(3) == q.size(3) && k.size(2) == v.size(2), op, ": q ", text(q),
             ", k ", text(k), " and v ", text(v), " do not fit [B, Hq, Q, D], [B, Hkv, S, D], [B, Hkv, S, Dv]");
  NEAP_CHECK(kv_heads > 0 && heads % kv_heads == 0, op, ": ", heads, " query heads cannot share ", kv_heads, " key heads");
  NEAP_CHECK(kv_length >= 0 && kv_length <= k.size(2), op, ": kv_length ", kv_length, " exceeds the ", k.size(2), " slots given");
  NEAP_CHECK((k.numel() == 0 || k.stride(3) == 1) && (v.numel() == 0 || v.stride(3) == 1), op, ": the last dimension of k and v must be contiguous");
  NEAP_CHECK(!softcap || *softcap > 0, op, ": softcap must be positive");
  if (mask) {
    NEAP_CHECK(mask->is_cpu() && mask->scalar_type() == ScalarType::Bool, op, ": mask must be a bool tensor on the CPU");
    NEAP_CHECK(mask->dim() == 4 && (mask->size(0) == batch || mask->size(0) == 1) && mask->size(1) == 1 && mask->size(2) == queries && mask->size(3) == kv_length,
               op, ": mask has shape ", text(*mask), ", want [", batch, " or 1, 1, ", queries, ", ", kv_length, "]");
  }
  const int64_t value_width = v.size(3);
  Tensor out = empty({batch, queries, heads, value_width});
  if (out.numel() == 0) return out;
  neap::AttentionArgs args{};
  args.q = floats(q), args.k = floats(k), args.v = floats(v), args.out = mutable_floats(out);
  args.batch = batch, args.heads = heads, args.kv_heads = kv_heads, args.queries = queries;
  args.keys = kv_length, args.width = q.size(3), args.value_width = value_width;
  args.q_batch = q.stride(0), args.q_head = q.stride(1), args.q_row = q.stride(2), args.q_column = q.stride(3);
  args.k_batch = k.stride(0), args.k_head = k.stride(1), args.k_row = k.stride(2);
  args.v_batch = v.stride(0), args.v_head = v.stride(1), args.v_row = v.stride(2);
  if (mask) {
    args.mask = static_cast<const uint8_t*>(mask->const_data_ptr());
    args.mask_batch = mask->size(0) == 1 ? 0 : mask->stride(0), args.mask_row = mask->stride(2), args.mask_column = mask->stride(3);
  }
  args.causal = causal, args.scaling = (float)scaling, args.softcap = softcap ? (float)*softcap : 0.f;

  const neap::Kernels& kernels = neap::kernels();
  const int64_t group = heads / kv_heads, tile_queries = std::max<int64_t>(1, neap::kQueryRows / group);
  const int64_t items = batch * kv_heads * ((queries + tile_queries - 1) / tile_queries), blocks = (kv_length + neap::kKeyBlock - 1) / neap::kKeyBlock;
  const int64_t scratch = kernels.attention_scratch(args);
  const double flops = (double)batch * heads * queries * kv_length * (args.width + value_width);
  if (items >= 4 * (int64_t)torch::stable::get_num_threads() || blocks < 2) {
    parallel(items, flops, [&](int64_t b, int64_t e) { kernels.attention(args, thread_scratch(scratch), b, e); });
    return out;
  }
  const int64_t padded_width = (value_width + neap::kPanel - 1) / neap::kPanel * neap::kPanel;
  Tensor partials = empty({items, blocks, tile_queries * group, neap::kPanel + padded_width});
  args.partials = mutable_floats(partials);
  parallel(items * blocks, flops, [&](int64_t b, int64_t e) { kernels.attention_split(args, thread_scratch(scratch), b, e); });
  parallel(items, (double)partials.numel(), [&](int64_t b, int64_t e) { kernels.attention_join(args, thread_scratch(scratch), b, e); });
  return out;
}

std::string cpu_isa() { return neap::kernels().name; }

void set_cpu_isa(std::string name) {
  NEAP_CHECK(neap::select_kernels(name.c_str()), "set_cpu_isa: this machine or build has no '", name, "'; known are auto, portable, avx2, avx512");
}

}  // namespace

STABLE_TORCH_LIBRARY(neap, m) {
  m.def("pack_linear(Tensor weight) -> Tensor");
  m.def("packed_linear(Tensor x, Tensor packed, SymInt out_features, Tensor? bias=None) -> Tensor");
  m.def("packed_gated_linear(Tensor x, Tensor packed, SymInt out_features, str activation, Tensor? bias=None) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps, float weight_offset=0.0) -> Tensor");
  m.def("rotary(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor, Tensor)");
  m.def(
      "slot_attention(Tensor q, Tensor k, Tensor v, SymInt kv_length, Tensor? mask, bool causal, float scaling, "
      "float? softcap=None) -> Tensor");
  m.def("cpu_isa() -> str");
  m.def("set_cpu_isa(str name) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(neap, CPU, m) {
  m.impl("pack_linear", TORCH_BOX(&pack_linear));
  m.impl("packed_linear", TORCH_BOX(&packed_linear));
  m.impl("packed_gated_linear", TORCH_BOX(&packed_gated_linear));
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("rotary", TORCH_BOX(&rotary));
  m.impl("slot_attention", TORCH_BOX(&slot_attention));
}

STABLE_TORCH_LIBRARY_IMPL(neap, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&cpu_isa));
  m.impl("set_cpu_isa", TORCH_BOX(&set_cpu_isa));
}
