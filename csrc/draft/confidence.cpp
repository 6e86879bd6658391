#include "confidence.h"

#include <algorithm>

namespace neap::draft {

namespace {

// Of corrections: the weight of the prior that what is said is right, in second derivatives, what a draft leaves of the
// weight of those before it, and the limits.
constexpr double kPrior = 8.0, kKept = 1.0 - 1.0 / 300.0, kMostConstant = 7.0, kLeastWeight = 0.05, kMostWeight = 3.0;
// Weight of the priors, in expected right drafts, and the sum at which all are halved, so that older requests weigh
// less.
constexpr double kPriorWeight = 24.0, kWindow = 1000.0;
// The same of what asking gains, in drafts; the least factor; and what a step without it leaves of what is known.
constexpr double kAskedWeight = 4.0, kAskedWindow = 60.0, kLeastAsked = 0.05, kFading = 0.998;

}  // namespace

Confidence::Confidence(const JointWeights& weights, int num_exits) : weights_(weights) {
  for (auto& of_case : fits_) of_case.resize(kFirstExit + num_exits);
  any_.resize(kFirstExit + num_exits);
  asked_.resize(kFirstExit + num_exits);
}

std::vector<Rated> Confidence::rated(const std::vector<Draft>& drafts) const {
  std::vector<Rated> found;
  const auto corrections = [this](Case in_case, int proposer) { return correction(in_case, proposer); };
  Position{drafts.data(), (int)drafts.size(), weights_, corrections}.rate(
      [&](const Rated& one) { found.push_back(one); });
  std::stable_sort(found.begin(), found.end(),
                   [](const Rated& a, const Rated& b) { return a.probability > b.probability; });
  return found;
}

void Confidence::record(const Draft* drafts, int count, int32_t token) {
  found_.clear();
  const auto corrections = [this](Case in_case, int proposer) { return correction(in_case, proposer); };
  Position{drafts, count, weights_, corrections}.combine([&](const Rated& one) { found_.push_back(one); });
  for (const Rated& one : found_)
    fits_[one.in_case][one.draft->proposer].add(one.probability, one.draft->token == token);
  for (const Draft* draft = drafts; draft < drafts + count; ++draft) {
    if (!draft->is_exit()) continue;
    Sum& sum = any_[draft->proposer];
    sum.expected += draft->probability;
    sum.right += draft->token == token;
    if (sum.expected > kWindow) sum.expected /= 2, sum.right /= 2;
    sum.ratio = (kPriorWeight + sum.right) / (kPriorWeight + sum.expected);
  }
}

void Confidence::Fit::add(double said, bool is_right) {
  const double x = Correction::said(said), probability = probability_of(correction.constant + correction.weight * x);
  const double wrong = (double)is_right - probability, curvature = probability * (1.0 - probability);
  of_constant = kKept * of_constant + curvature;
  of_both = kKept * of_both + curvature * x;
  of_weight = kKept * of_weight + curvature * x * x;
  const double first = kPrior + of_constant, last = kPrior + of_weight;
  const double determinant = first * last - of_both * of_both;
  correction.constant += wrong * (last - of_both * x) / determinant;
  correction.weight += wrong * (first * x - of_both) / determinant;
  correction.constant = limited(correction.constant, -kMostConstant, kMostConstant);
  correction.weight = limited(correction.weight, kLeastWeight, kMostWeight);
}

void Confidence::record_asked(int proposer, double expected, int gained) {
  Sum& sum = asked_[proposer];
  sum.expected += expected;
  sum.right += gained;
  if (sum.expected > kAskedWindow) sum.expected /= 2, sum.right /= 2;
  rate_asked(sum);
}

void Confidence::record_unasked(int proposer) {
  Sum& sum = asked_[proposer];
  sum.expected *= kFading;
  sum.right *= kFading;
  rate_asked(sum);
}

void Confidence::rate_asked(Sum& sum) {
  sum.ratio = std::max((kAskedWeight + sum.right) / (kAskedWeight + sum.expected), kLeastAsked);
}

}  // namespace neap::draft
