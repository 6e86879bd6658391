#include "confidence.h"

#include <algorithm>

namespace neap::draft {

namespace {

// Weight of the priors, in expected right drafts, and the sum at which all are halved, so that older requests weigh
// less.
constexpr double kPriorWeight = 24.0, kWindow = 1000.0;
// The same of what asking gains, in drafts; the least factor; and what a step without it leaves of what is known.
constexpr double kAskedWeight = 4.0, kAskedWindow = 60.0, kLeastAsked = 0.05, kFading = 0.998;

}  // namespace

Confidence::Confidence(const JointWeights& weights, int num_exits) : weights_(weights) {
  for (auto& of_case : sums_) of_case.resize(kFirstExit + num_exits);
}

std::vector<Rated> Confidence::rated(const std::vector<Draft>& drafts) const {
  std::vector<Rated> found;
  const auto ratio = [this](Case in_case, int proposer) { return this->ratio(in_case, proposer); };
  Position{drafts.data(), (int)drafts.size(), weights_, ratio}.rate([&](const Rated& one) { found.push_back(one); });
  std::stable_sort(found.begin(), found.end(),
                   [](const Rated& a, const Rated& b) { return a.probability > b.probability; });
  return found;
}

void Confidence::record(const Draft* drafts, int count, int32_t token) {
  found_.clear();
  const auto ratio = [this](Case in_case, int proposer) { return this->ratio(in_case, proposer); };
  Position{drafts, count, weights_, ratio}.combine([&](const Rated& one) { found_.push_back(one); });
  for (const Rated& one : found_) add(one.in_case, *one.draft, one.probability, token);
  for (const Draft* draft = drafts; draft < drafts + count; ++draft)
    if (draft->is_exit()) add(kAnyExit, *draft, draft->probability, token);
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
