// The ops of a step whose requests live on the device: see draft/slots.h. Where everything lies stands in a `SlotArgs`,
// whose address they are given, so that a recorded step reads the same places again.
#include "draft/slots.h"

#include "device.h"

namespace neap::binding {

namespace {

using draft::kMostRows;
using draft::Proposers;
using draft::SlotArgs;

struct Alone {
  static constexpr int rank = 0, size = 1;
  bool* flags;
  void wait() const {}
  int sum(int number) const { return number; }
  int most(int number) const { return number; }
};

const SlotArgs& slot_args(int64_t address) { return *reinterpret_cast<const SlotArgs*>(address); }

// `rows`: any tensor of the step, which says where it runs.
void slots_begin(Tensor rows, int64_t address, int64_t drafter) {
  const Call call("slots_begin", rows);
  const SlotArgs& args = slot_args(address);
  if (!call.on_cpu()) return call.on_gpu([&](void* stream) { return launch_begin_rows(args, (int)drafter, stream); });
  for (int row = 0; row < kMostRows; ++row) begin_row(args, row, (int32_t)drafter);
}

void slots_draft(Tensor rows, int64_t address, int64_t proposers, int64_t num_rows, int64_t place) {
  const Call call("slots_draft", rows);
  const SlotArgs& args = slot_args(address);
  const auto& drafting = *reinterpret_cast<const Proposers*>(proposers);
  if (!call.on_cpu())
    return call.on_gpu(
        [&](void* stream) { return launch_draft_place(args, drafting, (int)num_rows, (int)place, stream); });
  bool flag;
  for (int row = 0; row < num_rows; ++row) draft_place(Alone{&flag}, args, drafting, row, (int)place);
}

void slots_plan(Tensor rows, int64_t address) {
  const Call call("slots_plan", rows);
  const SlotArgs& args = slot_args(address);
  if (!call.on_cpu()) return call.on_gpu([&](void* stream) { return launch_plan_pass(args, stream); });
  int16_t above[kMostRows], equal[kMostRows];
  plan_pass(Alone{nullptr}, args, above, equal);
}

void slots_accept(Tensor rows, int64_t address) {
  const Call call("slots_accept", rows);
  const SlotArgs& args = slot_args(address);
  if (!call.on_cpu()) return call.on_gpu([&](void* stream) { return launch_accept_rows(args, stream); });
  for (int row = 0; row < kMostRows; ++row) accept_row(args, row);
}

}  // namespace
}  // namespace neap::binding

STABLE_TORCH_LIBRARY_FRAGMENT(neap, m) {
  m.def("slots_begin(Tensor(a!) rows, int args, int drafter) -> ()");
  m.def("slots_draft(Tensor(a!) rows, int args, int proposers, int num_rows, int place) -> ()");
  m.def("slots_plan(Tensor(a!) rows, int args) -> ()");
  m.def("slots_accept(Tensor(a!) rows, int args) -> ()");
}

#define NEAP_REGISTER(device)                         \
  STABLE_TORCH_LIBRARY_IMPL(neap, device, m) {        \
    using namespace neap::binding;                    \
    m.impl("slots_begin", TORCH_BOX(&slots_begin));   \
    m.impl("slots_draft", TORCH_BOX(&slots_draft));   \
    m.impl("slots_plan", TORCH_BOX(&slots_plan));     \
    m.impl("slots_accept", TORCH_BOX(&slots_accept)); \
  }
NEAP_REGISTER(CPU)
#if defined(NEAP_WITH_CUDA)
NEAP_REGISTER(CUDA)
#endif
