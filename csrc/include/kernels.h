// The interface between the bindings and the CPU kernels: plain structs, and a table of functions per instruction set.
// No torch.
#pragma once
#include <cstdint>

#include "choices.h"
#include "exits.h"
#include "formats.h"

namespace neap {

constexpr int64_t kKeyBlock = 256;  // keys per step of the online softmax
constexpr int64_t kQueryRows = 48;  // (query, head) pairs that share one read of the keys

// kClampedSwish: that of gpt-oss. It clamps `up`, too, and adds one to it.
enum Activation : int32_t { kIdentity, kSilu, kGeluTanh, kGelu, kRelu, kClampedSwish };

// The first of the largest numbers of a row so far: its value, infinite if one was a NaN, and its place.
struct Best {
  float value;
  int64_t place;
};

struct LinearArgs {
  const float* x;     // [rows, in_features], rows `x_stride` apart
  Matrix weight, up;  // `up` only if gated; then `weight` is the gate's
  const float* bias;  // [out_features], gated: [2 * out_features] (gate, then up), or null
  float* out;         // [rows, out_features] contiguous
  int64_t rows, in_features, out_features, x_stride;
  bool gated;  // out = activation(gate) * up
  Activation activation;
  const float* residuals[2];  // [rows, out_features] contiguous, added last, one after the other, or null
  Best* best;                 // [rows] or null: kept of what x @ weight.T gives, in place of writing `out`
};

// An RMS norm, or with a bias a layer norm, which also subtracts the row's mean.
struct RowNormArgs {
  const float* x;              // [rows, width], rows `x_stride` apart
  const float *weight, *bias;  // [width] or null
  const float* residual;       // [rows, width] contiguous, added, or null
  const float* scale;          // [1] or null: the result is multiplied by it last
  float* out;                  // [rows, width] contiguous
  int64_t width, x_stride;
  float eps, weight_offset;
};

struct RotaryArgs {
  const float *x, *cos, *sin;  // x [batch, heads, length, width]; last dimensions contiguous
  float* out;                  // [batch, heads, length, width] contiguous
  int64_t heads, length, width;
  int64_t x_batch, x_head, x_row;
  int64_t angle_batch, angle_row;  // strides of cos and sin, which share them; angle_batch is 0 to broadcast
};

// One token's place in KV memory: its key and value of head 0, and the bytes from there to the next head's.
struct Slot {
  uint8_t *key, *value;
  int64_t key_head, value_head;
};

// The steps of a layer between its projections and attention: head norms, rotary positions, writing keys and values.
struct PlaceArgs {
  // [tokens, heads or kv_heads, width or value_width] tokens *_row apart and heads *_head, changed in place.
  float *q, *k, *v;
  const float *q_norm, *k_norm;  // [width] or null
  const float *cos, *sin;        // [angles, rotated]; token t has row t % angles
  const Slot* slots;             // [tokens]
  Dtype kv_dtype;                // of slots
  int64_t q_row, k_row, v_row, q_head, k_head, v_head;
  int64_t heads, kv_heads, width, value_width, rotated, angles;
  float eps, weight_offset;
  bool norms_values;      // without a weight
  float q_scale;          // queries are multiplied by it first
  const float* q_scales;  // [scales] or null: and by these last; token t by number t % scales
  int64_t scales;
};

struct AttentionArgs {
  const float* q;
  const void *k, *v;  // numbers of `kv_dtype`, read as float32 in registers
  Dtype kv_dtype;
  const uint8_t* mask;  // bool [batch or 1, 1, queries, keys] or null
  const float* sinks;   // [heads] or null: of each, the score of a key without a value, which every query sees
  float* out;           // [batch, queries, heads, value_width] contiguous
  float* partials;      // per key block and row: maximum, sum and values (see attention.h); null unless keys are split
  int64_t batch, heads, kv_heads, queries, keys, width, value_width;
  int64_t q_batch, q_head, q_row, q_column;
  int64_t k_batch, k_head, k_row;
  int64_t v_batch, v_head, v_row;
  int64_t mask_batch, mask_row, mask_column;
  bool causal;
  float scaling, softcap;  // softcap 0: none
};

// The experts that a router chooses for each token, and their shares: the softmax of its logits, divided by the sum of
// those chosen if `normed`. The largest logit comes first, of equal ones that of the first expert.
struct ExpertChoiceArgs {
  const float* logits;  // [tokens, experts]
  float* shares;        // [tokens, chosen]
  int64_t* index;       // [tokens, chosen]
  int64_t experts, chosen;
  bool normed;
};

// What the chosen experts add to each token, in the order of choices.
struct ExpertSumArgs {
  const float* made;      // [*, width]
  const int64_t* places;  // [tokens, chosen]: rows of `made`; -1: there is none
  const float* shares;    // [tokens, chosen]
  float* out;             // [tokens, width]
  int64_t width, chosen;
  const float* residuals[2];  // as in LinearArgs
};

// Each function runs items [begin, end) of a parallel loop. The comments say what an item is.
struct Kernels {
  const char* name;
  // A depth block of a panel -> [depth, 16].
  void (*dequantise)(Format, const uint8_t* block, int64_t depth, float* out);
  int64_t (*linear_items)(const LinearArgs&, int64_t threads);  // number of items into which `linear` should be cut
  void (*linear)(const LinearArgs&, int64_t items, int64_t begin, int64_t end);
  void (*row_norm)(const RowNormArgs&, int64_t begin, int64_t end);                      // item: a row
  void (*activate)(Activation, const float* x, float* out, int64_t begin, int64_t end);  // item: a number
  void (*rotary)(const RotaryArgs&, int64_t begin, int64_t end);                         // item: (batch, head)
  void (*place)(const PlaceArgs&, int64_t begin, int64_t end);  // item: (token, head of q, then k, then v)
  void (*round_row)(const float* from, int64_t count, Dtype, void* to);
  int64_t (*attention_scratch)(const AttentionArgs&);  // size of a thread's scratch memory in floats
  // Item: (batch, kv head, query tile), and in attention_split each of its key blocks.
  void (*attention)(const AttentionArgs&, float* scratch, int64_t begin, int64_t end);
  void (*attention_split)(const AttentionArgs&, float* scratch, int64_t begin, int64_t end);
  void (*attention_join)(const AttentionArgs&, float* scratch, int64_t begin, int64_t end);
  void (*choose_experts)(const ExpertChoiceArgs&, int64_t begin, int64_t end);  // item: a token
  void (*sum_experts)(const ExpertSumArgs&, int64_t begin, int64_t end);        // item: a token
  int64_t dot_rows;                                                             // weight rows of an item of row_dots
  void (*row_dots)(const RowDotsArgs&, int64_t begin, int64_t end);             // item: dot_rows rows
  void (*norm)(const NormArgs&, int64_t begin, int64_t end);              // item: a token, also below unless noted
  void (*draft_blocks)(const DraftTopArgs&, int64_t begin, int64_t end);  // item: kVocabularyBlock rows
  void (*logit_blocks)(const DraftTopArgs&, int64_t begin, int64_t end);  // the same, x = logits [tokens, rows.rows]
  void (*draft_join)(const DraftTopArgs&, int64_t begin, int64_t end);
  void (*route_finish)(const RouteArgs&, int64_t begin, int64_t end);
  void (*choose)(const ChoiceArgs&, int64_t begin, int64_t end);  // item: a row of scores
};

// The kernels of the widest instruction set that this machine has, or of the one last selected.
const Kernels& kernels();
// Selects an instruction set by name; "auto" selects the widest. False if this build or machine does not have it.
bool select_kernels(const char* name);

}  // namespace neap
