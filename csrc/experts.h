// The MLP of a layer with experts: several gated MLPs, of which each token passes a few. Its tokens are put in the
// order of their experts, so that each expert's weights are read once.
#pragma once
#include "binding.h"
#include "team.h"

namespace neap::binding {

// The matrices of an expert, without whether they round their inputs: that is read from their headers when they are
// multiplied. Headers of hundreds of experts, each in a page of its own, take too long to read in every pass.
// Biases are null without: of gate and of up [2 * intermediate], and of down [width].
struct Expert {
  Matrix gate, up, down;
  const float *inner_bias, *bias;
};

// What `expert_table` has made.
struct ExpertTable {
  const Expert* experts = nullptr;
  int64_t count = 0, width = 0, intermediate = 0;
};
ExpertTable experts_of(const char* op, const void* table, int64_t bytes);
template <class T>
ExpertTable experts_of(const char* op, const T& table) {
  const bool fits = table.is_cpu() && table.is_contiguous() && table.scalar_type() == ScalarType::Byte;
  return experts_of(op, table.const_data_ptr(), fits ? table.numel() : 0);
}

// The arguments of all steps, shared by the threads that run them.
struct Experts {
  ExpertTable table;
  int64_t tokens = 0, ranks = 1;
  Activation activation = kSilu;
  LinearArgs router{};  // without a matrix, if choices are given
  ExpertChoiceArgs choice{};
  ExpertSumArgs sum{};
  float *x = nullptr, *sorted = nullptr, *inner = nullptr, *made = nullptr;
  // What the choices decide. Groups are the experts that have tokens: number, first row among `sorted`, and running
  // totals of their products' items.
  int64_t *places = nullptr, *token_of = nullptr, *starts = nullptr, *num_groups = nullptr;
  int64_t *group_expert = nullptr, *group_first = nullptr, *inner_ends = nullptr, *down_ends = nullptr;
  int64_t router_items = 0;

  int64_t pairs() const { return tokens * choice.chosen; }
  int64_t most_groups() const { return std::min(pairs(), table.count); }
  double flops() const { return 3. * (double)pairs() * (double)table.width * (double)table.intermediate; }
  void lay_out(Arena* arena);
  // Reads x [tokens, width], which all threads see, and writes `sum.out`.
  void run(Team& team) const;

 private:
  LinearArgs product(int64_t group, bool is_down) const;
  void sort() const;
  void multiply(Team& team, bool is_down) const;
};

// Whether a call of the op may choose so many experts.
void check_chosen(const char* op, int64_t chosen, int64_t count);

// experts.cpp
Tensor expert_table(std::vector<Tensor> packed, std::optional<Tensor> inner_bias, std::optional<Tensor> bias);
std::tuple<Tensor, Tensor, Tensor> choose_experts(Tensor x, Tensor router, int64_t num_experts, int64_t chosen,
                                                  bool normed, std::optional<Tensor> bias);
Tensor experts(Tensor x, Tensor index, Tensor shares, Tensor table, std::string activation);

}  // namespace neap::binding
