// One decoder layer of the op `decoder_layers`: the arguments of all its steps, and the run of them.
#pragma once
#include "attention_problem.h"
#include "experts.h"

namespace neap::binding {

// So few tokens are normed by every thread for itself: that takes less time than waiting for each other's part.
inline constexpr int64_t kTokensNormedAlone = 8;

// The arguments of all steps of one layer, shared by the threads that run it.
struct Layer {
  int64_t tokens = 0, ranks = 1, scratch = 0;
  // The latter two, of what attention and the MLP add to the state, without a weight where there are none.
  RowNormArgs input_norm{}, mlp_norm{}, attended_norm{}, output_norm{};
  std::vector<LinearArgs> projections;   // q, k and v, or one for all three
  int64_t q_at = 0, k_at = 0, v_at = 0;  // where head 0 is in the first projection if that is the only one
  PlaceArgs place{};
  std::vector<Slot> slots;
  std::vector<AttentionArgs> problems;  // one per sequence
  bool split_keys = false;
  LinearArgs out{}, inner{}, down{};  // inner: gate and up of the MLP, or its only one before the activation
  Experts experts{};                  // in place of inner and down, if it has tokens
  // What follows the MLP, if there is a norm: h + norm(given_out(given_gate(h) * given)), all times a scale.
  LinearArgs given_gate{}, given_out{};
  RowNormArgs given_norm{};
  const float* given = nullptr;  // [tokens, given_gate.out_features], tokens `given_row` apart
  int64_t given_row = 0;
  // *_ends: running totals, see each_loop.
  std::vector<int64_t> projection_items, projection_ends, problem_ends, block_ends;
  int64_t out_items = 0, inner_items = 0, down_items = 0, given_gate_items = 0, given_out_items = 0;
  float *scratches = nullptr, *normed = nullptr;

  bool norms_alone() const { return tokens <= kTokensNormedAlone; }
  int64_t ranks_wanted() const;
  void lay_out(Arena* arena, int64_t width);
  void count(const Kernels& kernels);
  void run(Team& team) const;
};

}  // namespace neap::binding
