// Experts: the steps of their MLP, and the ops of a router and of the experts alone. See experts.h.
#include "experts.h"

#include <cstring>

#include "packed.h"

namespace neap::binding {

namespace {

constexpr char kExpertMagic[8] = {'n', 'e', 'a', 'p', 'e', 'x', 'p', '1'};
constexpr int64_t kMatrices = 3;  // of an expert: gate, up, down

struct ExpertHeader {
  char magic[8];
  int64_t count, width, intermediate;
};

Matrix with_rounding(Matrix matrix) {
  PackedHeader header;
  std::memcpy(&header, matrix.panels - kHeaderBytes, kHeaderBytes);
  matrix.rounds_inputs = header.rounds_inputs == 1;
  return matrix;
}

int64_t* take_integers(Arena* arena, int64_t count) {
  static_assert(sizeof(int64_t) == 2 * sizeof(float), "an arena counts floats");
  return reinterpret_cast<int64_t*>(arena->take(2 * count));
}

}  // namespace

// uint8: a header, and an Expert for each three of `packed`. Keeps them alive.
Tensor expert_table(std::vector<Tensor> packed, std::optional<Tensor> inner_bias, std::optional<Tensor> bias) {
  constexpr const char* kOp = "expert_table";
  NEAP_CHECK(!packed.empty() && packed.size() % kMatrices == 0, kOp, ": ", packed.size(),
             " matrices, want gate, up and down of each expert");
  const PackedView first = packed_view(kOp, "a gate", packed[0]);
  const int64_t width = first.in_features, intermediate = first.out_features;
  NEAP_CHECK(width > 0 && intermediate > 0, kOp, ": a gate is a matrix [", intermediate, ", ", width, "]");
  ExpertHeader header{{}, (int64_t)packed.size() / kMatrices, width, intermediate};
  std::memcpy(header.magic, kExpertMagic, sizeof(kExpertMagic));
  const auto biases = [&](const char* name, const std::optional<Tensor>& each, int64_t size) -> const float* {
    if (!each) return nullptr;
    check_float(kOp, name, *each, 2);
    NEAP_CHECK(each->is_contiguous() && each->size(0) == header.count && each->size(1) == size, kOp, ": ", name,
               " has shape ", text(*each), ", want [", header.count, ", ", size, "], contiguous");
    return floats(*each);
  };
  const float* inner_biases = biases("inner_bias", inner_bias, 2 * intermediate);
  const float* own_biases = biases("bias", bias, width);
  struct Owned {
    std::vector<Tensor> packed;
    std::vector<uint8_t> bytes;
  };
  auto owned = std::make_shared<Owned>();
  owned->bytes.resize(sizeof(header) + header.count * sizeof(Expert));
  std::memcpy(owned->bytes.data(), &header, sizeof(header));
  for (int64_t e = 0; e < header.count; ++e) {
    const Tensor* own = &packed[e * kMatrices];
    const Expert expert{
        .gate = packed_of_size(kOp, "a gate", own[0], intermediate, width),
        .up = packed_of_size(kOp, "an up", own[1], intermediate, width),
        .down = packed_of_size(kOp, "a down", own[2], width, intermediate),
        .inner_bias = inner_biases ? inner_biases + e * 2 * intermediate : nullptr,
        .bias = own_biases ? own_biases + e * width : nullptr,
    };
    std::memcpy(owned->bytes.data() + sizeof(header) + e * sizeof(expert), &expert, sizeof(expert));
  }
  owned->packed = std::move(packed);
  for (const auto& each : {inner_bias, bias})
    if (each) owned->packed.push_back(*each);
  return torch::stable::from_blob(owned->bytes.data(), {(int64_t)owned->bytes.size()}, {1},
                                  torch::stable::Device(torch::headeronly::DeviceType::CPU), ScalarType::Byte,
                                  [owned](void*) mutable { owned.reset(); });
}

ExpertTable experts_of(const char* op, const void* table, int64_t bytes) {
  ExpertHeader header{};
  const bool large = bytes >= (int64_t)sizeof(header);
  if (large) std::memcpy(&header, table, sizeof(header));
  NEAP_CHECK(large && std::memcmp(header.magic, kExpertMagic, sizeof(kExpertMagic)) == 0 &&
                 bytes == (int64_t)(sizeof(header) + header.count * sizeof(Expert)),
             op, ": the experts are not a table; expert_table makes them");
  return {
      .experts = reinterpret_cast<const Expert*>(static_cast<const uint8_t*>(table) + sizeof(header)),
      .count = header.count,
      .width = header.width,
      .intermediate = header.intermediate,
  };
}

void check_chosen(const char* op, int64_t chosen, int64_t count) {
  NEAP_CHECK(chosen > 0 && chosen <= count, op, ": ", chosen, " of ", count, " experts cannot be chosen");
}

void Experts::lay_out(Arena* arena) {
  const int64_t width = table.width, groups = most_groups();
  x = arena->take(tokens * width);
  sorted = arena->take(tokens > 1 ? pairs() * width : 0);
  inner = arena->take(pairs() * table.intermediate);
  made = arena->take(pairs() * width);
  places = take_integers(arena, pairs());
  token_of = take_integers(arena, pairs());
  starts = take_integers(arena, table.count + 1);
  num_groups = take_integers(arena, 1);
  for (int64_t** of_group : {&group_expert, &group_first, &inner_ends, &down_ends})
    *of_group = take_integers(arena, groups + 1);
  if (router.weight.panels) {
    router.out = arena->take(tokens * table.count);
    choice.logits = router.out;
    choice.shares = arena->take(pairs());
    choice.index = take_integers(arena, pairs());
    router.x = x;
    router_items = kernels().linear_items(router, ranks);
  }
  sum.made = made;
  sum.places = places;
  sum.shares = choice.shares;
}

// The product of a group's rows with its expert's gate and up, or down.
LinearArgs Experts::product(int64_t group, bool is_down) const {
  const Expert& expert = table.experts[group_expert[group]];
  const int64_t first = group_first[group], in = is_down ? table.intermediate : table.width;
  return {
      .x = is_down       ? inner + first * in
           : tokens == 1 ? x
                         : sorted + first * in,
      .weight = with_rounding(is_down ? expert.down : expert.gate),
      .up = is_down ? Matrix{} : with_rounding(expert.up),
      .bias = is_down ? expert.bias : expert.inner_bias,
      .out = is_down ? made + first * table.width : inner + first * table.intermediate,
      .rows = group_first[group + 1] - first,
      .in_features = in,
      .out_features = is_down ? table.width : table.intermediate,
      .x_stride = is_down || tokens > 1 ? in : 0,  // the only token may have chosen an expert twice
      .gated = !is_down,
      .activation = is_down ? kIdentity : activation,
  };
}

// Finds the groups, and a row for each choice of a token. A number beyond the last expert stands for none.
void Experts::sort() const {
  std::fill(starts, starts + table.count + 1, 0);
  for (int64_t pair = 0; pair < pairs(); ++pair)
    if (choice.index[pair] < table.count) ++starts[choice.index[pair] + 1];
  int64_t groups = 0, inner_end = 0, down_end = 0;
  for (int64_t e = 0; e < table.count; ++e) {
    starts[e + 1] += starts[e];
    if (starts[e + 1] == starts[e]) continue;
    group_expert[groups] = e;
    group_first[groups] = starts[e];
    group_first[groups + 1] = starts[e + 1];
    inner_ends[groups] = inner_end += kernels().linear_items(product(groups, false), ranks);
    down_ends[groups] = down_end += kernels().linear_items(product(groups, true), ranks);
    ++groups;
  }
  *num_groups = groups;
  std::fill(token_of, token_of + pairs(), -1);
  for (int64_t pair = 0; pair < pairs(); ++pair) {
    const int64_t e = choice.index[pair];
    places[pair] = e < table.count ? starts[e]++ : -1;
    if (places[pair] >= 0) token_of[places[pair]] = pair / choice.chosen;
  }
}

// How many items there are depends on the choices, which a thread that is late may find overwritten. So a step has one
// item for each rank: its part of them.
void Experts::multiply(Team& team, bool is_down) const {
  team.share(ranks, [&](int64_t first, int64_t last) {
    const int64_t* ends = is_down ? down_ends : inner_ends;
    const int64_t groups = *num_groups, items = groups ? ends[groups - 1] : 0;
    const int64_t end = items * last / ranks;
    int64_t begin = items * first / ranks;
    for (int64_t group = std::upper_bound(ends, ends + groups, begin) - ends; begin < end; ++group) {
      const int64_t start = group ? ends[group - 1] : 0, stop = std::min(end, ends[group]);
      kernels().linear(product(group, is_down), ends[group] - start, begin - start, stop - start);
      begin = stop;
    }
  });
  team.meet();
}

void Experts::run(Team& team) const {
  const Kernels& kernels = neap::kernels();
  if (router.weight.panels) {
    team.share(router_items, [&](int64_t b, int64_t e) { kernels.linear(router, router_items, b, e); });
    team.meet();
  }
  team.share(1, [&](int64_t, int64_t) {
    if (router.weight.panels) kernels.choose_experts(choice, 0, tokens);
    sort();
  });
  team.meet();
  if (tokens > 1) {
    team.share(pairs(), [&](int64_t b, int64_t e) {
      for (int64_t row = b; row < e && token_of[row] >= 0; ++row)
        std::memcpy(sorted + row * table.width, x + token_of[row] * table.width, table.width * sizeof(float));
    });
    team.meet();
  }
  multiply(team, false);
  multiply(team, true);
  team.share(tokens, [&](int64_t b, int64_t e) { kernels.sum_experts(sum, b, e); });
  team.meet();
}

std::tuple<Tensor, Tensor, Tensor> choose_experts(Tensor x, Tensor router, int64_t num_experts, int64_t chosen,
                                                  bool normed, std::optional<Tensor> bias) {
  constexpr const char* kOp = "choose_experts";
  check_float(kOp, "x", x, 2);
  check_chosen(kOp, chosen, num_experts);
  const int64_t tokens = x.size(0);
  if (bias) check_vector(kOp, "bias", *bias, num_experts);
  LinearArgs args = linear_args<Tensor>(kOp, "router", router, nullptr, bias ? floats(*bias) : nullptr, tokens,
                                        x.size(1), num_experts);
  if (!x.is_contiguous()) x = torch::stable::contiguous(x);
  Tensor logits = empty({tokens, num_experts}), shares = empty({tokens, chosen}),
         index = empty({tokens, chosen}, aoti_torch_dtype_int64());
  args.x = floats(x);
  args.out = mutable_floats(logits);
  const ExpertChoiceArgs choice{
      .logits = floats(logits),
      .shares = mutable_floats(shares),
      .index = mutable_integers(index),
      .experts = num_experts,
      .chosen = chosen,
      .normed = normed,
  };
  const int64_t items = kernels().linear_items(args, torch::stable::get_num_threads());
  parallel(items, (double)logits.numel() * (double)x.size(1),
           [&](int64_t b, int64_t e) { kernels().linear(args, items, b, e); });
  parallel(tokens, (double)logits.numel() * (double)chosen,
           [&](int64_t b, int64_t e) { kernels().choose_experts(choice, b, e); });
  return {logits, shares, index};
}

Tensor experts(Tensor x, Tensor index, Tensor shares, Tensor table, std::string activation) {
  constexpr const char* kOp = "experts";
  check_float(kOp, "x", x, 2);
  check_float(kOp, "shares", shares, 2);
  Experts steps{.table = experts_of(kOp, table), .tokens = x.size(0), .activation = activation_of(kOp, activation)};
  NEAP_CHECK(x.size(1) == steps.table.width, kOp, ": x ", text(x), " does not fit experts of ", steps.table.width,
             " inputs");
  NEAP_CHECK(index.is_cpu() && index.scalar_type() == ScalarType::Long && text(index) == text(shares) &&
                 index.size(0) == x.size(0),
             kOp, ": index ", text(index), " must be int64, and have the shape of shares ", text(shares),
             " and a row for each of x");
  for (Tensor* t : {&x, &index, &shares})
    if (!t->is_contiguous()) *t = torch::stable::contiguous(*t);
  Tensor out = empty(sizes_of(x));
  if (x.numel() == 0) return out;
  steps.choice = {
      .shares = mutable_floats(shares),
      .index = mutable_integers(index),
      .experts = steps.table.count,
      .chosen = index.size(1),
  };
  for (int64_t i = 0; i < index.numel(); ++i)
    NEAP_CHECK(steps.choice.index[i] >= 0, kOp, ": index ", steps.choice.index[i], " is negative");
  steps.sum = {.out = mutable_floats(out), .width = steps.table.width, .chosen = index.size(1)};
  steps.ranks =
      std::clamp<int64_t>((int64_t)(steps.flops() / (double)kGrainFlops), 1, torch::stable::get_num_threads());
  Arena size(nullptr);
  steps.lay_out(&size);
  Arena arena(thread_scratch(size.used()));
  steps.lay_out(&arena);
  std::memcpy(steps.x, floats(x), x.numel() * sizeof(float));
  in_team(steps.ranks, [&](Team& team) { steps.run(team); });
  return out;
}

}  // namespace neap::binding
