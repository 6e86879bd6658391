// The C interface of slots, which `shared.ops.slots` calls, apart from what runs on the device: see csrc/slots.cpp.
#include "slots.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "step.h"

using namespace neap::draft;

#define NEAP_API extern "C" __attribute__((visibility("default")))

// Bytes of a slot, a row and a control without ratios, and of the ratios of a row.
NEAP_API void neap_slots_sizes(int64_t* sizes) {
  const int64_t found[] = {sizeof(Slot), sizeof(Row), offsetof(Control, ratios), sizeof(Control::ratios[0])};
  std::memcpy(sizes, found, sizeof found);
}

// What drafts for the rows of a router: its own tables and the server's learned one, whose arrays lie on the device.
// `keys` .. `shares`: of each order, or null. `exit_tokens`, `exit_probabilities`: of its head, or null.
NEAP_API Proposers* neap_proposers_new(const Ladder* ladder, const uint32_t* const* keys, const uint32_t* const* tokens,
                                       const uint8_t* const* counts, const uint8_t* const* shares,
                                       const LearnedEntry* learned, int64_t num_sets, int64_t number,
                                       const int64_t* exit_tokens, const float* exit_probabilities) {
  auto* made = new Proposers{*ladder, {learned, num_sets}, (int32_t)number, exit_tokens, exit_probabilities};
  for (int order = 0; keys && order < kMaxOrder; ++order)
    made->tables.orders[order] = {keys[order], tokens[order], counts[order], shares[order], ladder->orders[order].size};
  return made;
}
NEAP_API void neap_proposers_free(Proposers* proposers) { delete proposers; }

// The entries of a learned table [.. , 16 bytes]: how many, and where.
NEAP_API int64_t neap_learned_view(const LearnedNgrams* learned, const LearnedEntry** entries) {
  *entries = learned->view().entries;
  return learned->view().num_sets * kSetEntries;
}
// The numbers of the entries that have changed since the last call, at most `most`; -1: more have.
NEAP_API int64_t neap_learned_changed(LearnedNgrams* learned, int64_t* changed, int64_t most) {
  const auto found = learned->changed();
  if (!found || (int64_t)found->size() > most) return -1;
  std::copy(found->begin(), found->end(), changed);
  return (int64_t)found->size();
}

// Writes what corrects the probabilities of each request's kind, or of none (null), as a control has it.
NEAP_API void neap_confidence_ratios(const Confidence* const* confidences, int64_t count, double* ratios) {
  for (int64_t row = 0; row < count; ++row, ratios += kNumRatios) {
    const Confidence* confidence = confidences[row];
    for (int in_case = 0; in_case < kNumCases; ++in_case)
      for (int proposer = 0; proposer <= kFirstExit; ++proposer)
        ratios[in_case * (kFirstExit + 1) + proposer] =
            confidence && proposer < confidence->num_proposers() ? confidence->ratio((Case)in_case, proposer) : 1.0;
  }
}

NEAP_API double neap_uniform_at(uint64_t seed, uint64_t position) { return uniform_at(seed, position); }

// Reads the rows of a step, but for those without a sequence (null). `numbers` [count, 4]: tokens before the step, of
// the chain, verified and new ones; `choices` [count, kPlaces + 1]: the new ones; `proposers` [count, kPlaces]: of the
// drafts that were verified; `reaches` [count, kPlaces]: of all drafts. Where a row has `lengths` tokens before the
// step and at least one new one, the sequence records what has been shown of its drafts, and gets the tokens.
NEAP_API void neap_sequences_take(Sequence* const* sequences, const Row* rows, const int64_t* lengths, int64_t count,
                                  int64_t* numbers, int32_t* choices, int32_t* proposers, double* reaches) {
  for (int64_t at = 0; at < count; ++at) {
    const Row& row = rows[at];
    Sequence* sequence = sequences[at];
    if (!sequence) continue;
    const int64_t found[] = {row.num_tokens, row.num_drafted, row.num_verified, row.num_new};
    std::copy_n(found, 4, numbers + 4 * at);
    std::copy_n(row.choices, row.num_new, choices + (kPlaces + 1) * at);
    std::copy_n(row.reaches, row.num_drafted, reaches + kPlaces * at);
    sequence->chain = {};
    for (int place = 0; place < row.num_drafted; ++place) {
      const Said& said = row.said[place];
      const Draft& draft = said.drafts[said.chosen];
      if (place < row.num_verified) proposers[kPlaces * at + place] = draft.proposer;
      const double before = place ? row.reaches[place - 1] : 1.0;
      sequence->chain.links.push_back(
          {draft, row.reaches[place] / before, {said.drafts, said.drafts + said.count}, {}});
    }
    if (row.num_tokens != lengths[at] || row.num_new == 0) continue;
    sequence->record(row.choices, row.num_new);
    sequence->append(row.choices, row.num_new - (row.choices[row.num_new - 1] < 0));
  }
}
