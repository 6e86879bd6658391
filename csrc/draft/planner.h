// How many tokens each sequence drafts before a verify pass, and when a layer exit is worth its time.
//
// A verify pass over the last tokens of B sequences and k drafts yields B + (expected accepted drafts) tokens. With
// calibrated probabilities p_1, p_2, .. the i-th draft of a sequence survives with probability p_1 * .. * p_i. Costs
// are measured on the device. The planner picks the numbers of drafts with the most expected tokens per second; zero
// drafts is one of the choices. The more sequences share a pass, the more probable a draft must be to pay.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

namespace neap::draft {

// Drafts with a lower probability of survival are not looked up.
inline constexpr double kMinSurvival = 0.02;

// See `ExitCost` of shared.engine.drafting.costs.
struct ExitCost {
  double alone_s, each_more_s, each_draft_s;
  int64_t num_drafts;
  double of(int64_t num_chains) const { return alone_s + (double)(num_chains - 1) * each_more_s; }
};

// A pass as drafting finds it. `extra_s`: what it takes beyond its measured cost, whatever is drafted.
struct PassLoad {
  int64_t num_sequences = 0, num_others = 0;  // others: tokens of pieces of prompts
  double extra_s = 0.0;
};

struct PassCosts {
  // Of passes over 1, 2, .. tokens, and over (tokens) more, ascending.
  std::vector<double> verify;
  std::vector<std::pair<int64_t, double>> wide;

  int64_t max_drafts() const { return (int64_t)verify.size() - 1; }
  // Interpolated linearly between the measured sizes, and extrapolated beyond them.
  double of_pass(int64_t num_tokens) const;
  // The least probability of survival with which a draft pays for its place in a pass, and for `keys_s` seconds that it
  // takes to attend to the keys of its sequence.
  double least_survival(const PassLoad& load, double keys_s) const;
  // Seconds that one more accepted draft of a sequence saves: its share of a pass, divided by its `tokens_per_pass`,
  // minus the growth of the pass by one token.
  double draft_gain_s(const PassLoad& load, double keys_s, double tokens_per_pass) const;
};

// Seconds that a call is expected to save for one chain with `room` for drafts, if the first draft saves `gain_s`. The
// price of the call is not subtracted: it is paid once for all chains.
double chain_gain_s(double gain_s, double agreement, const ExitCost& cost, int64_t room);

// Which sequences to take to an exit in one call: those whose gains exceed its cost by most. Ascending.
std::vector<int> select_sequences(const std::vector<double>& gains_s, const ExitCost& cost);

// What a pass has of one sequence: the probabilities of its drafts, and how many of them it has in any case.
struct PlannedChain {
  const double* probabilities;
  int64_t count, least;
  double keys_s;  // what each draft takes to attend to the keys of its sequence
};

// How many of each chain's drafts to verify. One chain for each sequence of the pass.
std::vector<int64_t> best_lengths(const std::vector<PlannedChain>& chains, const PassCosts& costs,
                                  const PassLoad& load);

}  // namespace neap::draft
