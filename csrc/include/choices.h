// The token that each row of scores chooses, as a plain struct for the CPU's and the GPU's kernels.
#pragma once
#include <cstdint>

namespace neap {

enum Weighting : int32_t { kWeights32 = 0, kWeights16 = 1, kWeightsB16 = 2, kWeights64 = 3 };

struct ChoiceArgs {
  const void* scores;      // [rows, vocabulary], rows `stride` apart: logits, or probabilities where `uniforms`
  const double* uniforms;  // [rows] in [0, 1), or null: greedy
  // [rows]; -1 where the largest score, or the sum of the probabilities, is not finite, or all probabilities are 0.
  int64_t* choices;
  Weighting type;
  int64_t rows, vocabulary, stride;
};

int launch_choose(const ChoiceArgs& args, void* stream);

}  // namespace neap
