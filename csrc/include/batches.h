// Drafts verified, as plain structs for the CPU's and the GPU's kernels.
#pragma once
#include <cstdint>

namespace neap {

enum Weighting : int32_t { kWeights32 = 0, kWeights16 = 1, kWeightsB16 = 2, kWeights64 = 3 };

struct VerifyArgs {
  const void* scores;     // [rows, vocabulary], rows `stride` elements apart: logits, or probabilities where `uniforms`
  const void* proposed;   // [rows, vocabulary] probabilities a draft was drawn with, of the same type, or null: drafts are certain
  const int64_t* drafts;  // [rows]: what was drafted at the row; what is no token (-1) stands for nothing
  const int64_t* starts;  // [sequences + 1]: the rows of each sequence
  const double* uniforms; // [rows] in [0, 1), or null: greedy
  int64_t* choices;       // [rows]
  int64_t* accepted;      // [sequences]
  Weighting type;
  int64_t rows, vocabulary, sequences, stride, proposed_stride;
};

int launch_verify(const VerifyArgs& args, void* stream);

}  // namespace neap
