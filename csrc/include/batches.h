// Rows of a batch taken out and put back, and drafts verified, as plain structs for the CPU's and the GPU's kernels.
#pragma once
#include <cstdint>

namespace neap {

struct RowCopyArgs {
  const char* from;       // rows `from_stride` bytes apart
  char* to;               // rows `to_stride` bytes apart
  const int64_t* index;   // [rows]; gather: to[i] = from[index[i]], scatter: to[index[i]] = from[i]
  const int64_t* count;   // [1] or null: only the first `count` indices are used; a gather's further rows are zero
  int64_t rows, limit;    // `limit`: rows of the indexed side; an index outside it copies nothing, a gathered row is zero
  int64_t row_bytes, from_stride, to_stride;
  bool scatter;
};

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

int launch_row_copy(const RowCopyArgs& args, void* stream);
int launch_verify(const VerifyArgs& args, void* stream);

}  // namespace neap
