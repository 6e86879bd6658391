// The C interface of slots, which `shared.ops.slots` calls. Arrays are the caller's. On a GPU the functions launch
// kernels on a stream and do not wait; they return 0 or a CUDA error.
#include "slots.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "step.h"

using namespace neap::draft;

#define NEAP_API extern "C" __attribute__((visibility("default")))

namespace {

struct Alone {
  static constexpr int rank = 0, size = 1;
  bool* flags;
  void wait() const {}
  int sum(int number) const { return number; }
  int most(int number) const { return number; }
};

}  // namespace

#if defined(NEAP_WITH_CUDA)
#define NEAP_ON_GPU(launch) \
  if (stream) return neap::launch
#else
#define NEAP_ON_GPU(launch) (void)stream
#endif

// Bytes of a slot, a row and a control without ratios, and of the ratios of a row.
NEAP_API void neap_slots_sizes(int64_t* sizes) {
  const int64_t found[] = {sizeof(Slot), sizeof(Row), offsetof(Control, ratios), sizeof(Control::ratios[0]),
                           offsetof(Control, others)};
  std::memcpy(sizes, found, sizeof found);
}

// `stream`: of a GPU, with its address in memory; null on a CPU.
NEAP_API int neap_slots_begin(const SlotArgs* args, int64_t num_rows, void* const* stream) {
  NEAP_ON_GPU(launch_begin_rows(*args, *stream));
  for (int row = 0; row < num_rows; ++row) begin_row(*args, row);
  return 0;
}
NEAP_API int neap_slots_draft(const SlotArgs* args, const Proposers* proposers, int64_t num_rows, int64_t place,
                              void* const* stream) {
  NEAP_ON_GPU(launch_draft_place(*args, *proposers, (int)num_rows, (int)place, *stream));
  bool flag;
  for (int row = 0; row < num_rows; ++row) draft_place(Alone{&flag}, *args, *proposers, row, (int)place);
  return 0;
}
NEAP_API int neap_slots_plan(const SlotArgs* args, void* const* stream) {
  NEAP_ON_GPU(launch_plan_pass(*args, *stream));
  int16_t above[kMostRows], equal[kMostRows];
  plan_pass(Alone{nullptr}, *args, above, equal);
  return 0;
}
NEAP_API int neap_slots_accept(const SlotArgs* args, void* const* stream) {
  NEAP_ON_GPU(launch_accept_rows(*args, *stream));
  for (int row = 0; row < kMostRows; ++row) accept_row(*args, row);
  return 0;
}

// What drafts for the rows of a router: its own tables and the server's learned one, whose arrays lie on the device.
// `keys` .. `shares`: of each order, or null.
NEAP_API Proposers* neap_proposers_new(const Ladder* ladder, const uint32_t* const* keys, const uint32_t* const* tokens,
                                       const uint8_t* const* counts, const uint8_t* const* shares,
                                       const LearnedEntry* learned, int64_t num_sets) {
  auto* made = new Proposers{*ladder, {learned, num_sets}, nullptr, nullptr};
  for (int order = 0; keys && order < kMaxOrder; ++order)
    made->tables.orders[order] = {keys[order], tokens[order], counts[order], shares[order], ladder->orders[order].size};
  return made;
}
NEAP_API void neap_proposers_free(Proposers* proposers) { delete proposers; }
NEAP_API void neap_proposers_exit(Proposers* proposers, const int64_t* tokens, const float* probabilities) {
  proposers->exit_tokens = tokens;
  proposers->exit_probabilities = probabilities;
}

// The entries of a learned table [.. , 16 bytes]: how many, and where.
NEAP_API int64_t neap_learned_view(const LearnedNgrams* learned, const LearnedEntry** entries) {
  *entries = learned->view().entries;
  return learned->view().num_sets * kSetEntries;
}
// The numbers of the entries that have changed since the last call, at most `most` of them; or `most` + 1, if more have.
NEAP_API int64_t neap_learned_changed(LearnedNgrams* learned, int64_t* changed, int64_t most) {
  const std::vector<int64_t> found = learned->changed();
  if ((int64_t)found.size() > most) return most + 1;
  std::copy(found.begin(), found.end(), changed);
  return (int64_t)found.size();
}

// Writes what corrects the probabilities of a kind of request, as a control has it.
NEAP_API void neap_confidence_ratios(const Confidence* confidence, double* ratios) {
  for (int in_case = 0; in_case < kNumCases; ++in_case)
    for (int proposer = 0; proposer <= kFirstExit; ++proposer)
      ratios[in_case * (kFirstExit + 1) + proposer] =
          proposer < confidence->num_proposers() ? confidence->ratio((Case)in_case, proposer) : 1.0;
}

// Reads a row. `numbers`: tokens before the step, of the chain, verified and new ones; `choices`: the new ones;
// `proposers`: of the drafts that were verified; `reaches`: of all drafts. The sequence's chain becomes the row's, so
// that it can be recorded.
NEAP_API void neap_sequence_take(Sequence* sequence, const Row* row, int64_t* numbers, int32_t* choices,
                                 int32_t* proposers, double* reaches) {
  const int64_t found[] = {row->num_tokens, row->num_drafted, row->num_verified, row->num_new};
  std::copy_n(found, 4, numbers);
  std::copy_n(row->choices, row->num_new, choices);
  std::copy_n(row->reaches, row->num_drafted, reaches);
  sequence->chain = {};
  for (int place = 0; place < row->num_drafted; ++place) {
    const Said& said = row->said[place];
    const Draft& draft = said.drafts[said.chosen];
    if (place < row->num_verified) proposers[place] = draft.proposer;
    const double before = place ? row->reaches[place - 1] : 1.0;
    sequence->chain.links.push_back(
        {draft, row->reaches[place] / before, {said.drafts, said.drafts + said.count}, {}});
  }
}
