// The launches of paged attention. In a file of their own, because they take as long to compile as all others.
#include <type_traits>

#include "../include/paged.cuh"

namespace neap {

using namespace gpu;

namespace {

template <class E>
void launch_paged_write(const PagedArgs& args, const PagedPlan& plan, cudaStream_t stream) {
  const uint64_t steps = (uint64_t)args.k | (uint64_t)args.v |
                         (uint64_t)(args.k_token | args.k_head | args.v_token | args.v_head) * sizeof(E);
  const dim3 grid((unsigned)args.tokens, 2);
  const int64_t num_tickets = plan.num_tickets(args.tokens);
  using Unit = std::conditional_t<sizeof(E) == 4, uint32_t, uint16_t>;
  if (plan.wide && steps % 16 == 0) NEAP_LAUNCH(paged_write_kernel<Sixteen>, grid, kThreads, stream, args, num_tickets);
  else NEAP_LAUNCH(paged_write_kernel<Unit>, grid, kThreads, stream, args, num_tickets);
}

template <class E, int kSize>
int launch_paged_of(const PagedArgs& args, const PagedPlan& plan, void* stream) {
  const dim3 grid((unsigned)args.tokens, (unsigned)plan.tiles, (unsigned)plan.shares);
  if (plan.heads == 1) {
    NEAP_LAUNCH((paged_attention_kernel<E, 1, kSize>), grid, kThreads, stream, args);
    return (int)cudaGetLastError();
  }
  // Only the combinations that paged_plan can return are compiled.
  if constexpr (kSize > 1)
    if (plan.heads == 4) {
      NEAP_LAUNCH((paged_attention_kernel<E, 4, kSize>), grid, kThreads, stream, args);
      return (int)cudaGetLastError();
    }
  if constexpr (kSize == 8)
    if (plan.heads == 8) {
      NEAP_LAUNCH((paged_attention_kernel<E, 8, kSize>), grid, kThreads, stream, args);
      return (int)cudaGetLastError();
    }
  return (int)cudaErrorInvalidValue;
}

}  // namespace

int launch_paged_attention(const PagedArgs& args, const PagedPlan& plan, void* stream) {
  return with_element(args.dtype, [&](auto* x) {
    using E = std::remove_const_t<std::remove_pointer_t<decltype(x)>>;
    launch_paged_write<E>(args, plan, (cudaStream_t)stream);
    if (const int code = (int)cudaGetLastError()) return code;
    return plan.wide ? launch_paged_of<E, 16 / sizeof(E)>(args, plan, stream)
                     : launch_paged_of<E, 1>(args, plan, stream);
  });
}

}  // namespace neap
