// The token that each row of scores chooses, as a plain struct for the CPU's and the GPU's kernels.
#pragma once
#include "elements.h"

namespace neap {

enum Weighting : int32_t { kWeights32 = 0, kWeights16 = 1, kWeightsB16 = 2, kWeights64 = 3 };

// Scores that a block of a GPU reduces first, and what it makes of them.
constexpr int64_t kChoicePiece = 2048;
NEAP_ANYWHERE constexpr int64_t choice_pieces(int64_t vocabulary) { return ceil_div(vocabulary, kChoicePiece); }
struct ChoicePart {
  double value;   // the largest score, or the sum of the probabilities
  int64_t index;  // of the largest score in its row; -1: all are -infinite
};

struct ChoiceArgs {
  const void* scores;      // [rows, vocabulary], rows `stride` apart: logits, or probabilities where `uniforms`
  const double* uniforms;  // [rows] in [0, 1), or null: greedy
  // [rows]; -1 where the largest score, or the sum of the probabilities, is not finite, or all probabilities are 0.
  int64_t* choices;
  Weighting type;
  int64_t rows, vocabulary, stride;
  ChoicePart* parts;  // GPU: [rows, pieces]
};

int launch_choose(const ChoiceArgs& args, void* stream);

}  // namespace neap
