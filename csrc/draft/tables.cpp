#include "tables.h"

#include <algorithm>
#include <cmath>

namespace neap::draft {

void PromptLookup::Followers::add(int32_t token) {
  tokens[next] = token;
  next = (next + 1) % kMaxOccurrences;
  count = std::min(count + 1, kMaxOccurrences);
}

int32_t PromptLookup::Followers::from_latest(int back) const {
  return tokens[(next - 1 - back + 2 * kMaxOccurrences) % kMaxOccurrences];
}

void PromptLookup::append(int32_t token) {
  const auto now = (int32_t)tokens_.size();
  uint64_t key = secret();
  for (int length = 1; length <= std::min(kMaxMatch, now); ++length) {
    key = extend_hash(key, tokens_[now - length]);
    const auto [known, is_new] = contexts_.insert(key, now);
    if (is_new) break;
    if (*known < 0) {
      followers_[-1 - *known].add(token);
      continue;
    }
    // The second occurrence: the longer context of the first one gets its own entry.
    const int32_t before = *known;
    *known = -1 - (int32_t)followers_.size();
    followers_.emplace_back();
    followers_.back().add(tokens_[before]);
    followers_.back().add(token);
    if (length < kMaxMatch && before - length - 1 >= 0) {
      uint64_t longer = secret();
      for (int back = 1; back <= length + 1; ++back) longer = extend_hash(longer, tokens_[before - back]);
      *contexts_.insert(longer, before).first = before;
    }
  }
  tokens_.push_back(token);
}

std::optional<Match> PromptLookup::propose(const int32_t* tail, int length) {
  const Followers* longest = nullptr;
  int matched = 0;
  uint64_t key = secret();
  for (int size = 1; size <= std::min(kMaxMatch, length); ++size) {
    key = extend_hash(key, tail[length - size]);
    const int32_t* known = contexts_.find(key);
    if (!known) break;
    if (*known >= 0) {
      int same = size;
      const int most = std::min({kMaxMatch, length, (int)*known});
      while (same < most && tail[length - 1 - same] == tokens_[*known - 1 - same]) ++same;
      return Match{tokens_[*known], same, 1, 1.0};
    }
    longest = &followers_[-1 - *known];
    matched = size;
  }
  if (!longest) return std::nullopt;
  int32_t best = 0;
  int best_count = 0;
  for (int back = 0; back < longest->count; ++back) {
    const int32_t token = longest->from_latest(back);
    int times = 0;
    for (int i = 0; i < longest->count; ++i) times += longest->tokens[i] == token;
    if (times > best_count) best = token, best_count = times;
  }
  return Match{best, matched, best_count, (double)best_count / longest->count};
}

Matches ngram_matches(const NgramOrder* orders, const int32_t* tail, int length) {
  Matches found;
  uint64_t state = 0, states[kMaxOrder];
  const int most = std::min(kMaxOrder, length);
  for (int order = 0; order < most; ++order) states[order] = state = extend_hash(state, tail[length - 1 - order]);
  for (int order = most - 1; order >= 0; --order) {
    const NgramOrder& table = orders[order];
    const auto key = (uint32_t)(states[order] >> 32);
    const uint32_t* at = std::lower_bound(table.keys, table.keys + table.size, key);
    if (at == table.keys + table.size || *at != key) continue;
    const int64_t entry = at - table.keys;
    found.of[found.count++] = {(int32_t)table.tokens[entry], order + 1, table.counts[entry],
                               table.shares[entry] / 255.0};
  }
  return found;
}

LearnedNgrams::LearnedNgrams(int64_t num_sets)
    : num_sets_(num_sets),
      keys_(num_sets * kSetEntries),
      firsts_(num_sets * kSetEntries),
      seconds_(num_sets * kSetEntries),
      totals_(num_sets * kSetEntries),
      first_counts_(num_sets * kSetEntries),
      second_counts_(num_sets * kSetEntries) {}

int64_t LearnedNgrams::find(uint64_t state) const {
  const int64_t first = set_of(state);
  for (int64_t entry = first; entry < first + kSetEntries; ++entry)
    if (keys_[entry] == (uint32_t)(state >> 32) && totals_[entry]) return entry;
  return -1;
}

Matches LearnedNgrams::matches(uint64_t salt, const int32_t* tail, int length) const {
  Matches found;
  uint64_t state = salt, states[kMaxOrder];
  const int most = std::min(kMaxOrder, length);
  for (int order = 0; order < most; ++order) states[order] = state = extend_hash(state, tail[length - 1 - order]);
  for (int order = most - 1; order >= 0; --order) {
    const int64_t entry = find(states[order]);
    if (entry < 0) continue;
    const int times = first_counts_[entry];
    found.of[found.count++] = {firsts_[entry], order + 1, times, (double)times / totals_[entry]};
  }
  return found;
}

void LearnedNgrams::learn(uint64_t salt, const int32_t* tokens, int64_t count, int64_t first) {
  for (int64_t place = std::max<int64_t>(first, 0); place < count; ++place) {
    uint64_t state = salt;
    for (int back = 1; back <= kMaxOrder && back <= place; ++back) {
      state = extend_hash(state, tokens[place - back]);
      const int64_t entry = find(state);
      entry < 0 ? insert(state, tokens[place]) : this->count(entry, tokens[place]);
    }
  }
}

void LearnedNgrams::insert(uint64_t state, int32_t token) {
  const int64_t first = set_of(state);
  const int64_t entry =
      std::min_element(totals_.begin() + first, totals_.begin() + first + kSetEntries) - totals_.begin();
  num_entries_ += !totals_[entry];
  keys_[entry] = (uint32_t)(state >> 32);
  firsts_[entry] = token;
  totals_[entry] = first_counts_[entry] = 1;
  second_counts_[entry] = 0;
}

void LearnedNgrams::count(int64_t entry, int32_t token) {
  if (totals_[entry] == kMaxCount) {
    totals_[entry] /= 2;
    first_counts_[entry] = std::max(first_counts_[entry] / 2, 1);
    second_counts_[entry] /= 2;
  }
  ++totals_[entry];
  if (firsts_[entry] == token) {
    ++first_counts_[entry];
    return;
  }
  const bool is_second = second_counts_[entry] && seconds_[entry] == token;
  second_counts_[entry] = is_second ? second_counts_[entry] + 1 : 1;
  seconds_[entry] = token;
  if (second_counts_[entry] > first_counts_[entry]) {
    std::swap(first_counts_[entry], second_counts_[entry]);
    std::swap(firsts_[entry], seconds_[entry]);
  }
}

namespace {

// A value belongs to the last bin whose lower edge it reaches.
template <size_t N>
int bin_of(double value, const double (&edges)[N]) {
  int bin = 0;
  while (bin + 1 < (int)N && value >= edges[bin + 1]) ++bin;
  return bin;
}

constexpr double kCountEdges[] = {1, 2, 3, 4, 6, 10, 20, 60};
constexpr double kShareEdges[] = {0.0, 0.25, 0.4, 0.55, 0.7, 0.85, 0.95, 0.995};
constexpr double kLowest = 1e-3, kHighest = 0.999;

}  // namespace

double TableConfidence::probability(const Match& match, std::optional<int32_t> opinion_token, int num_chained) const {
  const int opinion_bin = !opinion_token ? 0 : *opinion_token == match.token ? 2 : 1;
  // Shares are kept in 255ths, so they are read as such.
  const int step = (int)std::nearbyint(match.share * 255);
  const int share_bin = step >= 255 ? 7 : bin_of((step + 0.5) / 256, kShareEdges);
  const double score = bias + length[std::min(match.length, 8) - 1] + count[bin_of(match.count, kCountEdges)] +
                       share[share_bin] + chained[std::min(num_chained, 4)] + opinion[opinion_bin];
  return std::clamp(1.0 / (1.0 + std::exp(-score)), kLowest, kHighest);
}

}  // namespace neap::draft
