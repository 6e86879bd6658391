// One instruction set's table. Compiled once per set, with that set's flags: see shared/ops/build.py.
#include "../include/attention.h"
#include "../include/linear.h"
#include "../include/rowwise.h"

namespace neap::NEAP_ISA {

const Kernels& table() {
  static constexpr Kernels kernels = {
      NEAP_STRINGIFY(NEAP_ISA), pack, linear_items, linear, rms_norm, rotary,
      attention_scratch, attention, attention_split, attention_join,
  };
  return kernels;
}

}  // namespace neap::NEAP_ISA
