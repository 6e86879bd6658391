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

unsigned blocks_of(int64_t items, int64_t each) { return (unsigned)ceil_div(items, each); }

}  // namespace

const char* cuda_error(int code) { return cudaGetErrorString((cudaError_t)code); }

namespace {

template <class W, int kTiles, bool kMatrix>
void launch_draft_blocks(const DraftTopArgs& args, bool eights, void* stream) {
  const dim3 grid(blocks_of(args.tokens, kTiles * kTile), (unsigned)vocabulary_blocks(args.rows.rows));
  NEAP_LAUNCH((draft_block_kernel<W, kTiles, kMatrix>), grid, kTopThreads, stream, args, eights);
}

}  // namespace

int launch_draft_top(const DraftTopArgs& args, void* stream) {
  const int code = with_element(args.rows.dtype, [&](auto* w) {
    using W = std::remove_const_t<std::remove_pointer_t<decltype(w)>>;
    const bool eights =
        takes_eight((const W*)args.rows.data, args.rows.columns) && takes_eight(args.x, args.rows.columns);
    if constexpr (std::is_same_v<W, Half>) {
      const auto launch = !eights || args.rows.rows < kTopRows ? launch_draft_blocks<Half, 1, false>
                          : args.tokens <= kTile               ? launch_draft_blocks<Half, 1, true>
                                                               : launch_draft_blocks<Half, kMostTiles, true>;
      launch(args, eights, stream);
    } else {
      launch_draft_blocks<W, 1, false>(args, eights, stream);
    }
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
  if (args.tokens == 1) NEAP_LAUNCH((route_kernel<X, W, 1>), grid, kRouteThreads, stream, args, eights);
  else NEAP_LAUNCH((route_kernel<X, W, kTile>), grid, kRouteThreads, stream, args, eights);
  return (int)cudaGetLastError();
}

}  // namespace

int launch_route(const RouteArgs& args, void* stream) {
  return with_element(args.hidden.dtype, [&](auto* w) {
    using W = std::remove_const_t<std::remove_pointer_t<decltype(w)>>;
    return args.dtype == kFloat32 ? launch_route_of<float, W>(args, stream) : launch_route_of<W, W>(args, stream);
  });
}

namespace {

template <class E>
void launch_choose_of(const ChoiceArgs& args, void* stream) {
  NEAP_LAUNCH(choose_piece_kernel<E>, (unsigned)(args.rows * choice_pieces(args.vocabulary)), kChoiceThreads, stream,
              args);
  NEAP_LAUNCH(choose_kernel<E>, (unsigned)args.rows, kChoiceThreads, stream, args);
}

}  // namespace

int launch_choose(const ChoiceArgs& args, void* stream) {
  switch (args.type) {
    case kWeights32: launch_choose_of<float>(args, stream); break;
    case kWeights16: launch_choose_of<Half>(args, stream); break;
    case kWeightsB16: launch_choose_of<Bfloat>(args, stream); break;
    case kWeights64: launch_choose_of<double>(args, stream); break;
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
