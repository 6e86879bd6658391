// How probable it is that a draft is right, given what all proposers say of its position: see confidence.h.
#pragma once
#include "both.h"

namespace neap::draft {

// Proposers by number. Exit i of a ladder is kFirstExit + i.
enum Proposer { kPromptLookup, kNgramTable, kLearned, kPrediction, kGrammar, kFirstExit };

// What one proposer says of a position.
struct Draft {
  int32_t token;
  int32_t proposer;
  double probability;
  NEAP_BOTH bool is_exit() const { return proposer >= kFirstExit; }
};

// The cases of joint weights, and tables alone.
enum Case { kAgree, kTableDiffers, kExitDiffers, kExitAlone, kTableAlone, kNumCases };

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

inline constexpr double kSurest = 0.999;
// The log-odds beyond which what is said counts as no surer or less sure, where it is corrected: .05 and .95.
inline constexpr double kFarthestSaid = 3.0;

NEAP_BOTH inline double log_odds_of(double probability) {
  probability = limited(probability, 0.001, kSurest);
  return log(probability / (1.0 - probability));
}
NEAP_BOTH inline double probability_of(double log_odds) { return 1.0 / (1.0 + exp(-log_odds)); }

// What corrects the log-odds of what is said.
struct Correction {
  double constant = 0.0, weight = 1.0;
  NEAP_BOTH double of(double probability) const {
    if (constant == 0.0 && weight == 1.0) return probability;
    return probability_of(constant + weight * said(probability));
  }
  NEAP_BOTH static double said(double probability) {
    return limited(log_odds_of(probability), -kFarthestSaid, kFarthestSaid);
  }
};

// The drafts of one position. `correction(case, proposer)`: what served positions have shown of what is said.
template <class Corrections>
struct Position {
  const Draft* drafts;
  int count;
  const JointWeights& weights;
  const Corrections& correction;

  // Calls f with each draft that counts, and the probability that it is right; not yet corrected.
  template <class F>
  NEAP_BOTH void combine(const F& f) const {
    const int table = best(false), exit = best(true);
    for (int i = 0; i < count; ++i) {
      if (!drafts[i].is_exit() || !is_first(i)) continue;
      const int sure = surest(true, drafts[i].token), same = surest(false, drafts[i].token);
      if (same >= 0) f(rated(same, kAgree, sure));
      else f(rated(sure, table >= 0 ? kExitDiffers : kExitAlone, table));
    }
    if (table >= 0 && surest(true, drafts[table].token) < 0)
      f(rated(table, exit >= 0 ? kTableDiffers : kTableAlone, exit));
  }
  // The same, corrected.
  template <class F>
  NEAP_BOTH void rate(const F& f) const {
    combine([&](Rated one) {
      one.probability = least_of(correction(one.in_case, one.draft->proposer).of(one.probability), kSurest);
      f(one);
    });
  }

 private:
  // A table that was right more often than it said may be the better one of two.
  NEAP_BOTH double weight(int i) const {
    const double said = drafts[i].probability;
    return drafts[i].is_exit() ? said : correction(kTableAlone, drafts[i].proposer).of(said);
  }
  // Whether no draft of its kind has proposed its token before.
  NEAP_BOTH bool is_first(int i) const {
    for (int before = 0; before < i; ++before)
      if (drafts[before].is_exit() == drafts[i].is_exit() && drafts[before].token == drafts[i].token) return false;
    return true;
  }
  // The surest draft of a token, of tables or of exits; -1 if there is none.
  NEAP_BOTH int surest(bool of_exits, int32_t token) const {
    int found = -1;
    for (int i = 0; i < count; ++i)
      if (drafts[i].is_exit() == of_exits && drafts[i].token == token && (found < 0 || weight(i) > weight(found)))
        found = i;
    return found;
  }
  NEAP_BOTH int best(bool of_exits) const {
    int found = -1;
    double most = -1.0;
    for (int i = 0; i < count; ++i) {
      if (drafts[i].is_exit() != of_exits || !is_first(i)) continue;
      const int sure = surest(of_exits, drafts[i].token);
      const double weighed = weight(sure);
      if (weighed > most) found = sure, most = weighed;
    }
    return found;
  }
  NEAP_BOTH Rated rated(int i, Case in_case, int opposed) const {
    double probability = drafts[i].probability;
    if (in_case != kTableAlone) {
      const double* of_case = weights.of[in_case];
      double odds = of_case[0] + of_case[1] * log_odds_of(probability);
      if (opposed >= 0) odds += of_case[2] * log_odds_of(drafts[opposed].probability);
      probability = probability_of(odds);
    }
    return {drafts + i, in_case, opposed < 0 ? nullptr : drafts + opposed, probability};
  }
};

}  // namespace neap::draft
