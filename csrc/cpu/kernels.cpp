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

const Kernels& table() {
  static constexpr Kernels kernels = {
      .name = NEAP_STRINGIFY(NEAP_ISA),
      .dequantise = dequantise,
      .linear_items = linear_items,
      .linear = linear,
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
  return kernels;
}

}  // namespace neap::NEAP_ISA
