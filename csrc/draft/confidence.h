// How probable it is that a draft is right, given what all proposers say of its position.
//
// Tables and exits are calibrated one by one. Where they propose the same token, it is more probable than either says.
// Where they differ, both are less: an exit is then right a third to half as often as its confidence head says, because
// it differs most where it is wrong.
#pragma once
#include <cstdint>
#include <vector>

namespace neap::draft {

// Proposers by number. Exit i of a ladder is kFirstExit + i.
enum Proposer { kPromptLookup, kNgramTable, kLearned, kPrediction, kGrammar, kFirstExit };

// What one proposer says of a position.
struct Draft {
  int32_t token;
  int32_t proposer;
  double probability;
  bool is_exit() const { return proposer >= kFirstExit; }
};

// The cases of joint weights, tables alone, an exit whatever the tables say, and what asking it gains.
enum Case { kAgree, kTableDiffers, kExitDiffers, kExitAlone, kTableAlone, kAnyExit, kAsked, kNumCases };

// A draft that counts: not one that a table alone proposes where another table is surer of another token.
struct Rated {
  const Draft* draft;
  Case in_case;
  const Draft* opposed;  // the other kind's, or null
  double probability;
};

struct JointWeights {
  double of[4][3];  // by case: a constant, the weight of the draft's log-odds, and of the opposed draft's
};

// For one ladder and one kind of request. It learns from what was verified: every draft of a position, chosen or not.
class Confidence {
 public:
  Confidence(const JointWeights& weights, int num_exits);

  // The drafts of a position that count, each with the probability that it is right; not yet corrected by what was
  // served.
  std::vector<Rated> combined(const std::vector<Draft>& drafts) const;
  // The same, corrected.
  std::vector<Rated> rated(const std::vector<Draft>& drafts) const;
  // By what the probabilities of an exit's confidence head have to be scaled, whatever the tables say.
  double factor(int proposer) const { return ratio(kAnyExit, proposer); }
  // What a pass has shown of a position: `token` was the full model's choice.
  void record(const std::vector<Draft>& drafts, int32_t token);

  // By what the gain that is expected of asking an exit has to be scaled: exits are asked where tables are unsure, and
  // are right there less often than elsewhere.
  double asked_factor(int proposer) const { return ratio(kAsked, proposer); }
  // An exit was asked, which was expected to make the draft more probable by `expected`. `gained`: 1 if the draft
  // became right by it, -1 if it became wrong.
  void record_asked(int proposer, double expected, int gained);
  // It was not asked. What is known of it fades, so that it is tried again.
  void record_unasked(int proposer);

 private:
  struct Sum { double expected = 0.0, right = 0.0, ratio = 1.0; };
  double ratio(Case in_case, int proposer) const { return sums_[in_case][proposer].ratio; }
  void add(Case in_case, const Draft& draft, double probability, int32_t token);

  JointWeights weights_;
  std::vector<Sum> sums_[kNumCases];
};

}  // namespace neap::draft
