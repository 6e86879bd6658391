// The launches of all kernels of CUDA. They share one translation unit because most of nvcc's time goes into reading
// CUDA's headers, once per unit and architecture.
#include <type_traits>

#include "../include/choose.cuh"
#include "../include/draft_top.cuh"
#include "../include/route.cuh"
#include "../include/slots.cuh"

namespace neap {

using namespace gpu;

namespace {

unsigned blocks_of(int64_t items, int64_t each) { return (unsigned)((items + each - 1) / each); }

}  // namespace

const char* cuda_error(int code) { return cudaGetErrorString((cudaError_t)code); }

int launch_draft_top(const DraftTopArgs& args, void* stream) {
  const int code = with_element(args.rows.dtype, [&](auto* w) {
    using W = std::remove_const_t<std::remove_pointer_t<decltype(w)>>;
    const bool eights =
        takes_eight((const W*)args.rows.data, args.rows.columns) && takes_eight(args.x, args.rows.columns);
    const dim3 grid(blocks_of(args.tokens, kTile), (unsigned)device_vocabulary_blocks(args.rows.rows));
    NEAP_LAUNCH(draft_block_kernel<W>, grid, kTopThreads, stream, args, eights);
    return (int)cudaGetLastError();
  });
  if (code) return code;
  NEAP_LAUNCH(draft_join_kernel, (unsigned)args.tokens, kTopThreads, stream, args);
  return (int)cudaGetLastError();
}

namespace {

template <class X, class W>
int launch_route_of(const RouteArgs& args, void* stream) {
  const bool eights =
      takes_eight((const W*)args.hidden.data, args.hidden.columns) && takes_eight((const X*)args.x, args.x_stride);
  const dim3 grid((unsigned)route_blocks(args.hidden.rows), (unsigned)route_tiles(args.tokens));
  NEAP_LAUNCH((route_kernel<X, W>), grid, kThreads, stream, args, eights);
  return (int)cudaGetLastError();
}

}  // namespace

int launch_route(const RouteArgs& args, void* stream) {
  return with_element(args.hidden.dtype, [&](auto* w) {
    using W = std::remove_const_t<std::remove_pointer_t<decltype(w)>>;
    return args.dtype == kFloat32 ? launch_route_of<float, W>(args, stream) : launch_route_of<W, W>(args, stream);
  });
}

int launch_choose(const ChoiceArgs& args, void* stream) {
  const unsigned rows = (unsigned)args.rows;
  switch (args.type) {
    case kWeights32: NEAP_LAUNCH(choose_kernel<float>, rows, kChoiceThreads, stream, args); break;
    case kWeights16: NEAP_LAUNCH(choose_kernel<Half>, rows, kChoiceThreads, stream, args); break;
    case kWeightsB16: NEAP_LAUNCH(choose_kernel<Bfloat>, rows, kChoiceThreads, stream, args); break;
    case kWeights64: NEAP_LAUNCH(choose_kernel<double>, rows, kChoiceThreads, stream, args); break;
  }
  return (int)cudaGetLastError();
}

int launch_begin_rows(const draft::SlotArgs& args, int drafter, void* stream) {
  NEAP_LAUNCH(begin_rows_kernel, 1, draft::kMostRows, stream, args, drafter);
  return (int)cudaGetLastError();
}

int launch_draft_place(const draft::SlotArgs& args, const draft::Proposers& proposers, int num_rows, int place,
                       void* stream) {
  NEAP_LAUNCH(draft_place_kernel, (unsigned)num_rows, kThreads, stream, args, proposers, place);
  return (int)cudaGetLastError();
}

int launch_plan_pass(const draft::SlotArgs& args, void* stream) {
  NEAP_LAUNCH(plan_pass_kernel, 1, draft::kMostRows, stream, args);
  return (int)cudaGetLastError();
}

int launch_accept_rows(const draft::SlotArgs& args, void* stream) {
  NEAP_LAUNCH(accept_rows_kernel, 1, draft::kMostRows, stream, args);
  return (int)cudaGetLastError();
}

}  // namespace neap
