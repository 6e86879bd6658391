// What is known of contexts: prompt look-up, the n-gram table of a router, and the table that learns from answers.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "hash.h"
#include "known.h"

namespace neap::draft {

// Maps every context of 1 to kMaxMatch tokens of a sequence to the tokens that followed it.
//
// Most contexts of more than a few tokens occur once, so a context that has occurred once stands for all longer ones
// that end at its place. They get entries of their own when it occurs again.
class PromptLookup {
 public:
  void append(int32_t token);
  // What most often followed the longest known suffix of `tail`, whose last tokens may be drafts. Of tokens with equal
  // counts the latest wins. A `count` of 0: none is known.
  Match propose(const int32_t* tail, int length);

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

// An n-gram table that learns from answers, for each client apart: hashes begin with the client's salt. New contexts
// replace the rarest of their set.
class LearnedNgrams {
 public:
  explicit LearnedNgrams(int64_t num_sets);
  LearnedView view() const { return {entries_.data(), num_sets_}; }
  // Counts each of `tokens` from number `first` on after the tokens before it.
  void learn(uint64_t salt, const int32_t* tokens, int64_t count, int64_t first);
  int64_t num_entries() const { return num_entries_; }

  // The entries that have changed since the last call; none if they are too many to be noted. They are noted from the
  // first call on.
  std::optional<std::vector<int64_t>> changed();

 private:
  void insert(uint64_t state, int32_t token);
  void count(LearnedEntry& entry, int32_t token);
  void note(int64_t entry);

  int64_t num_sets_, num_entries_ = 0;
  std::vector<LearnedEntry> entries_;
  std::optional<std::vector<int64_t>> changed_;
};

}  // namespace neap::draft
