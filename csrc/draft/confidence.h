// How probable it is that a draft is right, given what all proposers say of its position.
//
// Tables and exits are calibrated one by one. Where they propose the same token, it is more probable than either says.
// Where they differ, both are less: an exit is then right a third to half as often as its confidence head says, because
// it differs most where it is wrong.
#pragma once
#include <vector>

#include "rating.h"

namespace neap::draft {

// For one ladder and one kind of request. It learns from what was verified: every draft of a position, chosen or not.
class Confidence {
 public:
  Confidence(const JointWeights& weights, int num_exits);

  // The drafts of a position that count, each with the probability that it is right, corrected by what was served; the
  // best first.
  std::vector<Rated> rated(const std::vector<Draft>& drafts) const;
  const Correction& correction(Case in_case, int proposer) const { return fits_[in_case][proposer].correction; }
  int num_proposers() const { return (int)any_.size(); }
  // By what the probabilities of an exit's confidence head have to be scaled, whatever the tables say.
  double factor(int proposer) const { return any_[proposer].ratio; }
  // What a pass has shown of a position: `token` was the full model's choice.
  void record(const Draft* drafts, int count, int32_t token);

  // By what the gain that is expected of asking an exit has to be scaled: exits are asked where tables are unsure, and
  // are right there less often than elsewhere.
  double asked_factor(int proposer) const { return asked_[proposer].ratio; }
  // An exit was asked, which was expected to make the draft more probable by `expected`. `gained`: 1 if the draft
  // became right by it, -1 if it became wrong.
  void record_asked(int proposer, double expected, int gained);
  // It was not asked. What is known of it fades, so that it is tried again.
  void record_unasked(int proposer);

 private:
  // A correction by the last drafts: each moves it by a Newton step of its logistic loss (Platt's scaling, online).
  // The sums are the loss's second derivatives.
  struct Fit {
    Correction correction;
    double of_constant = 0.0, of_both = 0.0, of_weight = 0.0;
    void add(double said, bool is_right);
  };
  struct Sum { double expected = 0.0, right = 0.0, ratio = 1.0; };
  static void rate_asked(Sum& sum);

  JointWeights weights_;
  std::vector<Fit> fits_[kNumCases];
  std::vector<Sum> any_, asked_;
  std::vector<Rated> found_;  // by `record`, whose memory it keeps
};

}  // namespace neap::draft
