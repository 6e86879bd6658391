// The table of kernels of one instruction set. Compiled once per set, with that set's flags: see shared/ops/build.py.
#include "../include/attention.h"
#include "../include/choose.h"
#include "../include/draft_top.h"
#include "../include/experts.h"
#include "../include/norm.h"
#include "../include/linear.h"
#include "../include/place.h"
#include "../include/route.h"
#include "../include/rowwise.h"

namespace neap::NEAP_ISA {

namespace {

template <bool kBlocks>
constexpr Kernels table_of(const char* name) {
  return {
      .name = name,
      .dequantise = dequantise,
      .linear_items = linear_items,
      .linear = linear<kBlocks>,
      .row_norm = row_norm,
      .activate = activate_numbers,
      .rotary = rotary,
      .place = place,
      .round_row = round_row,
      .attention_scratch = attention_scratch,
      .attention = attention,
      .attention_split = attention_split,
      .attention_join = attention_join,
      .choose_experts = choose_experts,
      .sum_experts = sum_experts,
      .dot_rows = kDotRows,
      .row_dots = row_dots,
      .norm = norm,
      .draft_blocks = draft_blocks,
      .logit_blocks = logit_blocks,
      .draft_join = draft_join,
      .route_finish = route_finish,
      .choose = choose,
  };
}

}  // namespace

const Kernels& table() {
  static constexpr Kernels kernels = table_of<kByBlocks>(NEAP_STRINGIFY(NEAP_ISA));
  return kernels;
}

#if defined(NEAP_AVX512VNNI)
// The same with the matrix unit, for processors that have one.
const Kernels& amx_table() {
  static constexpr Kernels kernels = table_of<true>("amx");
  return kernels;
}
#endif

}  // namespace neap::NEAP_ISA
