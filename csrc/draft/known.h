// What tables say of a context, and how sure that is.
#pragma once
#include "rating.h"

namespace neap::draft {

inline constexpr int kMaxOrder = 4, kMaxMatch = 8, kMaxOccurrences = 16;

// `token` followed a context of `length` tokens `count` times, a `share` of all times that are known.
struct Match {
  int32_t token, length, count;
  double share;
};

struct Matches {
  Match of[kMaxOrder];
  int count = 0;
};

// The commonest of the tokens that followed a context of `length` tokens, the latest of them first. Of equally common
// ones the latest.
NEAP_BOTH inline Match commonest(const int32_t* followers, int count, int length) {
  Match best{0, length, 0, 0.0};
  for (int i = 0; i < count; ++i) {
    int times = 0;
    for (int other = 0; other < count; ++other) times += followers[other] == followers[i];
    if (times > best.count) best.token = followers[i], best.count = times;
  }
  best.share = (double)best.count / count;
  return best;
}

// One order of an n-gram table: sorted keys, and for each a token, its count and its share in 255ths.
struct NgramOrder {
  const uint32_t* keys;
  const uint32_t* tokens;
  const uint8_t* counts;
  const uint8_t* shares;
  int64_t size;
};

// One match per order whose context is known, the longest context first.
NEAP_BOTH inline Matches ngram_matches(const NgramOrder* orders, const int32_t* tail, int length) {
  Matches found;
  uint64_t state = 0, states[kMaxOrder];
  const int most = least_of(kMaxOrder, length);
  for (int order = 0; order < most; ++order) states[order] = state = extend_hash(state, tail[length - 1 - order]);
  for (int order = most - 1; order >= 0; --order) {
    const NgramOrder& table = orders[order];
    const auto key = (uint32_t)(states[order] >> 32);
    int64_t low = 0, high = table.size;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (table.keys[middle] < key) low = middle + 1;
      else high = middle;
    }
    if (low == table.size || table.keys[low] != key) continue;
    found.of[found.count++] = {(int32_t)table.tokens[low], order + 1, table.counts[low], table.shares[low] / 255.0};
  }
  return found;
}

// The entries of a table that learns from answers, in sets.
struct LearnedEntry {
  uint32_t key;
  int32_t first, second;  // the two commonest followers of a context
  // How often the context occurred (0: an empty entry), and these two after it.
  uint8_t total, first_count, second_count, unused;
};
inline constexpr int kSetEntries = 4;

struct LearnedView {
  const LearnedEntry* entries;
  int64_t num_sets;

  NEAP_BOTH int64_t first_of(uint64_t state) const {
    return (int64_t)((state & 0xFFFFFFFF) % (uint64_t)num_sets) * kSetEntries;
  }
  // The entry of a context, or -1.
  NEAP_BOTH int64_t find(uint64_t state) const {
    const int64_t first = first_of(state);
    for (int64_t at = first; at < first + kSetEntries; ++at)
      if (entries[at].key == (uint32_t)(state >> 32) && entries[at].total) return at;
    return -1;
  }
  // As of `ngram_matches`. Hashes begin with the client's salt.
  NEAP_BOTH Matches matches(uint64_t salt, const int32_t* tail, int length) const {
    Matches found;
    uint64_t state = salt, states[kMaxOrder];
    const int most = least_of(kMaxOrder, length);
    for (int order = 0; order < most; ++order) states[order] = state = extend_hash(state, tail[length - 1 - order]);
    for (int order = most - 1; order >= 0; --order) {
      const int64_t at = find(states[order]);
      if (at < 0) continue;
      const LearnedEntry& entry = entries[at];
      found.of[found.count++] = {entry.first, order + 1, entry.first_count, (double)entry.first_count / entry.total};
    }
    return found;
  }
};

// A value belongs to the last bin whose lower edge it reaches.
template <int N>
NEAP_BOTH inline int bin_of(double value, const double (&edges)[N]) {
  int bin = 0;
  while (bin + 1 < N && value >= edges[bin + 1]) ++bin;
  return bin;
}

// Logistic regression over binned features of a match: see `shared.ladder.table_confidence`.
struct TableConfidence {
  double bias;
  double length[8], count[8], share[8], chained[5], opinion[3];

  // `opinion_token`: what another table proposes; -1 if it is silent.
  NEAP_BOTH double probability(const Match& match, int32_t opinion_token, int num_chained) const {
    constexpr double kCountEdges[] = {1, 2, 3, 4, 6, 10, 20, 60};
    constexpr double kShareEdges[] = {0.0, 0.25, 0.4, 0.55, 0.7, 0.85, 0.95, 0.995};
    const int opinion_bin = opinion_token < 0 ? 0 : opinion_token == match.token ? 2 : 1;
    // Shares are kept in 255ths, so they are read as such.
    const int step = (int)nearbyint(match.share * 255);
    const int share_bin = step >= 255 ? 7 : bin_of((step + 0.5) / 256, kShareEdges);
    const double score = bias + length[least_of(match.length, 8) - 1] + count[bin_of(match.count, kCountEdges)] +
                         share[share_bin] + chained[least_of(num_chained, 4)] + opinion[opinion_bin];
    return limited(1.0 / (1.0 + exp(-score)), 1e-3, 0.999);
  }
};

// What the tables of a router and of its server know.
struct Tables {
  bool has_lookup = false, has_ngrams = false;  // `ngrams`: confidence of the n-gram table and of the learned one
  TableConfidence lookup, ngrams;
  NgramOrder orders[kMaxOrder] = {};
  JointWeights weights;
  int64_t vocabulary_size = 0;
};

// The most that these say of one position.
inline constexpr int kMostSaidByTables = 1 + 2 * kMaxOrder;

// Writes what they say of the place after `tail`, in the order of their numbers. `found`: the look-up's match, if
// it has a `count`. Returns how much.
NEAP_BOTH inline int say(const Tables& tables, const LearnedView& learned, uint64_t salt, const Match& found,
                         const int32_t* tail, int length, int num_chained, Draft* drafts) {
  int count = 0;
  Matches ngrams;
  if (tables.orders[0].keys) ngrams = ngram_matches(tables.orders, tail, length);
  if (found.count) {
    // Its second opinion is the match of the longest context.
    const double probability = tables.lookup.probability(found, ngrams.count ? ngrams.of[0].token : -1, num_chained);
    drafts[count++] = {found.token, kPromptLookup, probability};
  }
  if (!tables.has_ngrams) return count;
  const int32_t opinion = found.count ? found.token : -1;
  for (int i = 0; i < ngrams.count; ++i)
    drafts[count++] = {ngrams.of[i].token, kNgramTable, tables.ngrams.probability(ngrams.of[i], opinion, num_chained)};
  if (!learned.entries) return count;
  const Matches known = learned.matches(salt, tail, length);
  for (int i = 0; i < known.count; ++i)
    drafts[count++] = {known.of[i].token, kLearned, tables.ngrams.probability(known.of[i], opinion, num_chained)};
  return count;
}

}  // namespace neap::draft
