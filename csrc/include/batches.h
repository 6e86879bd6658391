// Gathering and scattering rows of a batch, and verifying drafts: arguments as plain structs for the CPU and GPU kernels.
#pragma once
#include <cstdint>

namespace neap {

struct RowCopyArgs {
  const char* from;       // rows `from_stride` bytes apart
  char* to;               // rows `to_stride` bytes apart
  const int64_t* index;   // [rows]; gather: to[i] = from[index[i]], scatter: to[index[i]] = from[i]
  const int64_t* count;   // [1] or null: only the first *count indices are used; a gather sets the other rows to zero
  int64_t rows, limit;    // `limit`: rows of the indexed side; an index outside it copies nothing, and a gather sets that row to zero
  int64_t row_bytes, from_stride, to_stride;
  bool scatter;
};

enum Weighting : int32_t { kWeights32 = 0, kWeights16 = 1, kWeightsB16 = 2, kWeights64 = 3 };

struct VerifyArgs {
  const void* scores;     // [rows, vocabulary], rows `stride` elements apart: probabilities if `uniforms` is given, else logits
  const void* proposed;   // [rows, vocabulary] the probabilities that drafts were drawn from, of the same type; null: drafts were not drawn at random
  const int64_t* drafts;  // [rows]: the row's draft; a value that is no token (-1) means none
  const int64_t* starts;  // [sequences + 1]: the rows of each sequence
  const double* uniforms; // [rows] in [0, 1), or null: greedy
  int64_t* choices;       // [rows]: the full model's token at each row
  int64_t* accepted;      // [sequences]: number of leading drafts that equal the choices
  Weighting type;
  int64_t rows, vocabulary, sequences, stride, proposed_stride;
};

int launch_row_copy(const RowCopyArgs& args, void* stream);
int launch_verify(const VerifyArgs& args, void* stream);

}  // namespace neap
