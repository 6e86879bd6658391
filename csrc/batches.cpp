// The ops on a batch: gathering and scattering rows, and verifying drafts.
#include <cstring>
#include <tuple>

#include "device.h"

namespace neap::binding {

namespace {

// Item: a row.
void copy_rows(const RowCopyArgs& args, int64_t begin, int64_t end) {
  const int64_t count = args.count ? *args.count : args.rows;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t at = args.index[i];
    const bool used = i < count && at >= 0 && at < args.limit;
    if (used)
      std::memcpy(args.to + (args.scatter ? at : i) * args.to_stride, args.from + (args.scatter ? i : at) * args.from_stride, args.row_bytes);
    else if (!args.scatter)
      std::memset(args.to + i * args.to_stride, 0, args.row_bytes);
  }
}

void run(const Call& call, const RowCopyArgs& args) {
  if (args.rows == 0 || args.row_bytes == 0) return;
  if (!call.on_cpu()) return call.on_gpu([&](void* stream) { return launch_row_copy(args, stream); });
  // Several rows of a scatter may have the same target. On one thread the last of them always wins.
  if (args.scatter) return copy_rows(args, 0, args.rows);
  parallel(args.rows, (double)args.rows * args.row_bytes, [&](int64_t b, int64_t e) { copy_rows(args, b, e); });
}

RowCopyArgs row_copy(const Call& call, const Tensor& indexed, const Tensor& index, const std::optional<Tensor>& count) {
  RowCopyArgs args{};
  args.index = call.integers("index", index, {-1});
  if (count) args.count = call.integers("count", *count, {1});
  args.rows = index.size(0), args.limit = indexed.size(0), args.row_bytes = indexed.size(1) * (int64_t)indexed.element_size();
  return args;
}

Tensor gather_rows(Tensor x, Tensor index, std::optional<Tensor> count) {
  const Call call("gather_rows", x);
  call.rows("x", x, {-1, -1});
  RowCopyArgs args = row_copy(call, x, index, count);
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  Tensor out = call.empty({args.rows, x.size(1)}, dtype);
  args.from = static_cast<const char*>(x.const_data_ptr()), args.to = static_cast<char*>(out.mutable_data_ptr());
  args.from_stride = x.stride(0) * (int64_t)x.element_size(), args.to_stride = args.row_bytes;
  run(call, args);
  return out;
}

void scatter_rows(Tensor out, Tensor rows, Tensor index, std::optional<Tensor> count) {
  const Call call("scatter_rows", out);
  call.rows("out", out, {-1, -1});
  call.rows("rows", rows, {index.size(0), out.size(1)});
  NEAP_CHECK(out.scalar_type() == rows.scalar_type(), "scatter_rows: out and rows differ in dtype");
  RowCopyArgs args = row_copy(call, out, index, count);
  args.from = static_cast<const char*>(rows.const_data_ptr()), args.to = static_cast<char*>(out.mutable_data_ptr()), args.scatter = true;
  args.from_stride = rows.stride(0) * (int64_t)rows.element_size(), args.to_stride = out.stride(0) * (int64_t)out.element_size();
  run(call, args);
}

// Counts the accepted drafts of each sequence. A sequence's last row has no draft to test.
void accept(const VerifyArgs& args) {
  for (int64_t s = 0; s < args.sequences; ++s) {
    const int64_t begin = args.starts[s], end = args.starts[s + 1];
    int64_t row = begin;
    while (row + 1 < end && args.choices[row] == args.drafts[row]) ++row;
    args.accepted[s] = row - begin;
  }
}

std::tuple<Tensor, Tensor> run_verify(const Call& call, const Tensor& scores, const Tensor& drafts, const Tensor& starts, const Tensor* uniforms,
                                      const Tensor* proposed) {
  call.rows("scores", scores, {-1, -1});
  VerifyArgs args{};
  args.rows = scores.size(0), args.vocabulary = scores.size(1), args.stride = scores.stride(0), args.scores = scores.const_data_ptr();
  args.type = scores.scalar_type() == ScalarType::Double ? kWeights64 : (Weighting)call.dtype("scores", scores);
  args.drafts = call.integers("drafts", drafts, {args.rows}), args.starts = call.integers("starts", starts, {-1});
  NEAP_CHECK(starts.size(0) >= 1, "verify: starts is empty");
  NEAP_CHECK(args.rows == 0 || args.vocabulary > 0, "verify: scores have no columns");
  args.sequences = starts.size(0) - 1;
  if (uniforms) {
    call.contiguous("uniforms", *uniforms, {args.rows});
    NEAP_CHECK(uniforms->scalar_type() == ScalarType::Double, "verify: uniforms must be float64");
    args.uniforms = static_cast<const double*>(uniforms->const_data_ptr());
  }
  if (proposed) {
    call.rows("proposed", *proposed, {args.rows, args.vocabulary});
    NEAP_CHECK(proposed->scalar_type() == scores.scalar_type(), "verify: proposed and scores differ in dtype");
    args.proposed = proposed->const_data_ptr(), args.proposed_stride = proposed->stride(0);
  }
  Tensor choices = call.empty({args.rows}, aoti_torch_dtype_int64()), accepted = call.empty({args.sequences}, aoti_torch_dtype_int64());
  args.choices = static_cast<int64_t*>(choices.mutable_data_ptr()), args.accepted = static_cast<int64_t*>(accepted.mutable_data_ptr());
  if (!call.on_cpu()) {
    call.on_gpu([&](void* stream) { return launch_verify(args, stream); });
    return {choices, accepted};
  }
  for (int64_t s = 0; s <= args.sequences; ++s)
    NEAP_CHECK(args.starts[s] >= (s ? args.starts[s - 1] : 0) && args.starts[s] <= args.rows, "verify: starts must ascend within the ", args.rows, " rows");
  parallel(args.rows, (double)args.rows * args.vocabulary, [&](int64_t b, int64_t e) { neap::kernels().verify(args, b, e); });
  accept(args);
  return {choices, accepted};
}

std::tuple<Tensor, Tensor> verify_greedy(Tensor logits, Tensor drafts, Tensor starts) {
  return run_verify(Call("verify_greedy", logits), logits, drafts, starts, nullptr, nullptr);
}

std::tuple<Tensor, Tensor> verify_sampled(Tensor probabilities, Tensor drafts, Tensor starts, Tensor uniforms, std::optional<Tensor> proposed) {
  return run_verify(Call("verify_sampled", probabilities), probabilities, drafts, starts, &uniforms, proposed ? &*proposed : nullptr);
}

}  // namespace
}  // namespace neap::binding

STABLE_TORCH_LIBRARY_FRAGMENT(neap, m) {
  m.def("gather_rows(Tensor x, Tensor index, Tensor? count=None) -> Tensor");
  m.def("scatter_rows(Tensor(a!) out, Tensor rows, Tensor index, Tensor? count=None) -> ()");
  m.def("verify_greedy(Tensor logits, Tensor drafts, Tensor starts) -> (Tensor, Tensor)");
  m.def("verify_sampled(Tensor probabilities, Tensor drafts, Tensor starts, Tensor uniforms, Tensor? proposed=None) -> (Tensor, Tensor)");
}

#define NEAP_REGISTER(device)                                  \
  STABLE_TORCH_LIBRARY_IMPL(neap, device, m) {                 \
    using namespace neap::binding;                             \
    m.impl("gather_rows", TORCH_BOX(&gather_rows));            \
    m.impl("scatter_rows", TORCH_BOX(&scatter_rows));          \
    m.impl("verify_greedy", TORCH_BOX(&verify_greedy));        \
    m.impl("verify_sampled", TORCH_BOX(&verify_sampled));      \
  }
NEAP_REGISTER(CPU)
#if defined(NEAP_WITH_CUDA)
NEAP_REGISTER(CUDA)
#endif
