// What is known of contexts: prompt look-up, the n-gram table of a router, and the table that learns from answers.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "hash.h"

namespace neap::draft {

inline constexpr int kMaxOrder = 4, kMaxMatch = 8, kMaxOccurrences = 16, kMaxCount = 255;

// `token` followed a context of `length` tokens `count` times, a `share` of all times that are known.
struct Match {
  int32_t token, length, count;
  double share;
};

// Maps every context of 1 to kMaxMatch tokens of a sequence to the tokens that followed it.
//
// Most contexts of more than a few tokens occur once, so a context that has occurred once stands for all longer ones
// that end at its place. They get entries of their own when it occurs again.
class PromptLookup {
 public:
  void append(int32_t token);
  // What most often followed the longest known suffix of `tail`, whose last tokens may be drafts. Of tokens with equal
  // counts the latest wins.
  std::optional<Match> propose(const int32_t* tail, int length);

 private:
  // The last tokens that followed a context, the latest at `next - 1`.
  struct Followers {
    int32_t tokens[kMaxOccurrences];
    int32_t count = 0, next = 0;
    void add(int32_t token);
    int32_t from_latest(int back) const;
  };

  std::vector<int32_t> tokens_;
  std::vector<Followers> followers_;
  // The position of the token that followed if the context has occurred once, else -1 - an index into `followers_`.
  HashTable contexts_;
};

// One order of an n-gram table: sorted keys, and for each a token, its count and its share in 255ths.
struct NgramOrder {
  const uint32_t* keys;
  const uint32_t* tokens;
  const uint8_t* counts;
  const uint8_t* shares;
  int64_t size;
};

struct Matches {
  Match of[kMaxOrder];
  int count = 0;
};

// One match per order whose context is known, the longest context first.
Matches ngram_matches(const NgramOrder* orders, const int32_t* tail, int length);

// An n-gram table that learns from answers, for each client apart: hashes begin with the client's salt. New contexts
// replace the rarest of their set.
class LearnedNgrams {
 public:
  explicit LearnedNgrams(int64_t num_sets);
  Matches matches(uint64_t salt, const int32_t* tail, int length) const;
  // Counts each of `tokens` from number `first` on after the tokens before it.
  void learn(uint64_t salt, const int32_t* tokens, int64_t count, int64_t first);
  int64_t num_entries() const { return num_entries_; }

 private:
  static constexpr int kSetEntries = 4;
  int64_t find(uint64_t state) const;
  int64_t set_of(uint64_t state) const { return (int64_t)((state & 0xFFFFFFFF) % (uint64_t)num_sets_) * kSetEntries; }
  void insert(uint64_t state, int32_t token);
  void count(int64_t entry, int32_t token);

  int64_t num_sets_, num_entries_ = 0;
  std::vector<uint32_t> keys_;
  std::vector<int32_t> firsts_, seconds_;
  // How often the context occurred (0: an empty entry), and its two commonest followers.
  std::vector<uint8_t> totals_, first_counts_, second_counts_;
};

// Logistic regression over binned features of a match: see `shared.ladder.table_confidence`.
struct TableConfidence {
  double bias;
  double length[8], count[8], share[8], chained[5], opinion[3];

  // `opinion_token`: what another table proposes; none if it is silent.
  double probability(const Match& match, std::optional<int32_t> opinion_token, int num_chained) const;
};

}  // namespace neap::draft
