#include "step.h"

#include <algorithm>

namespace neap::draft {

namespace {

// Tokens per pass that are assumed for a sequence without any, and the weight of this assumption in passes.
constexpr double kUsualTokensPerPass = 1.5, kPassWeight = 8.0;

}  // namespace

void Chain::append(const Draft& draft, double probability) {
  links.push_back({draft, probability, std::move(proposals), std::exchange(asked, {})});
  proposals.clear();
  path.push_back(draft.token);
  survival *= probability;
  // The later drafts of an exit that has drafted another token are void.
  for (Ahead& each : ahead)
    if (each.newest != draft.token) each.drafts.clear();
}

void Sequence::append(const int32_t* tokens, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (ladder->has_lookup) lookup.append(tokens[i]);
    if (predicted && num_left_out-- <= 0) prediction.append(*predicted, tokens[i]);
    tail.push_back(tokens[i]);
  }
  if (tail.size() > kMaxMatch) tail.erase(tail.begin(), tail.end() - kMaxMatch);
}

void Sequence::record(const int32_t* tokens, int64_t count) {
  ++num_passes;
  num_accepted += count - 1;
  const auto known = std::min<int64_t>(count, (int64_t)chain.links.size());
  bool was_asked = false;
  for (int64_t place = 0; place < known; ++place) {
    const Chain::Link& link = chain.links[place];
    confidence->record(link.proposals.data(), (int)link.proposals.size(), tokens[place]);
    if (link.asked.proposer < 0) continue;
    was_asked = true;
    const int gained = (link.draft.token == tokens[place]) - (link.asked.before == tokens[place]);
    confidence->record_asked(link.asked.proposer, link.asked.expected, gained);
  }
  if (!was_asked)
    for (size_t exit = 0; exit < ladder->exits.size(); ++exit) confidence->record_unasked(kFirstExit + (int)exit);
}

double Sequence::tokens_per_pass() const {
  const auto passes = (double)num_passes;
  return (kPassWeight * kUsualTokensPerPass + passes + (double)num_accepted) / (kPassWeight + passes);
}

void Sequence::begin(int64_t room, int64_t min_layers, bool is_fixed, double keys_s, const PassLoad& load) {
  chain = {};
  chain.path = tail;
  chain.num_before = tail.size();
  chain.predicted = prediction.at;
  chain.ahead.resize(ladder->exits.size());
  chain.room = std::min(room, ladder->costs.max_drafts());
  chain.min_layers = min_layers;
  chain.keys_s = keys_s;
  // If the caller asked for a fixed number of drafts, they are made whether they pay or not.
  chain.is_fixed = is_fixed;
  if (chain.room > 0 && !is_fixed) chain.least_survival = ladder->costs.least_survival(load, keys_s);
  chain.is_going = chain.wants_more();
}

void Sequence::go_on(int64_t num_kept, const int32_t* forced, int64_t num_forced, int32_t begun) {
  if (num_kept < (int64_t)chain.links.size()) {
    chain.links.resize(num_kept);
    chain.path.resize(chain.num_before + num_kept);
    chain.survival = 1.0;
    chain.predicted = prediction.at;
    for (const Chain::Link& link : chain.links) {
      chain.survival *= link.probability;
      if (predicted) chain.predicted.follow(*predicted, link.draft.token);
    }
    // Heads have gone on from tokens that are gone, and begin anew.
    for (Ahead& each : chain.ahead) each = {};
  }
  chain.forced.assign(forced, forced + num_forced);
  chain.begun = begun;
  chain.is_going = chain.wants_more() && (chain.is_going || num_forced > 0 || begun >= 0);
}

void Sequence::look_up() {
  chain.proposals.clear();
  chain.best.reset();
  chain.best_probability = 0.0;
  chain.is_open = chain.forced.empty();
  if (!chain.is_open) {
    chain.best = Draft{chain.forced.front(), kGrammar, 1.0};
    chain.best_probability = 1.0;
    chain.forced.pop_front();
    return;
  }
  const int32_t begun = std::exchange(chain.begun, -1);
  if (chain.min_layers > 0) return;  // the request wants layers to run for each draft
  const auto length = (int)std::min<size_t>(chain.path.size(), kMaxMatch);
  const int32_t* tail_begin = chain.path.data() + chain.path.size() - length;
  const auto num_chained = (int)chain.links.size();
  const Match found = ladder->has_lookup ? lookup.propose(tail_begin, length) : Match{};
  chain.proposals.resize(kMostSaidByTables);
  chain.proposals.resize(say(*ladder, learned ? learned->view() : LearnedView{}, salt, found, tail_begin, length,
                             num_chained, chain.proposals.data()));
  if (script) {
    double probability = 0.0;
    const int32_t token = script(chain.path.data() + chain.num_before, num_chained, &probability);
    if (token != -1) chain.proposals.push_back({token, kPromptLookup, probability});
  }
  if (predicted && chain.predicted.place < predicted->size())
    chain.proposals.push_back(
        {(*predicted)[chain.predicted.place], kPrediction, prediction.probability(chain.predicted.run)});
  // How often the beginning of forced text is the full model's choice where it is not the only one: 115 of 181 times
  // for SmolLM2-135M, 159 of 210 for Qwen2.5-Coder-1.5B, 40 schemas. What a request's kind shows corrects it.
  if (begun >= 0) chain.proposals.push_back({begun, kGrammar, 0.65});
  for (const Draft& draft : chain.proposals)
    if (draft.token < 0 || draft.token >= ladder->vocabulary_size) chain.has_failed = true;
  const std::vector<Rated> rated = confidence->rated(chain.proposals);
  if (!rated.empty()) chain.best = *rated[0].draft, chain.best_probability = rated[0].probability;
}

void Sequence::consider(const Draft& draft) {
  if (draft.token < 0 || draft.token >= ladder->vocabulary_size) chain.has_failed = true;
  // An exit's numbers may overflow. That costs its draft, and must not spread to what is learnt of the exit.
  if (!(draft.probability > 0.0)) return;
  chain.proposals.push_back(draft);
  const std::vector<Rated> rated = confidence->rated(chain.proposals);
  chain.best = *rated[0].draft, chain.best_probability = rated[0].probability;
}

bool Sequence::extend() {
  if (!chain.best) return false;
  if (predicted) chain.predicted.follow(*predicted, chain.best->token);
  const Draft draft = *chain.best;
  chain.append(draft, chain.best_probability);
  return true;
}

void Step::begin(std::vector<Sequence*> rows, const PassLoad& load) {
  *this = {};
  rows_ = std::move(rows);
  load_ = load;
}

bool Step::begin_round() {
  groups_.clear();
  std::vector<const Ladder*> ladders;
  for (size_t row = 0; row < rows_.size(); ++row) {
    Sequence& sequence = *rows_[row];
    if (!sequence.chain.is_going) continue;
    sequence.look_up();
    if (sequence.chain.has_failed) {
      sequence.chain.is_going = false;
      continue;
    }
    const auto at = std::find(ladders.begin(), ladders.end(), sequence.ladder);
    if (at == ladders.end()) {
      ladders.push_back(sequence.ladder);
      groups_.push_back({(int32_t)row});
    } else {
      groups_[at - ladders.begin()].push_back((int32_t)row);
    }
  }
  group_ = 0, exit_ = 0, is_asked_ = false;
  return !groups_.empty();
}

int64_t Step::advance() {
  // In rounds of one draft per sequence, so that all sequences that ask the same exit share one shallow pass, one
  // launch and one read-back.
  while (is_round_ || begin_round()) {
    is_round_ = true;
    for (; group_ < groups_.size(); ++group_, exit_ = 0, is_asked_ = false) {
      const std::vector<int32_t>& group = groups_[group_];
      if (group.empty()) continue;
      const auto num_exits = (int64_t)rows_[group[0]]->ladder->exits.size();
      for (; exit_ < num_exits; ++exit_, is_asked_ = false) {
        if (!is_asked_) {
          is_asked_ = true;
          ask(group);
          if (!asked_.empty()) return (int64_t)asked_.size();
        }
        take(group);
      }
    }
    for (Sequence* sequence : rows_) {
      Chain& chain = sequence->chain;
      if (chain.is_going) chain.is_going = !chain.has_failed && sequence->extend() && chain.wants_more();
    }
    is_round_ = false;
  }
  return 0;
}

void Step::ask(const std::vector<int32_t>& group) {
  asked_.clear();
  std::vector<Asked> allowed;
  std::vector<double> gains_s;
  const Ladder& ladder = *rows_[group[0]]->ladder;
  const Exit& exit = ladder.exits[exit_];
  for (const int32_t row : group) {
    Sequence& sequence = *rows_[row];
    const Chain& chain = sequence.chain;
    if (!chain.is_open || chain.has_failed || !chain.ahead[exit_].drafts.empty() || exit.depth < chain.min_layers)
      continue;
    // By how much its draft is expected to be more probable than the best one so far. Where tables say nothing this is
    // more than 0 however seldom the exit was right lately. So it is asked there, and can come back.
    const int proposer = kFirstExit + (int)exit_;
    const double factor = sequence.confidence->factor(proposer);
    const double gain = exit.agreement * factor - chain.best_probability;
    const double gain_s = chain.survival * gain * sequence.confidence->asked_factor(proposer) *
                          ladder.costs.draft_gain_s(load_, chain.keys_s, sequence.tokens_per_pass());
    allowed.push_back({&sequence, row, gain, gain_s});
    gains_s.push_back(chain_gain_s(gain_s, exit.agreement * factor, exit.cost, chain.left()));
  }
  ExitCost cost = exit.cost;
  cost.alone_s *= exit.slowness, cost.each_more_s *= exit.slowness;
  for (const int chosen : select_sequences(gains_s, cost)) {
    const Asked& one = allowed[chosen];
    Chain& chain = one.sequence->chain;
    chain.asked = {kFirstExit + (int32_t)exit_, one.gain, chain.best ? chain.best->token : -1};
    asked_.push_back(one);
  }
}

double Step::least_survival(const Asked& one) const {
  // As long as a further draft is expected to save what it costs itself. What it saves is proportional to survival.
  const Chain& chain = one.sequence->chain;
  const double each_draft_s = one.sequence->ladder->exits[exit_].cost.each_draft_s;
  return std::max(chain.survival * each_draft_s / one.gain_s, chain.least_survival);
}

void Step::give(const int64_t* tokens, const double* probabilities, const int64_t* lengths, int64_t width) {
  for (size_t row = 0; row < asked_.size(); ++row) {
    Ahead& ahead = asked_[row].sequence->chain.ahead[exit_];
    for (int64_t place = 0; place < lengths[row]; ++place) {
      const int64_t at = (int64_t)row * width + place;
      // A number that is no token of any model stays one.
      const auto token = (int32_t)std::clamp<int64_t>(tokens[at], -1, INT32_MAX);
      ahead.drafts.push_back({token, probabilities[at], {num_calls_, (int32_t)row, (int32_t)place}});
    }
  }
  ++num_calls_;
}

void Step::take(const std::vector<int32_t>& group) {
  for (const int32_t row : group) {
    Sequence& sequence = *rows_[row];
    Chain& chain = sequence.chain;
    Ahead& ahead = chain.ahead[exit_];
    if (ahead.drafts.empty()) continue;
    const Ahead::Drafted drafted = ahead.drafts.front();
    ahead.drafts.pop_front();
    ahead.output = drafted.output;
    ahead.num_seen = 1 + (int64_t)chain.links.size();
    ahead.newest = drafted.token;
    if (chain.is_open && !chain.has_failed)
      sequence.consider({drafted.token, kFirstExit + (int32_t)exit_, drafted.probability});
  }
}

std::vector<int32_t> Step::drop() {
  std::vector<int32_t> dropped = std::exchange(groups_[group_], {});
  for (const int32_t row : dropped) rows_[row]->chain.is_going = false;
  return dropped;
}

std::vector<int64_t> Step::plan() const {
  std::vector<std::vector<double>> probabilities;
  std::vector<PlannedChain> chains;
  for (const Sequence* sequence : rows_) {
    auto& of_chain = probabilities.emplace_back();
    for (const Chain::Link& link : sequence->chain.links) of_chain.push_back(link.probability);
    const auto count = (int64_t)of_chain.size();
    chains.push_back({of_chain.data(), count, sequence->chain.is_fixed ? count : 0, sequence->chain.keys_s});
  }
  if (rows_.empty()) return {};
  return best_lengths(chains, rows_[0]->ladder->costs, load_);
}

}  // namespace neap::draft
