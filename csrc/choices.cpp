// The ops that choose a token per row: greedily, or at a uniform number.
#include "device.h"
#include "team.h"

namespace neap::binding {

namespace {

Tensor choose(const char* op, const char* name, const Tensor& scores, const Tensor* uniforms) {
  const Call call(op, scores);
  call.rows(name, scores, {-1, -1});
  const bool is_double = scores.scalar_type() == ScalarType::Double;
  ChoiceArgs args{
      .scores = scores.const_data_ptr(),
      .type = is_double ? kWeights64 : (Weighting)call.dtype(name, scores),
      .rows = scores.size(0),
      .vocabulary = scores.size(1),
      .stride = scores.stride(0),
  };
  NEAP_CHECK(args.rows == 0 || args.vocabulary > 0, op, ": ", name, " have no columns");
  if (uniforms) {
    call.contiguous("uniforms", *uniforms, {args.rows});
    NEAP_CHECK(uniforms->scalar_type() == ScalarType::Double, op, ": uniforms must be float64");
    args.uniforms = static_cast<const double*>(uniforms->const_data_ptr());
  }
  Tensor choices = call.empty({args.rows}, aoti_torch_dtype_int64());
  if (args.rows == 0) return choices;
  args.choices = mutable_integers(choices);
  if (call.on_cpu()) {
    parallel(args.rows, (double)args.rows * args.vocabulary,
             [&](int64_t b, int64_t e) { neap::kernels().choose(args, b, e); });
  } else {
    const int64_t bytes = args.rows * choice_pieces(args.vocabulary) * (int64_t)sizeof(ChoicePart);
    Tensor parts = call.empty({bytes / 8}, aoti_torch_dtype_int64());
    args.parts = static_cast<ChoicePart*>(parts.mutable_data_ptr());
    call.on_gpu([&](void* stream) { return launch_choose(args, stream); });
  }
  return choices;
}

Tensor choose_greedy(Tensor logits) { return choose("choose_greedy", "logits", logits, nullptr); }

Tensor choose_sampled(Tensor probabilities, Tensor uniforms) {
  return choose("choose_sampled", "probabilities", probabilities, &uniforms);
}

}  // namespace
}  // namespace neap::binding

STABLE_TORCH_LIBRARY_FRAGMENT(neap, m) {
  m.def("choose_greedy(Tensor logits) -> Tensor");
  m.def("choose_sampled(Tensor probabilities, Tensor uniforms) -> Tensor");
}

#define NEAP_REGISTER(device)                             \
  STABLE_TORCH_LIBRARY_IMPL(neap, device, m) {            \
    using namespace neap::binding;                        \
    m.impl("choose_greedy", TORCH_BOX(&choose_greedy));   \
    m.impl("choose_sampled", TORCH_BOX(&choose_sampled)); \
  }
NEAP_REGISTER(CPU)
#if defined(NEAP_WITH_CUDA)
NEAP_REGISTER(CUDA)
#endif
