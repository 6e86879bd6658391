// The C interface of slots, which `shared.ops.slots` calls, apart from what runs on the device: see csrc/slots.cpp.
#include "slots.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <functional>
#include <numeric>

#include "step.h"

using namespace neap::draft;

#define NEAP_API extern "C" __attribute__((visibility("default")))

// More tokens than an answer has, and how many rows ahead of those that are read the next ones are fetched.
constexpr int64_t kMostLeft = INT64_MAX, kAhead = 4;

// Bytes of a slot, a row and a control without corrections, and of the corrections of a kind.
NEAP_API void neap_slots_sizes(int64_t* sizes) {
  const int64_t found[] = {sizeof(Slot), sizeof(Row), offsetof(Control, corrections), sizeof(Control::corrections[0])};
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

// Writes what corrects the probabilities of each kind of request, or of none (null), as a control has it.
NEAP_API void neap_confidence_corrections(const Confidence* const* confidences, int64_t count,
                                          Correction* corrections) {
  for (int64_t kind = 0; kind < count; ++kind)
    for (int in_case = 0; in_case < kNumCases; ++in_case)
      for (int proposer = 0; proposer <= kFirstExit; ++proposer)
        *corrections++ = confidences[kind] && proposer < confidences[kind]->num_proposers()
                             ? confidences[kind]->correction((Case)in_case, proposer)
                             : Correction{};
}

NEAP_API double neap_uniform_at(uint64_t seed, uint64_t position) { return uniform_at(seed, position); }

// Reads the rows of a step, but for those without a confidence (null), which gets what has been shown of the drafts.
// `numbers` [count, 4]: tokens before the step, new ones, drafts that were verified, and tokens left. One row after the
// other, `tokens`: the new ones, and `makers`: their proposers, kFirstExit + 1 for the full model. `reaches` [count,
// kPlaces]: of all drafts, and 0 where there is none. `drafts` [num_groups, 2, kFirstExit + 1]: the verified and
// the accepted drafts of each proposer, by the group of a row. Returns the least number of tokens left, 0 if a row is
// not used.
NEAP_API int64_t neap_rows_read(Confidence* const* confidences, const Row* rows, int64_t count, const int32_t* groups,
                                int64_t num_groups, int64_t* numbers, int32_t* tokens, int32_t* makers, double* reaches,
                                int64_t* drafts) {
  int64_t least = count ? kMostLeft : 0;
  std::fill_n(numbers, 4 * count, 0);
  std::fill_n(reaches, kPlaces * count, 0.0);
  std::fill_n(drafts, 2 * (kFirstExit + 1) * num_groups, 0);
  for (int64_t at = 0; at < count; ++at, numbers += 4, reaches += kPlaces) {
    Confidence* confidence = confidences[at];
    if (at + kAhead < count)  // the device has written them, so no cache has them
      for (const char* line = (const char*)(rows + at + kAhead); line < (const char*)rows[at + kAhead].said; line += 64)
        __builtin_prefetch(line);
    if (!confidence) {
      least = 0;
      continue;
    }
    const Row& row = rows[at];
    least = std::min<int64_t>(least, row.num_left);
    numbers[0] = row.num_tokens, numbers[1] = row.num_new, numbers[2] = row.num_verified, numbers[3] = row.num_left;
    std::copy_n(row.reaches, row.num_drafted, reaches);
    const auto drafted_by = [&](int place) { return row.said[place].drafts[row.said[place].chosen].proposer; };
    int64_t* of_group = drafts + groups[at] * 2 * (kFirstExit + 1);
    for (int place = 0; place < row.num_verified; ++place) ++of_group[drafted_by(place)];
    for (int place = 0; place < row.num_new; ++place) {
      const int32_t token = *tokens++ = row.choices[place];
      const int maker = *makers++ = place == row.num_new - 1 ? kFirstExit + 1 : drafted_by(place);
      if (maker <= kFirstExit) ++of_group[kFirstExit + 1 + maker];
      if (place < row.num_drafted) confidence->record(row.said[place].drafts, row.said[place].count, token);
    }
    for (int exit = kFirstExit; row.num_new && exit < confidence->num_proposers(); ++exit)
      confidence->record_unasked(exit);
  }
  return least;
}
// What drafts have been worth (see shared/engine/ahead/worth.py): `gains` [num_points] at multiples of `step` drafts of
// each of `num_rows` requests. What was there before keeps a share of `decay`. `reaches` [count] are overwritten.
NEAP_API void neap_worth_record(double* reaches, int64_t count, int64_t num_rows, double step, double decay,
                                double* gains, int64_t num_points) {
  std::sort(reaches, reaches + count, std::greater<>());
  std::partial_sum(reaches, reaches + count, reaches);
  const auto sum = [&](int64_t first) { return first ? reaches[first - 1] : 0.0; };
  for (int64_t point = 0; point < num_points; ++point) {
    const double place = std::min((double)(point * num_rows) * step, (double)count);
    const auto low = (int64_t)place;
    const double found = sum(low) + (sum(std::min(low + 1, count)) - sum(low)) * (place - (double)low);
    gains[point] = decay * gains[point] + found / (double)num_rows;
  }
}
