// What a layer exit computes from its head's result, and the arguments as plain structs for the CPU and GPU kernels.
// No torch.
//
//   top       = the k largest of rows @ adapted + bias
//   probability = sigmoid(shift + output @ silu(hidden @ unit(adapted) + features...) + skip @ features)
//
// unit: RMS norm without gain.
#pragma once
#include "elements.h"

namespace neap {

constexpr int kMaxTop = 8;  // largest k of the k best tokens of a draft vocabulary
// log p(top), p(top) - p(second), (distance - 1) / 4: see scalar_features in shared/ladder/routers.py.
constexpr int kFeatures = 3;
// Draft vocabulary rows per block. Each block's k best are found first, then joined.
constexpr int64_t kVocabularyBlock = 64;
NEAP_ANYWHERE constexpr int64_t vocabulary_blocks(int64_t rows) { return ceil_div(rows, kVocabularyBlock); }

// Weights are row-major and contiguous, [out, in].
struct Weight {
  const void* data;
  Dtype dtype;
  int64_t rows, columns;
};

struct NormArgs {
  const void* x;  // [tokens, width], rows `x_stride` elements apart
  Dtype dtype;
  float* out;  // [tokens, width], rows `out_stride` apart
  int64_t width, x_stride, out_stride;
  float eps;
};

struct RowDotsArgs {
  const float* x;  // [tokens, weight.columns], rows `x_stride` apart
  Weight weight;
  float* out;  // [tokens, weight.rows] contiguous
  int64_t tokens, x_stride;
};

struct DraftTopArgs {
  const float* x;  // [tokens, rows.columns] contiguous
  Weight rows;
  const float* bias;  // [rows.rows] or null
  int64_t tokens;
  int k;
  // Per (vocabulary block, token): the k largest logits, descending, and their rows; the maximum and the sum of
  // exp(logit - maximum).
  float* block_values;  // [blocks, tokens, k]
  int32_t* block_indices;
  float* block_mass;  // [blocks, tokens, 2]
  float* values;      // [tokens, k]
  int64_t* indices;   // [tokens, k]
  float* log_mass;    // [tokens]
};

struct RouteArgs {
  const void* x;  // [tokens, hidden.columns], rows `x_stride` apart; float32 or of hidden's type
  Dtype dtype;
  Weight hidden;                // [width, D]
  const float *bias, *output;   // [width]
  const float* feature_weight;  // [kFeatures, width]
  const float* skip;            // [kFeatures]
  const float *top, *log_mass;  // [tokens, k >= 1], [tokens]
  const int64_t* distance;      // [tokens]: the draft's place in its chain, at least 1
  int64_t tokens, x_stride;
  int k;
  float shift, eps, lowest, highest;
  float* inner;        // [tokens, width] (CPU) or partial sums [tokens, blocks] (GPU)
  uint32_t* tickets;   // GPU: [token tiles], zero before and after
  float* probability;  // [tokens]
};

// Launches of the GPU kernels on `stream`. They return 0 or a CUDA error. The caller allocates all buffers.
int launch_draft_top(const DraftTopArgs& args, void* stream);
int launch_route(const RouteArgs& args, void* stream);
const char* cuda_error(int code);

// Tokens, and rows of the hidden layer, per block of the GPU's router kernel, and the resulting grid.
constexpr int64_t kRouteTokens = 8, kRouteRows = 4;
constexpr int64_t route_tiles(int64_t tokens) { return ceil_div(tokens, kRouteTokens); }
constexpr int64_t route_blocks(int64_t width) { return ceil_div(width, kRouteRows); }

}  // namespace neap
