// The steps of one decoder layer, which the threads of a team run together: see layer.h and decoder_layers.cpp.
#include "layer.h"

#include <chrono>

namespace neap::binding {

namespace {

enum Step { kNorms, kMatmuls, kPlace, kAttention, kSteps };

// Seconds of each step over all layers, while they are measured: see profile_layers.
std::atomic<bool> is_profiled{false};
double step_seconds[kSteps] = {};

// Adds the time since the last step ended to `step_seconds`. One thread of a team has a clock that is on.
class StepClock {
 public:
  explicit StepClock(bool is_on) : is_on_(is_on) {
    if (is_on_) last_ = std::chrono::steady_clock::now();
  }
  void end(Step step) {
    if (!is_on_) return;
    const auto now = std::chrono::steady_clock::now();
    step_seconds[step] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

 private:
  const bool is_on_;
  std::chrono::steady_clock::time_point last_;
};

}  // namespace

// How many threads the work of a layer is worth.
int64_t Layer::ranks_wanted() const {
  // The tiles of `up`: the loop below counts the gate.
  double flops = inner.gated ? (double)inner.out_features * inner.in_features : 0.;
  if (experts.tokens) flops += experts.flops() / (double)tokens;
  for (const LinearArgs* matmul : {&out, &inner, &down}) flops += (double)matmul->in_features * matmul->out_features;
  for (const LinearArgs& projection : projections) flops += (double)projection.in_features * projection.out_features;
  return std::clamp<int64_t>((int64_t)(flops * (double)tokens / (double)kGrainFlops), 1,
                             torch::stable::get_num_threads());
}

// Sets the input and output pointers of every step to pieces of the arena.
void Layer::lay_out(Arena* arena, int64_t width) {
  normed = arena->take((norms_alone() ? ranks : 1) * tokens * width);
  for (LinearArgs& projection : projections) projection.out = arena->take(tokens * projection.out_features);
  const LinearArgs &q = projections.front(), &v = projections.back(), &k = projections[projections.size() / 2];
  place.q = q.out + q_at;
  place.k = k.out + k_at;
  place.v = v.out + v_at;
  place.q_row = q.out_features;
  place.k_row = k.out_features;
  place.v_row = v.out_features;
  float* attended = arena->take(tokens * out.in_features);
  int64_t from = 0;
  for (AttentionArgs& problem : problems) {
    problem.q = place.q + from * place.q_row;
    problem.q_head = place.q_head;
    problem.q_row = place.q_row;
    problem.q_column = 1;
    problem.out = attended + from * out.in_features;
    from += problem.queries;
    const int64_t padded_width = ceil_div(problem.value_width, kPanel) * kPanel;
    if (split_keys)
      problem.partials = arena->take(num_items(problem) * num_blocks(problem) * tile_queries(problem) *
                                     (problem.heads / problem.kv_heads) * (kPanel + padded_width));
  }
  float *hidden = arena->take(tokens * width), *added = arena->take(tokens * width);
  out.x = attended;
  out.out = hidden;
  down.residuals[0] = hidden;
  if (attended_norm.weight) {
    out.out = added;
    attended_norm.x = added;
    attended_norm.out = hidden;
  }
  if (!mlp_norm.x) mlp_norm.x = hidden;
  down.x = inner.out = arena->take(experts.tokens ? 0 : tokens * inner.out_features);
  if (output_norm.weight) {
    down.residuals[0] = nullptr;
    down.out = added;
    output_norm.x = added;
    output_norm.residual = hidden;
  }
  if (experts.tokens) {
    experts.sum.out = down.out;
    std::copy(down.residuals, down.residuals + 2, experts.sum.residuals);
    experts.lay_out(arena);
    mlp_norm.out = experts.x;
  }
  if (given) {
    given_out.x = given_gate.out = arena->take(tokens * given_gate.out_features);
    given_norm.x = given_out.out = added;
  }
  scratches = arena->take(ranks * scratch);
}

// Computes the number of items of each step for a team of `ranks` threads, and whether keys are split.
void Layer::count(const Kernels& kernels) {
  int64_t items = 0, blocks = 0, parts = 0, most_blocks = 0;
  for (const LinearArgs& projection : projections) {
    projection_items.push_back(kernels.linear_items(projection, ranks));
    projection_ends.push_back(parts += projection_items.back());
  }
  for (const AttentionArgs& problem : problems) {
    problem_ends.push_back(items += num_items(problem));
    block_ends.push_back(blocks += num_items(problem) * num_blocks(problem));
    most_blocks = std::max(most_blocks, num_blocks(problem));
    scratch = std::max(scratch, (kernels.attention_scratch(problem) + 15) / 16 * 16);
  }
  split_keys = !keeps_threads_busy(items, most_blocks, ranks);
  out_items = kernels.linear_items(out, ranks);
  inner_items = kernels.linear_items(inner, ranks);
  down_items = kernels.linear_items(down, ranks);
  if (given) {
    given_gate_items = kernels.linear_items(given_gate, ranks);
    given_out_items = kernels.linear_items(given_out, ranks);
  }
  experts.ranks = ranks;
}

void Layer::run(Team& team) const {
  const Kernels& kernels = neap::kernels();
  float* rank_scratch = scratches + team.rank * scratch;
  StepClock clock(team.rank == 0 && is_profiled.load(std::memory_order_relaxed));
  const auto meet = [&](Step step) {
    team.meet();
    clock.end(step);
  };
  const auto linear = [&](const LinearArgs& args, int64_t items) {
    team.share(items, [&](int64_t b, int64_t e) { kernels.linear(args, items, b, e); });
    meet(kMatmuls);
  };
  // Returns the normed rows, for a step of so many items.
  const auto norm = [&](RowNormArgs args, int64_t items) {
    args.out = normed;
    if (norms_alone()) {
      args.out += team.rank * tokens * args.width;
      if (team.has_work(items)) kernels.row_norm(args, 0, tokens);
      clock.end(kNorms);
    } else {
      team.share(tokens, [&](int64_t b, int64_t e) { kernels.row_norm(args, b, e); });
      meet(kNorms);
    }
    return args.out;
  };
  const auto norm_once = [&](const RowNormArgs& args) {
    if (!args.weight) return;
    team.share(tokens, [&](int64_t b, int64_t e) { kernels.row_norm(args, b, e); });
    meet(kNorms);
  };
  const auto with_x = [](LinearArgs args, const float* x) {
    args.x = x;
    return args;
  };
  const auto attend = [&](auto kernel, const std::vector<int64_t>& ends) {
    team.share(ends.back(), [&](int64_t begin, int64_t end) {
      each_loop(ends, begin, end, [&](size_t at, int64_t b, int64_t e) { kernel(problems[at], rank_scratch, b, e); });
    });
    meet(kAttention);
  };
  const float* x = norm(input_norm, projection_ends.back());
  team.share(projection_ends.back(), [&](int64_t begin, int64_t end) {
    each_loop(projection_ends, begin, end, [&](size_t at, int64_t b, int64_t e) {
      kernels.linear(with_x(projections[at], x), projection_items[at], b, e);
    });
  });
  meet(kMatmuls);
  team.share(tokens * (place.heads + 2 * place.kv_heads), [&](int64_t b, int64_t e) { kernels.place(place, b, e); });
  meet(kPlace);
  if (split_keys) {
    attend(kernels.attention_split, block_ends);
    attend(kernels.attention_join, problem_ends);
  } else {
    attend(kernels.attention, problem_ends);
  }
  linear(out, out_items);
  norm_once(attended_norm);
  if (experts.tokens) {
    norm_once(mlp_norm);
    experts.run(team);
    clock.end(kMatmuls);
  } else {
    x = norm(mlp_norm, inner_items);
    linear(with_x(inner, x), inner_items);
    linear(down, down_items);
  }
  norm_once(output_norm);
  if (!given) return;
  linear(given_gate, given_gate_items);
  const int64_t columns = given_gate.out_features;
  team.share(tokens, [&](int64_t b, int64_t e) {
    for (int64_t token = b; token < e; ++token)
      for (int64_t i = 0; i < columns; ++i) given_gate.out[token * columns + i] *= given[token * given_row + i];
  });
  meet(kMatmuls);
  linear(given_out, given_out_items);
  norm_once(given_norm);
}

Tensor profile_layers(bool is_on) {
  Tensor seconds = empty({kSteps});
  for (int step = 0; step < kSteps; ++step) {
    mutable_floats(seconds)[step] = (float)step_seconds[step];
    step_seconds[step] = 0;
  }
  is_profiled.store(is_on, std::memory_order_relaxed);
  return seconds;
}

}  // namespace neap::binding
