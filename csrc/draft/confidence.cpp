#include "confidence.h"

#include <algorithm>
#include <cmath>

namespace neap::draft {

namespace {

constexpr double kLeast = 0.001, kMost = 0.999;
// Weight of the priors, in expected right drafts, and the sum at which all are halved, so that older requests weigh
// less.
constexpr double kPriorWeight = 24.0, kWindow = 1000.0;
// The same of what asking gains, in drafts; the least factor; and what a step without it leaves of what is known.
constexpr double kAskedWeight = 4.0, kAskedWindow = 60.0, kLeastAsked = 0.05, kFading = 0.998;

double log_odds(double probability) {
  probability = std::clamp(probability, kLeast, kMost);
  return std::log(probability / (1.0 - probability));
}

// The surest draft of each token of one kind of proposer, in the order in which tokens were first proposed.
struct Surest {
  std::vector<std::pair<const Draft*, double>> by_token;
  const Draft* best = nullptr;

  void add(const Draft& draft, double rated) {
    for (auto& [held, held_rated] : by_token) {
      if (held->token != draft.token) continue;
      if (rated > held_rated) held = &draft, held_rated = rated;
      return;
    }
    by_token.emplace_back(&draft, rated);
  }

  void choose() {
    double most = -1.0;
    for (const auto& [draft, rated] : by_token)
      if (rated > most) best = draft, most = rated;
  }

  const Draft* of(int32_t token) const {
    for (const auto& [draft, rated] : by_token)
      if (draft->token == token) return draft;
    return nullptr;
  }
};

}  // namespace

Confidence::Confidence(const JointWeights& weights, int num_exits) : weights_(weights) {
  for (auto& of_case : sums_) of_case.resize(kFirstExit + num_exits);
}

std::vector<Rated> Confidence::combined(const std::vector<Draft>& drafts) const {
  Surest tables, exits;
  for (const Draft& draft : drafts) {
    // A table that was right more often than it said may be the better one of two.
    if (draft.is_exit()) exits.add(draft, draft.probability);
    else tables.add(draft, draft.probability * ratio(kTableAlone, draft.proposer));
  }
  tables.choose();
  exits.choose();
  std::vector<Rated> found;
  const auto add = [&](const Draft* draft, Case in_case, const Draft* opposed) {
    double probability = draft->probability;
    if (in_case != kTableAlone) {
      const double* weights = weights_.of[in_case];
      double odds = weights[0] + weights[1] * log_odds(probability);
      if (opposed) odds += weights[2] * log_odds(opposed->probability);
      probability = 1.0 / (1.0 + std::exp(-odds));
    }
    found.push_back({draft, in_case, opposed, probability});
  };
  for (const auto& [draft, rated] : exits.by_token) {
    if (const Draft* table = tables.of(draft->token)) add(table, kAgree, draft);
    else add(draft, tables.best ? kExitDiffers : kExitAlone, tables.best);
  }
  if (tables.best && !exits.of(tables.best->token))
    add(tables.best, exits.best ? kTableDiffers : kTableAlone, exits.best);
  return found;
}

std::vector<Rated> Confidence::rated(const std::vector<Draft>& drafts) const {
  std::vector<Rated> found = combined(drafts);
  for (Rated& one : found) one.probability = std::min(one.probability * ratio(one.in_case, one.draft->proposer), kMost);
  std::stable_sort(found.begin(), found.end(),
                   [](const Rated& a, const Rated& b) { return a.probability > b.probability; });
  return found;
}

void Confidence::record(const std::vector<Draft>& drafts, int32_t token) {
  for (const Rated& one : combined(drafts)) add(one.in_case, *one.draft, one.probability, token);
  for (const Draft& draft : drafts)
    if (draft.is_exit()) add(kAnyExit, draft, draft.probability, token);
}

void Confidence::add(Case in_case, const Draft& draft, double probability, int32_t token) {
  Sum& sum = sums_[in_case][draft.proposer];
  sum.expected += probability;
  sum.right += draft.token == token;
  if (sum.expected > kWindow) sum.expected /= 2, sum.right /= 2;
  sum.ratio = (kPriorWeight + sum.right) / (kPriorWeight + sum.expected);
}

void Confidence::record_asked(int proposer, double expected, int gained) {
  Sum& sum = sums_[kAsked][proposer];
  sum.expected += expected;
  sum.right += gained;
  if (sum.expected > kAskedWindow) sum.expected /= 2, sum.right /= 2;
  sum.ratio = std::max((kAskedWeight + sum.right) / (kAskedWeight + sum.expected), kLeastAsked);
}

void Confidence::record_unasked(int proposer) {
  Sum& sum = sums_[kAsked][proposer];
  sum.expected *= kFading;
  sum.right *= kFading;
  sum.ratio = std::max((kAskedWeight + sum.right) / (kAskedWeight + sum.expected), kLeastAsked);
}

}  // namespace neap::draft
