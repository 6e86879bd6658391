// The k largest logits of a draft vocabulary and the log of the sum of exponentials of all, without storing all logits.
#pragma once
#include "row_dots.h"

namespace neap::NEAP_ISA {

// Inserts `value` into the k largest so far, which are in descending order. The earlier of equal values comes
// first. Ignores NaN.
template <class Index>
NEAP_INLINE void keep_top(float value, Index index, float* values, Index* indices, int k) {
  if (!(value > values[k - 1])) return;
  int at = k - 1;
  for (; at > 0 && value > values[at - 1]; --at) {
    values[at] = values[at - 1];
    indices[at] = indices[at - 1];
  }
  values[at] = value;
  indices[at] = index;
}

// Initialises the k largest to -infinity.
template <class Index>
NEAP_INLINE void keep_nothing(float* values, Index* indices, int k) {
  for (int i = 0; i < k; ++i) {
    values[i] = -__builtin_inff();
    indices[i] = 0;
  }
}

// Writes the k largest of a block's `count` logits, and their mass, to place `at` of the block buffers. `line` has room
// for a whole block.
inline void summarise_block(const DraftTopArgs& args, float* line, int64_t first, int64_t count, int64_t at) {
  for (int64_t i = count; i < kVocabularyBlock; ++i) line[i] = -__builtin_inff();
  float* values = args.block_values + at * args.k;
  int32_t* indices = args.block_indices + at * args.k;
  keep_nothing(values, indices, args.k);
  for (int64_t i = 0; i < count; ++i) keep_top(line[i], (int32_t)(first + i), values, indices, args.k);
  // The shift must be finite even if every logit is -infinity: the mass is then 0, not NaN.
  const float shift = values[0] > -__builtin_inff() ? values[0] : 0.f;
  Vec mass = {};
  for (int64_t i = 0; i < kVocabularyBlock; i += kLanes) mass = mass + exp(load(line + i) - splat(shift));
  args.block_mass[at * 2] = shift;
  args.block_mass[at * 2 + 1] = sum_lanes(mass);
}

// Finds the k largest logits and the mass within each vocabulary block. Item: kVocabularyBlock rows, for all tokens.
inline void draft_blocks(const DraftTopArgs& args, int64_t begin, int64_t end) {
  const int64_t size = args.rows.rows, width = args.rows.columns;
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * kVocabularyBlock, last = min64(size, first + kVocabularyBlock), count = last - first;
    for (int64_t token = 0; token < args.tokens; token += kTokenGroup) {
      const int64_t tokens = min64(kTokenGroup, args.tokens - token);
      alignas(64) float logits[kTokenGroup][kVocabularyBlock];
      dot_rows(args.rows, args.x + token * width, width, first, last, tokens, logits[0], kVocabularyBlock);
      for (int64_t t = 0; t < tokens; ++t) {
        if (args.bias)
          for (int64_t i = 0; i < count; ++i) logits[t][i] += args.bias[first + i];
        summarise_block(args, logits[t], first, count, block * args.tokens + token + t);
      }
    }
  }
}

// The same from logits that are known, x [tokens, rows.rows].
inline void logit_blocks(const DraftTopArgs& args, int64_t begin, int64_t end) {
  const int64_t size = args.rows.rows;
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * kVocabularyBlock, count = min64(size - first, kVocabularyBlock);
    for (int64_t token = 0; token < args.tokens; ++token) {
      alignas(64) float line[kVocabularyBlock];
      for (int64_t i = 0; i < count; ++i) line[i] = args.x[token * size + first + i];
      summarise_block(args, line, first, count, block * args.tokens + token);
    }
  }
}

// Joins the results of all vocabulary blocks. Item: a token.
inline void draft_join(const DraftTopArgs& args, int64_t begin, int64_t end) {
  const int64_t blocks = vocabulary_blocks(args.rows.rows);
  for (int64_t token = begin; token < end; ++token) {
    float* values = args.values + token * args.k;
    int64_t* indices = args.indices + token * args.k;
    keep_nothing(values, indices, args.k);
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t at = block * args.tokens + token;
      for (int i = 0; i < args.k; ++i)
        keep_top(args.block_values[at * args.k + i], (int64_t)args.block_indices[at * args.k + i], values, indices,
                 args.k);
    }
    const float shift = values[0] > -__builtin_inff() ? values[0] : 0.f;
    float total = 0.f;
    for (int64_t block = 0; block < blocks; ++block) {
      const float* mass = args.block_mass + (block * args.tokens + token) * 2;
      total += mass[1] * __builtin_expf(mass[0] - shift);
    }
    args.log_mass[token] = shift + __builtin_logf(total);
  }
}

}  // namespace neap::NEAP_ISA
