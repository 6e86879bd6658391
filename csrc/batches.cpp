// The ops on a batch: drafts verified.
#include <tuple>

#include "device.h"

namespace neap::binding {

namespace {

// Item: a sequence. Its last row tests nothing.
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
  m.def("verify_greedy(Tensor logits, Tensor drafts, Tensor starts) -> (Tensor, Tensor)");
  m.def("verify_sampled(Tensor probabilities, Tensor drafts, Tensor starts, Tensor uniforms, Tensor? proposed=None) -> (Tensor, Tensor)");
}

#define NEAP_REGISTER(device)                                  \
  STABLE_TORCH_LIBRARY_IMPL(neap, device, m) {                 \
    using namespace neap::binding;                             \
    m.impl("verify_greedy", TORCH_BOX(&verify_greedy));        \
    m.impl("verify_sampled", TORCH_BOX(&verify_sampled));      \
  }
NEAP_REGISTER(CPU)
#if defined(NEAP_WITH_CUDA)
NEAP_REGISTER(CUDA)
#endif
