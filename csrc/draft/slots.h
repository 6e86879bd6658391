// Requests that live on the device: what a step drafts for them, which tokens its pass has, and what it accepts,
// without a word from the host. See shared/engine/ahead/slots.py.
//
// Each function is run by a team: the threads of a block on a GPU, one thread on a CPU. A team has `rank`, `size`,
// `wait()`, `most(number)` and `sum(number)` over its threads, and `flags`, one for each.
#pragma once
#include "known.h"
#include "rating.h"

namespace neap::draft {

// Drafts of a request in a step; tokens that end an answer; what is said of one place; and requests in a step.
inline constexpr int kPlaces = 8, kMostEnds = 8, kMostSaid = kMostSaidByTables + 1, kMostRows = 256;
// Rows of tokens, block tables, positions, seen positions and regimes: see `TokenBuffer` of shared.model.paged_pass.
inline constexpr int kTokenRows = 5;
// Chains whose drafts all survive with a lower probability are not drafted on.
inline constexpr double kLeastReach = 0.02;

// A request between steps.
struct Slot {
  int64_t num_tokens;  // of prompt and answer. No layer has run for the last one.
  int64_t num_left;    // of the answer
  uint64_t salt;       // of its client's part of the learned table
  int32_t is_open;     // 0: its answer has ended
  int32_t has_states;  // whether the states of its last settled token are there
  int32_t num_ends;
  int32_t unused;
  int32_t ends[kMostEnds];
  double temperature;  // 0: greedy
  double least_share;  // tokens with less of the most probable token's probability are not drawn
  uint64_t seed;
};

struct Said {
  Draft drafts[kMostSaid];
  int32_t count, chosen;
};

// A request in a step: what was drafted, and what became of it. The host reads it.
struct Row {
  int64_t num_tokens;    // before the step
  int32_t num_drafted;   // places of the chain
  int32_t num_verified;  // of these, in the pass
  int32_t first;         // its first row of the pass
  int32_t num_new;       // tokens that became final; the last may be none (-1), where logits are not finite
  int32_t choices[kPlaces + 1];
  int32_t drafts[kPlaces];
  int32_t num_left;         // of the answer after the step; 0: it has ended
  double reaches[kPlaces];  // the probability that a draft and all before it are right
  Said said[kPlaces];
};

inline constexpr int kNumCorrections = kNumCases * (kFirstExit + 1);

// What the host tells a step. Only the corrections of the kinds that its requests are of are sent.
struct Control {
  int32_t num_rows;    // requests
  int32_t num_others;  // tokens of prompts; they are the first of the pass
  int32_t num_tokens;  // of the pass, with its padding
  int32_t unused;
  int32_t slots[kMostRows];
  int32_t drafters[kMostRows];   // by number; -1: nothing is drafted
  int32_t kinds[kMostRows];      // whose corrections count for them
  int32_t tables[kMostRows];     // the indices of their block tables
  int32_t others[3][kMostRows];  // their ids, block tables and positions
  Correction corrections[kMostRows][kNumCorrections];
};

// Where all of it lies.
struct SlotArgs {
  const Control* control;
  Slot* slots;
  int32_t* tokens;  // [slots, width]
  int64_t width;
  Row* rows;              // [kMostRows]
  int64_t* newest;        // [kMostRows] the last token of each chain
  int64_t* token_rows;    // [kTokenRows, num_tokens] of the pass
  int64_t* logit_rows;    // [kMostRows] the rows of the pass whose logits are read
  double* drawing;        // [3, kMostRows] temperature, least share and uniform number of each of these
  const int64_t* chosen;  // [kMostRows] the full model's choices at these
  int64_t* state_rows;    // [kMostRows] the row of the pass whose states a request keeps
  int64_t* state_slots;   // [kMostRows] and in which slot; `spare_slot` for none
  int64_t spare_slot;
};

// What drafts for all rows of one router, by its number. `exit_tokens`, `exit_probabilities` [kMostRows]: of its head,
// or null.
struct Proposers {
  Tables tables;
  LearnedView learned;
  int32_t number;
  const int64_t* exit_tokens;
  const float* exit_probabilities;
};

// The uniform number in [0, 1) of one position of a sequence, from the counter-based generator Philox 4x64-10 (Salmon
// et al., 2011), as NumPy's generator with this key and counter has it.
NEAP_BOTH inline double uniform_at(uint64_t seed, uint64_t position) {
  constexpr uint64_t kFirst = 0xD2E7470EE14C6C93, kSecond = 0xCA5A826395121157;
  const auto high = [](uint64_t a, uint64_t b) {
#if defined(__CUDA_ARCH__)
    return __umul64hi(a, b);
#else
    return (uint64_t)((unsigned __int128)a * b >> 64);
#endif
  };
  // NumPy counts before it draws.
  uint64_t counter[4] = {position + 1, position + 1 == 0, 0, 0}, key[2] = {seed, 0};
  for (int round = 0; round < 10; ++round) {
    const uint64_t next[4] = {high(kSecond, counter[2]) ^ counter[1] ^ key[0], kSecond * counter[2],
                              high(kFirst, counter[0]) ^ counter[3] ^ key[1], kFirst * counter[0]};
    for (int i = 0; i < 4; ++i) counter[i] = next[i];
    key[0] += 0x9E3779B97F4A7C15, key[1] += 0xBB67AE8584CAA73B;
  }
  return (double)(counter[0] >> 11) * 0x1p-53;
}

// How many of the tokens before `place` are those at the end of `tail`, at most `length`.
NEAP_BOTH inline int same_before(const int32_t* tokens, int64_t place, const int32_t* tail, int length) {
  int same = 0;
  while (same < length && same < place && tokens[place - 1 - same] == tail[length - 1 - same]) ++same;
  return same;
}

// As `PromptLookup::propose`, by reading all tokens. The answer is the first thread's.
template <class Team>
NEAP_BOTH inline Match find_match(const Team& team, const int32_t* tokens, int64_t count, const int32_t* tail,
                                  int length) {
  int longest = 0;
  for (int64_t place = 1 + team.rank; place < count; place += team.size) {
    const int same = same_before(tokens, place, tail, length);
    longest = same > longest ? same : longest;
  }
  longest = team.most(longest);
  if (longest == 0) return {};
  int32_t followers[kMaxOccurrences];
  int found = 0;
  for (int64_t end = count; end > 1; end -= team.size) {
    const int64_t place = end - 1 - team.rank;
    const bool is_match = place > 0 && same_before(tokens, place, tail, length) == longest;
    team.flags[team.rank] = is_match;
    if (!team.most(is_match)) continue;
    if (team.rank == 0)
      for (int other = 0; other < team.size && found < kMaxOccurrences; ++other)
        if (team.flags[other]) followers[found++] = tokens[end - 1 - other];
    if (team.most(found) == kMaxOccurrences) break;
  }
  return commonest(followers, found, longest);
}

// Begins the chain of one row, if this drafter is its.
NEAP_BOTH inline void begin_row(const SlotArgs& args, int row, int32_t drafter) {
  const bool is_used = row < args.control->num_rows && args.control->drafters[row] == drafter;
  const int32_t number = is_used ? args.control->slots[row] : (int32_t)args.spare_slot;
  args.state_slots[row] = number;
  // A head reads the embedding of every row, and the last token of an answer that has ended may be none.
  args.newest[row] = 0;
  if (!is_used) return;
  const Slot& slot = args.slots[number];
  if (slot.is_open) args.newest[row] = args.tokens[number * args.width + slot.num_tokens - 1];
  args.rows[row].num_tokens = slot.num_tokens;
  args.rows[row].num_drafted = 0;
}

// Drafts the token at one place of the chain of one row, if all places before it have one.
template <class Team>
NEAP_BOTH inline void draft_place(const Team& team, const SlotArgs& args, const Proposers& proposers, int row,
                                  int place) {
  const Control& control = *args.control;
  if (row >= control.num_rows || control.drafters[row] != proposers.number) return;
  const int32_t number = control.slots[row];
  const Slot& slot = args.slots[number];
  const int32_t* tokens = args.tokens + number * args.width;
  Row& of_row = args.rows[row];
  const int64_t room = least_of<int64_t>(kPlaces, slot.num_left - 1);
  const double before = place ? of_row.reaches[place - 1] : 1.0;
  if (!slot.is_open || of_row.num_drafted != place || place >= room || !(before > kLeastReach)) return;
  int32_t tail[kMaxMatch];
  const auto length = (int)least_of<int64_t>(kMaxMatch, slot.num_tokens + place);
  for (int i = 0; i < length; ++i) {
    const int64_t at = slot.num_tokens + place - length + i;
    tail[i] = at < slot.num_tokens ? tokens[at] : of_row.drafts[at - slot.num_tokens];
  }
  const Tables& tables = proposers.tables;
  const Match found = tables.has_lookup ? find_match(team, tokens, slot.num_tokens, tail, length) : Match{};
  if (team.rank) return;
  Said& said = of_row.said[place];
  said.count = say(tables, proposers.learned, slot.salt, found, tail, length, place, said.drafts);
  if (proposers.exit_tokens && slot.has_states) {
    // A head's numbers may overflow. That costs its draft.
    const Draft draft{(int32_t)proposers.exit_tokens[row], kFirstExit, proposers.exit_probabilities[row]};
    if (draft.probability > 0.0) said.drafts[said.count++] = draft;
  }
  const Correction* of_kind = control.corrections[control.kinds[row]];
  const auto correction = [=](Case in_case, int proposer) { return of_kind[in_case * (kFirstExit + 1) + proposer]; };
  double surest = 0.0;
  said.chosen = -1;
  Position<decltype(correction)>{said.drafts, said.count, tables.weights, correction}.rate([&](const Rated& one) {
    if (one.probability > surest) surest = one.probability, said.chosen = (int32_t)(one.draft - said.drafts);
  });
  if (said.chosen < 0) return;
  const int32_t token = said.drafts[said.chosen].token;
  if (token < 0 || token >= tables.vocabulary_size) return;
  of_row.drafts[place] = token;
  of_row.reaches[place] = before * surest;
  of_row.num_drafted = place + 1;
  args.newest[row] = token;
}

// Fills the pass: the tokens of prompts, the last token of each row, and of all drafts those that are likeliest to be
// reached, as many as there is room for. `above`, `equal` [kMostRows]: memory that the team shares.
template <class Team>
NEAP_BOTH inline void plan_pass(const Team& team, const SlotArgs& args, int16_t* above, int16_t* equal) {
  const Control& control = *args.control;
  const auto reach = [&](int row, int place) {
    const auto number = (float)args.rows[row].reaches[place];
    union {
      float number;
      uint32_t bits;
    } key{number};  // positive numbers have the order of their bits
    return key.bits;
  };
  const auto count = [&](int row) { return args.rows[row].num_drafted; };
  int num_open = 0;
  for (int row = team.rank; row < control.num_rows; row += team.size) {
    if (control.drafters[row] < 0) begin_row(args, row, control.drafters[row]);
    num_open += args.slots[control.slots[row]].is_open != 0;
  }
  const int room = control.num_tokens - control.num_others - team.sum(num_open);
  // The largest number that at least `room` drafts reach.
  uint32_t least = 0;
  for (int bit = 29; bit >= 0; --bit) {
    const uint32_t tried = least | 1u << bit;
    int reaching = 0;
    for (int row = team.rank; row < control.num_rows; row += team.size)
      for (int place = 0; place < count(row); ++place) reaching += reach(row, place) >= tried;
    if (team.sum(reaching) >= room) least = tried;
  }
  int num_above = 0;
  for (int row = team.rank; row < control.num_rows; row += team.size) {
    above[row] = equal[row] = 0;
    for (int place = 0; place < count(row); ++place) {
      above[row] += reach(row, place) > least;
      equal[row] += reach(row, place) == least;
    }
    num_above += above[row];
  }
  int left = room - team.sum(num_above);
  if (team.rank == 0) {
    int first = control.num_others;
    for (int row = 0; row < control.num_rows; ++row) {
      const int taken = least_of<int>(equal[row], left);
      left -= taken;
      args.rows[row].num_verified = above[row] + taken;
      args.rows[row].first = first;
      if (args.slots[control.slots[row]].is_open) first += 1 + above[row] + taken;
    }
    above[0] = (int16_t)first;
  }
  team.wait();
  const int used = above[0];
  int64_t* ids = args.token_rows;
  const auto put = [&](int at, int64_t id, int64_t table, int64_t position) {
    ids[at] = id;
    ids[at + control.num_tokens] = table;
    ids[at + 2 * control.num_tokens] = position;
    ids[at + 3 * control.num_tokens] = position < 0 ? 0 : position;
    ids[at + 4 * control.num_tokens] = 0;
  };
  for (int at = team.rank; at < control.num_others; at += team.size)
    put(at, control.others[0][at], control.others[1][at], control.others[2][at]);
  for (int at = used + team.rank; at < control.num_tokens; at += team.size) put(at, 0, 0, -1);
  for (int at = team.rank; at < kMostRows; at += team.size) {
    args.logit_rows[at] = control.num_others + at < used ? control.num_others + at : 0;
    if (control.num_others + at >= used) args.drawing[at] = 0.0;
  }
  for (int row = team.rank; row < control.num_rows; row += team.size) {
    const int32_t number = control.slots[row];
    const Slot& slot = args.slots[number];
    if (!slot.is_open) continue;
    const Row& of_row = args.rows[row];
    put(of_row.first, args.tokens[number * args.width + slot.num_tokens - 1], control.tables[row], slot.num_tokens - 1);
    for (int place = 0; place <= of_row.num_verified; ++place) {
      double* drawing = args.drawing + of_row.first - control.num_others + place;
      drawing[0] = slot.temperature;
      drawing[kMostRows] = slot.least_share;
      drawing[2 * kMostRows] = slot.temperature > 0.0 ? uniform_at(slot.seed, slot.num_tokens + place) : 0.0;
    }
    for (int place = 0; place < of_row.num_verified; ++place)
      put(of_row.first + 1 + place, of_row.drafts[place], control.tables[row], slot.num_tokens + place);
  }
}

// Accepts the drafts of one row that the full model has chosen, and its token after them, up to the end of the answer.
NEAP_BOTH inline void accept_row(const SlotArgs& args, int row) {
  const Control& control = *args.control;
  args.state_rows[row] = 0;
  args.state_slots[row] = args.spare_slot;
  if (row >= control.num_rows) return;
  const int32_t number = control.slots[row];
  Slot& slot = args.slots[number];
  Row& of_row = args.rows[row];
  of_row.num_new = of_row.num_left = 0;
  if (!slot.is_open) return;
  const int64_t* chosen = args.chosen + of_row.first - control.num_others;
  int32_t* tokens = args.tokens + number * args.width + slot.num_tokens;
  for (int place = 0;; ++place) {
    const auto token = (int32_t)chosen[place];
    of_row.choices[place] = tokens[place] = token;
    ++of_row.num_new;
    bool ends = token < 0 || of_row.num_new >= slot.num_left;
    for (int end = 0; end < slot.num_ends; ++end) ends = ends || token == slot.ends[end];
    if (ends) slot.is_open = 0;
    if (ends || place == of_row.num_verified || token != of_row.drafts[place]) break;
  }
  slot.num_tokens += of_row.num_new;
  slot.num_left -= of_row.num_new;
  of_row.num_left = slot.is_open ? (int32_t)slot.num_left : 0;
  slot.has_states = 1;
  args.state_rows[row] = of_row.first + of_row.num_new - 1;
  args.state_slots[row] = number;
}

}  // namespace neap::draft

namespace neap {

// Launches on a GPU, with its CUDA stream. They return 0 or a CUDA error.
int launch_begin_rows(const draft::SlotArgs& args, int drafter, void* stream);
int launch_draft_place(const draft::SlotArgs& args, const draft::Proposers& proposers, int num_rows, int place,
                       void* stream);
int launch_plan_pass(const draft::SlotArgs& args, void* stream);
int launch_accept_rows(const draft::SlotArgs& args, void* stream);

}  // namespace neap
