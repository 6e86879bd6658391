// The table of kernels of one instruction set. Compiled once per set, with that set's flags: see shared/ops/build.py.
#include "../include/attention.h"
#include "../include/choose.h"
#include "../include/draft_top.h"
#include "../include/norm.h"
#include "../include/linear.h"
#include "../include/place.h"
#include "../include/route.h"
#include "../include/rowwise.h"

namespace neap::NEAP_ISA {

const Kernels& table() {
  static constexpr Kernels kernels = {
      NEAP_STRINGIFY(NEAP_ISA),
      widen,
      linear_items,
      linear,
      rms_norm,
      rotary,
      place,
      round_row,
      attention_scratch,
      attention,
      attention_split,
      attention_join,
      kDotRows,
      row_dots,
      norm,
      draft_blocks,
      logit_blocks,
      draft_join,
      route_finish,
      choose,
  };
  return kernels;
}

}  // namespace neap::NEAP_ISA
