// The C interface of drafting, which `shared.ops.drafting` calls. Not ops of torch: the objects live for as long as a
// request or a router does, and a call takes microseconds. Arrays are the caller's, and objects must outlive those that
// refer to them. The functions are called by one thread at a time per object.
#include <algorithm>
#include <cstring>

#include "step.h"

using namespace neap::draft;

#define NEAP_API extern "C" __attribute__((visibility("default")))

static_assert(sizeof(TableConfidence) == 33 * sizeof(double));

namespace {

// Returns whether there are numbers to read.
bool read(TableConfidence& made, const double* numbers) {
  if (numbers) std::memcpy(&made, numbers, sizeof made);
  return numbers != nullptr;
}

std::vector<Draft> drafts_of(int64_t count, const int32_t* tokens, const int32_t* proposers,
                             const double* probabilities) {
  std::vector<Draft> drafts;
  for (int64_t i = 0; i < count; ++i) drafts.push_back({tokens[i], proposers[i], probabilities[i]});
  return drafts;
}

}  // namespace

// A router's tables, exits and costs. `lookup` and `ngrams`: 33 numbers, or null. `keys` .. `sizes`: of each order, or
// null. `exit_numbers`: agreement and the three costs in seconds of each exit.
NEAP_API Ladder* neap_ladder_new(const double* lookup, const double* ngrams, const uint32_t* const* keys,
                                 const uint32_t* const* tokens, const uint8_t* const* counts,
                                 const uint8_t* const* shares, const int64_t* sizes, const double* joint_weights,
                                 const double* verify, int64_t num_verify, const int64_t* wide_tokens,
                                 const double* wide_s, int64_t num_wide, const int64_t* exit_depths,
                                 const double* exit_numbers, const int64_t* exit_drafts, int64_t num_exits,
                                 int64_t vocabulary_size) {
  auto* ladder = new Ladder;
  ladder->has_lookup = read(ladder->lookup, lookup);
  ladder->has_ngrams = read(ladder->ngrams, ngrams);
  for (int order = 0; keys && order < kMaxOrder; ++order)
    ladder->orders[order] = {keys[order], tokens[order], counts[order], shares[order], sizes[order]};
  std::memcpy(&ladder->weights, joint_weights, sizeof ladder->weights);
  ladder->costs.verify.assign(verify, verify + num_verify);
  for (int64_t i = 0; i < num_wide; ++i) ladder->costs.wide.emplace_back(wide_tokens[i], wide_s[i]);
  for (int64_t i = 0; i < num_exits; ++i) {
    const double* numbers = exit_numbers + 4 * i;
    ladder->exits.push_back({exit_depths[i], numbers[0], {numbers[1], numbers[2], numbers[3], exit_drafts[i]}});
  }
  ladder->vocabulary_size = vocabulary_size;
  return ladder;
}
NEAP_API void neap_ladder_free(Ladder* ladder) { delete ladder; }
// Seconds that a call of an exit is expected to save one sequence whose tables say nothing, if the exit is right with
// the probability `agreement`. The price of the call is not subtracted.
NEAP_API double neap_ladder_call_gain_s(const Ladder* ladder, int64_t exit, double agreement) {
  const ExitCost& cost = ladder->exits[exit].cost;
  return chain_gain_s(agreement * ladder->costs.draft_gain_s({.num_sequences = 1}, 0.0, 1.0), agreement, cost,
                      cost.num_drafts);
}

NEAP_API double neap_ladder_pass_s(const Ladder* ladder, int64_t num_tokens) {
  return ladder->costs.of_pass(num_tokens);
}
NEAP_API void neap_ladder_slow_exit(Ladder* ladder, int64_t exit, double slowness) {
  ladder->exits[exit].slowness = slowness;
}

NEAP_API LearnedNgrams* neap_learned_new(int64_t num_sets) { return new LearnedNgrams(num_sets); }
NEAP_API void neap_learned_free(LearnedNgrams* learned) { delete learned; }
NEAP_API void neap_learned_learn(LearnedNgrams* learned, uint64_t salt, const int32_t* tokens, int64_t count,
                                 int64_t first) {
  learned->learn(salt, tokens, count, first);
}
NEAP_API int64_t neap_learned_entries(const LearnedNgrams* learned) { return learned->num_entries(); }

NEAP_API PredictedText* neap_predicted_new(const int32_t* tokens, int64_t count) {
  return new PredictedText({tokens, tokens + count});
}
NEAP_API void neap_predicted_free(PredictedText* predicted) { delete predicted; }

NEAP_API Confidence* neap_confidence_new(const double* joint_weights, int64_t num_exits) {
  JointWeights weights;
  std::memcpy(&weights, joint_weights, sizeof weights);
  return new Confidence(weights, (int)num_exits);
}
NEAP_API void neap_confidence_free(Confidence* confidence) { delete confidence; }
NEAP_API double neap_confidence_factor(const Confidence* confidence, int32_t proposer) {
  return confidence->factor(proposer);
}
NEAP_API void neap_confidence_record(Confidence* confidence, int64_t count, const int32_t* tokens,
                                     const int32_t* proposers, const double* probabilities, int32_t choice) {
  confidence->record(drafts_of(count, tokens, proposers, probabilities).data(), (int)count, choice);
}
// The drafts of a position that count, the most probable first: their numbers, cases, the numbers of the opposed drafts
// or -1, and probabilities.
NEAP_API int64_t neap_confidence_rate(const Confidence* confidence, int64_t count, const int32_t* tokens,
                                      const int32_t* proposers, const double* probabilities, int32_t* numbers,
                                      int32_t* cases, int32_t* opposed, double* rated) {
  const std::vector<Draft> drafts = drafts_of(count, tokens, proposers, probabilities);
  int64_t found = 0;
  for (const Rated& one : confidence->rated(drafts)) {
    numbers[found] = (int32_t)(one.draft - drafts.data());
    cases[found] = one.in_case;
    opposed[found] = one.opposed ? (int32_t)(one.opposed - drafts.data()) : -1;
    rated[found++] = one.probability;
  }
  return found;
}

NEAP_API Sequence* neap_sequence_new(const Ladder* ladder, Confidence* confidence, const LearnedNgrams* learned,
                                     uint64_t salt, const PredictedText* predicted, int64_t num_prompt_tokens,
                                     Script script) {
  return new Sequence{ladder, confidence, learned, salt, predicted, num_prompt_tokens, script, {}, {}, {}, 0, 0, {}};
}
NEAP_API void neap_sequence_free(Sequence* sequence) { delete sequence; }
NEAP_API void neap_sequence_append(Sequence* sequence, const int32_t* tokens, int64_t count) {
  sequence->append(tokens, count);
}
NEAP_API void neap_sequence_record(Sequence* sequence, const int32_t* tokens, int64_t count) {
  sequence->record(tokens, count);
}
NEAP_API int64_t neap_sequence_num_predicted(const Sequence* sequence) { return sequence->prediction.num_right; }
// What look-up, n-gram table and learned table know after `drafted`: token, length and count of each match, and its
// share. `counts`: how many are of each of the three.
NEAP_API void neap_sequence_matches(Sequence* sequence, const int32_t* drafted, int64_t count, int32_t* numbers,
                                    double* shares, int32_t* counts) {
  std::vector<int32_t> path = sequence->tail;
  path.insert(path.end(), drafted, drafted + count);
  const auto length = (int)std::min<size_t>(path.size(), kMaxMatch);
  const int32_t* tail = path.data() + path.size() - length;
  std::vector<Match> found;
  const Match match = sequence->ladder->has_lookup ? sequence->lookup.propose(tail, length) : Match{};
  if (match.count) found.push_back(match);
  Matches ngrams, learned;
  if (sequence->ladder->orders[0].keys) ngrams = ngram_matches(sequence->ladder->orders, tail, length);
  if (sequence->learned) learned = sequence->learned->view().matches(sequence->salt, tail, length);
  counts[0] = (int32_t)found.size(), counts[1] = ngrams.count, counts[2] = learned.count;
  for (const Matches* matches : {&ngrams, &learned})
    found.insert(found.end(), matches->of, matches->of + matches->count);
  for (size_t i = 0; i < found.size(); ++i) {
    numbers[3 * i] = found[i].token, numbers[3 * i + 1] = found[i].length, numbers[3 * i + 2] = found[i].count;
    shares[i] = found[i].share;
  }
}

// What the tables propose after `drafted`. Ends the chain of the present step.
NEAP_API int64_t neap_sequence_propose(Sequence* sequence, const int32_t* drafted, int64_t count, int32_t* tokens,
                                       int32_t* proposers, double* probabilities) {
  sequence->begin(0, 0, true, 0.0, {.num_sequences = 1});
  for (int64_t i = 0; i < count; ++i) {
    sequence->chain.best = Draft{drafted[i], kGrammar, 1.0};
    sequence->extend();
  }
  sequence->look_up();
  int64_t found = 0;
  for (const Draft& draft : sequence->chain.proposals) {
    tokens[found] = draft.token, proposers[found] = draft.proposer, probabilities[found] = draft.probability;
    ++found;
  }
  return found;
}

NEAP_API Step* neap_step_new() { return new Step; }
NEAP_API void neap_step_free(Step* step) { delete step; }
// `rooms`: the most drafts of each sequence. Only exits at `min_layers` or deeper draft, if it is not 0.
NEAP_API void neap_step_begin(Step* step, int64_t count, Sequence* const* sequences, const int64_t* rooms,
                              const int64_t* min_layers, const int64_t* are_fixed, const double* keys_s,
                              int64_t num_sequences, int64_t num_others, double extra_s) {
  int64_t num_fixed = 0;
  for (int64_t i = 0; i < count; ++i) num_fixed += are_fixed[i] ? rooms[i] : 0;
  for (int64_t i = 0; i < count; ++i)
    sequences[i]->begin(rooms[i], min_layers[i], are_fixed[i] != 0, keys_s[i],
                        {num_sequences, num_others + num_fixed, extra_s});
  step->begin({sequences, sequences + count}, {num_sequences, num_others, extra_s});
}
NEAP_API void neap_step_go_on(Step* step, int64_t row, int64_t num_kept, const int32_t* forced, int64_t num_forced,
                              int32_t begun) {
  step->rows()[row]->go_on(num_kept, forced, num_forced, begun);
}
// The number of chains that are to be taken to exit `exit_index`; 0: there is nothing more to draft.
NEAP_API int64_t neap_step_advance(Step* step, int64_t* exit_index) {
  const int64_t count = step->advance();
  *exit_index = step->exit_index();
  return count;
}
// An asked chain. integers: its row, the tokens that the head has seen, drafts in the chain, the room for more, and
// call, row and place of the output from which the head goes on (call -1: it has seen nothing). numbers: survival,
// factor, least survival. tokens: the chain's drafts.
NEAP_API void neap_step_asked(const Step* step, int64_t index, int64_t* integers, double* numbers, int32_t* tokens) {
  const Asked& one = step->asked()[index];
  const Chain& chain = one.sequence->chain;
  const Ahead& ahead = chain.ahead[step->exit_index()];
  const int64_t found[] = {one.row,           ahead.num_seen,   (int64_t)chain.links.size(), chain.left(),
                           ahead.output.call, ahead.output.row, ahead.output.place};
  std::copy_n(found, 7, integers);
  numbers[0] = chain.survival;
  numbers[1] = one.sequence->confidence->factor(kFirstExit + (int)step->exit_index());
  numbers[2] = step->least_survival(one);
  for (size_t i = 0; i < chain.links.size(); ++i) tokens[i] = chain.links[i].draft.token;
}
NEAP_API void neap_step_give(Step* step, const int64_t* tokens, const double* probabilities, const int64_t* lengths,
                             int64_t width) {
  step->give(tokens, probabilities, lengths, width);
}
NEAP_API int64_t neap_step_drop(Step* step, int32_t* rows) {
  const std::vector<int32_t> dropped = step->drop();
  std::copy(dropped.begin(), dropped.end(), rows);
  return (int64_t)dropped.size();
}
// All chains [count, width]: how many drafts each has, or -1 if a proposer has drafted what is no token of the model,
// which is then the first one; tokens, proposers, and the probabilities that the proposers gave them.
NEAP_API void neap_step_read(const Step* step, int64_t width, int64_t* lengths, int32_t* tokens, int32_t* proposers,
                             double* probabilities) {
  for (size_t row = 0; row < step->rows().size(); ++row) {
    const Sequence& sequence = *step->rows()[row];
    const Chain& chain = sequence.chain;
    const size_t first = row * width;
    lengths[row] = (int64_t)chain.links.size();
    const auto write = [&](size_t at, const Draft& draft) {
      tokens[at] = draft.token, proposers[at] = draft.proposer, probabilities[at] = draft.probability;
    };
    for (size_t i = 0; i < chain.links.size(); ++i) write(first + i, chain.links[i].draft);
    if (!chain.has_failed) continue;
    lengths[row] = -1;
    for (const Draft& draft : chain.proposals)
      if (draft.token < 0 || draft.token >= sequence.ladder->vocabulary_size) write(first, draft);
  }
}
NEAP_API void neap_step_plan(const Step* step, int64_t* lengths) {
  const std::vector<int64_t> chosen = step->plan();
  std::copy(chosen.begin(), chosen.end(), lengths);
}
