#include "planner.h"

#include <algorithm>
#include <numeric>

namespace neap::draft {

double PassCosts::of_pass(int64_t num_tokens) const {
  const auto measured = (int64_t)verify.size();
  if (num_tokens <= measured) return verify[num_tokens - 1];
  std::pair<int64_t, double> low{1, verify.front()}, high{measured, verify.back()};
  for (const auto& point : wide) {
    if (high.first >= num_tokens) break;
    low = high, high = point;
  }
  if (high.first == low.first) return high.second;
  return low.second + (high.second - low.second) * (double)(num_tokens - low.first) / (double)(high.first - low.first);
}

double PassCosts::least_survival(const PassLoad& load, double keys_s) const {
  // If a pass of c seconds gives E expected tokens, a draft that makes it d seconds longer must add at least E d / c,
  // and E is at least one per sequence. The least d of all drafts of a sequence, because costs may rise in steps.
  const int64_t num_tokens = load.num_sequences + load.num_others;
  const double cost = of_pass(num_tokens) + load.extra_s;
  double growth = cost;
  for (int64_t draft = 0; draft < std::max<int64_t>(max_drafts(), 1); ++draft)
    growth = std::min(growth, of_pass(num_tokens + draft + 1) - of_pass(num_tokens + draft));
  return std::clamp((double)load.num_sequences * (growth + keys_s) / cost, kMinSurvival, 1.0);
}

double PassCosts::draft_gain_s(const PassLoad& load, double keys_s, double tokens_per_pass) const {
  const int64_t num_tokens = load.num_sequences + load.num_others;
  const double cost = of_pass(num_tokens), growth = of_pass(num_tokens + 1) - cost;
  return (cost + load.extra_s) / (double)load.num_sequences / tokens_per_pass - growth - keys_s;
}

double chain_gain_s(double gain_s, double agreement, const ExitCost& cost, int64_t room) {
  double total_s = gain_s;
  for (int64_t further = 1; further < std::min(cost.num_drafts, room); ++further) {
    gain_s *= agreement;
    if (gain_s <= cost.each_draft_s) break;
    total_s += gain_s - cost.each_draft_s;
  }
  return total_s;
}

std::vector<int> select_sequences(const std::vector<double>& gains_s, const ExitCost& cost) {
  std::vector<int> ordered(gains_s.size());
  std::iota(ordered.begin(), ordered.end(), 0);
  std::stable_sort(ordered.begin(), ordered.end(), [&](int a, int b) { return gains_s[a] > gains_s[b]; });
  size_t best = 0;
  double best_s = 0.0, sum_s = 0.0;
  for (size_t count = 1; count <= ordered.size(); ++count) {
    sum_s += gains_s[ordered[count - 1]];
    const double net_s = sum_s - cost.of((int64_t)count);
    if (net_s > best_s) best = count, best_s = net_s;
  }
  ordered.resize(best);
  std::sort(ordered.begin(), ordered.end());
  return ordered;
}

std::vector<int64_t> best_lengths(const std::vector<PlannedChain>& chains, const PassCosts& costs,
                                  const PassLoad& load) {
  struct Candidate {
    double reach, value;
    size_t chain;
  };
  std::vector<int64_t> lengths;
  std::vector<Candidate> candidates;
  if (chains.empty()) return lengths;
  double expected = (double)chains.size(), keys_s = 0.0;
  int64_t num_tokens = (int64_t)chains.size() + load.num_others;
  const int64_t many = std::max<int64_t>(costs.max_drafts(), 1);
  const double growth = std::max((costs.of_pass(num_tokens + many) - costs.of_pass(num_tokens)) / (double)many, 1e-9);
  for (size_t index = 0; index < chains.size(); ++index) {
    const PlannedChain& chain = chains[index];
    double reach = 1.0;
    for (int64_t i = 0; i < std::min(chain.count, costs.max_drafts()); ++i) {
      reach *= chain.probabilities[i];
      if (i < chain.least) expected += reach;
      else candidates.push_back({reach, reach / (growth + chain.keys_s), index});
    }
    num_tokens += chain.least;
    keys_s += (double)chain.least * chain.keys_s;
    lengths.push_back(chain.least);
  }
  // No draft of a chain is worth more than the one before it. So whoever takes the one that is worth most never
  // skips one.
  std::stable_sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
    return a.value > b.value || (a.value == b.value && a.chain < b.chain);
  });
  size_t best = 0;
  double best_rate = expected / (costs.of_pass(num_tokens) + load.extra_s + keys_s);
  for (size_t count = 1; count <= candidates.size(); ++count) {
    const Candidate& next = candidates[count - 1];
    expected += next.reach;
    keys_s += chains[next.chain].keys_s;
    const double rate = expected / (costs.of_pass(num_tokens + (int64_t)count) + load.extra_s + keys_s);
    if (rate > best_rate) best = count, best_rate = rate;
  }
  for (size_t i = 0; i < best; ++i) ++lengths[candidates[i].chain];
  return lengths;
}

}  // namespace neap::draft
