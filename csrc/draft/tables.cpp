#include "tables.h"

#include <algorithm>

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

Match PromptLookup::propose(const int32_t* tail, int length) {
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
  if (!longest) return {};
  int32_t followers[kMaxOccurrences];
  for (int back = 0; back < longest->count; ++back) followers[back] = longest->from_latest(back);
  return commonest(followers, longest->count, matched);
}

LearnedNgrams::LearnedNgrams(int64_t num_sets) : num_sets_(num_sets), entries_(num_sets * kSetEntries) {}

void LearnedNgrams::learn(uint64_t salt, const int32_t* tokens, int64_t count, int64_t first) {
  for (int64_t place = std::max<int64_t>(first, 0); place < count; ++place) {
    uint64_t state = salt;
    for (int back = 1; back <= kMaxOrder && back <= place; ++back) {
      state = extend_hash(state, tokens[place - back]);
      const int64_t entry = view().find(state);
      entry < 0 ? insert(state, tokens[place]) : this->count(entries_[entry], tokens[place]);
      if (entry >= 0) note(entry);
    }
  }
}

void LearnedNgrams::insert(uint64_t state, int32_t token) {
  const auto first = entries_.begin() + view().first_of(state);
  LearnedEntry& entry = *std::min_element(
      first, first + kSetEntries, [](const LearnedEntry& a, const LearnedEntry& b) { return a.total < b.total; });
  num_entries_ += !entry.total;
  entry = {(uint32_t)(state >> 32), token, entry.second, 1, 1, 0, 0};
  note(&entry - entries_.data());
}

void LearnedNgrams::count(LearnedEntry& entry, int32_t token) {
  constexpr int kMaxCount = 255;
  if (entry.total == kMaxCount) {
    entry.total /= 2;
    entry.first_count = std::max(entry.first_count / 2, 1);
    entry.second_count /= 2;
  }
  ++entry.total;
  if (entry.first == token) {
    ++entry.first_count;
    return;
  }
  const bool is_second = entry.second_count && entry.second == token;
  entry.second_count = is_second ? entry.second_count + 1 : 1;
  entry.second = token;
  if (entry.second_count > entry.first_count) {
    std::swap(entry.first_count, entry.second_count);
    std::swap(entry.first, entry.second);
  }
}

void LearnedNgrams::note(int64_t entry) {
  constexpr size_t kMostNoted = 1 << 16;
  if (!changed_) return;
  changed_->push_back(entry);
  // Nobody may ever ask.
  if (changed_->size() > kMostNoted) changed_.reset();
}

std::optional<std::vector<int64_t>> LearnedNgrams::changed() {
  std::optional<std::vector<int64_t>> found = std::exchange(changed_, std::vector<int64_t>());
  if (!found) return found;
  std::sort(found->begin(), found->end());
  found->erase(std::unique(found->begin(), found->end()), found->end());
  return found;
}

}  // namespace neap::draft
