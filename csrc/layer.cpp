// A pre-norm decoder layer as one op: h = x + attention(norm(x)), then h + mlp(norm(h)), all steps in one parallel region.
//
// It calls the same kernels in the same order as the separate ops do, so its result is bit-identical to that of the modules.
#include "attention_problem.h"
#include "packed.h"
#include "team.h"

#include <chrono>

namespace neap::binding {

namespace {

constexpr const char* kOp = "decoder_layer";

enum Step { kNorms, kProducts, kPlace, kAttention, kSteps };

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

// Allocates pieces of one buffer of floats, each starting on a cache line. With a null buffer it only adds up their sizes.
class Arena {
 public:
  explicit Arena(float* base) : base_(base) {}
  float* take(int64_t count) {
    float* taken = base_ ? base_ + used_ : nullptr;
    used_ += (count + 15) / 16 * 16;
    return taken;
  }
  int64_t used() const { return used_; }

 private:
  float* base_;
  int64_t used_ = 0;
};

// The arguments of all steps of one layer, shared by the threads that run it.
struct Layer {
  int64_t tokens = 0, ranks = 1, scratch = 0, max_rows = 0;
  RmsNormArgs input_norm{}, mlp_norm{};
  std::vector<LinearArgs> projections;  // q, k and v, or one for all three
  PlaceArgs place{};
  std::vector<Slot> slots;
  std::vector<AttentionArgs> problems;  // one per sequence
  bool split_keys = false;
  LinearArgs out{}, gated{}, down{};
  std::vector<int64_t> projection_items, projection_ends, problem_ends, block_ends;  // *_ends: running totals, see each_loop
  int64_t out_items = 0, gated_items = 0, down_items = 0;
  float* scratches = nullptr;

  void lay_out(Arena* arena, int64_t width, int64_t intermediate);
  void count(const Kernels& kernels);
  void run(const Team& team) const;
};

// Sets the input and output pointers of every step to pieces of the arena.
void Layer::lay_out(Arena* arena, int64_t width, int64_t intermediate) {
  float* normed = arena->take(tokens * width);
  input_norm.out = mlp_norm.out = normed;
  for (LinearArgs& projection : projections) projection.x = normed, projection.out = arena->take(tokens * projection.out_features);
  const int64_t q_width = place.heads * place.width, k_width = place.kv_heads * place.width;
  const bool apart = projections.size() == 3;
  place.q = projections[0].out, place.q_row = projections[0].out_features;
  place.k = apart ? projections[1].out : place.q + q_width, place.k_row = apart ? k_width : place.q_row;
  place.v = apart ? projections[2].out : place.q + q_width + k_width, place.v_row = apart ? projections[2].out_features : place.q_row;
  float* attended = arena->take(tokens * out.in_features);
  int64_t from = 0;
  for (AttentionArgs& problem : problems) {
    problem.q = place.q + from * place.q_row, problem.q_head = place.width, problem.q_row = place.q_row, problem.q_column = 1;
    problem.out = attended + from * out.in_features;
    from += problem.queries;
    const int64_t padded_width = (problem.value_width + kPanel - 1) / kPanel * kPanel;
    if (split_keys) problem.partials = arena->take(num_items(problem) * num_blocks(problem) * tile_queries(problem) * (problem.heads / problem.kv_heads) * (kPanel + padded_width));
  }
  float* hidden = arena->take(tokens * width);
  out.x = attended, out.out = hidden;
  mlp_norm.x = hidden;
  gated.x = normed, gated.out = arena->take(tokens * intermediate);
  down.x = gated.out, down.residual = hidden;
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
  out_items = kernels.linear_items(out, ranks), gated_items = kernels.linear_items(gated, ranks), down_items = kernels.linear_items(down, ranks);
}

void Layer::run(const Team& team) const {
  const Kernels& kernels = neap::kernels();
  float* own = scratches + team.begin * scratch;
  StepClock clock(team.begin == 0 && is_profiled.load(std::memory_order_relaxed));
  const auto meet = [&](Step step) {
    team.meet();
    clock.end(step);
  };
  const auto linear = [&](const LinearArgs& args, int64_t items) {
    team.share(items, [&](int64_t b, int64_t e) { kernels.linear(args, items, b, e); });
    meet(kProducts);
  };
  const auto norm = [&](const RmsNormArgs& args) {
    team.share(tokens, [&](int64_t b, int64_t e) { kernels.rms_norm(args, b, e); });
    meet(kNorms);
  };
  const auto attend = [&](auto kernel, const std::vector<int64_t>& ends) {
    team.share(ends.back(), [&](int64_t begin, int64_t end) {
      each_loop(ends, begin, end, [&](size_t at, int64_t b, int64_t e) { kernel(problems[at], own, b, e); });
    });
    meet(kAttention);
  };
  norm(input_norm);
  team.share(projection_ends.back(), [&](int64_t begin, int64_t end) {
    each_loop(projection_ends, begin, end, [&](size_t at, int64_t b, int64_t e) { kernels.linear(projections[at], projection_items[at], b, e); });
  });
  meet(kProducts);
  team.share(tokens * (place.heads + 2 * place.kv_heads), [&](int64_t b, int64_t e) { kernels.place(place, b, e); });
  meet(kPlace);
  if (split_keys) {
    attend(kernels.attention_split, block_ends);
    attend(kernels.attention_join, problem_ends);
  } else {
    attend(kernels.attention, problem_ends);
  }
  linear(out, out_items);
  norm(mlp_norm);
  linear(gated, gated_items);
  linear(down, down_items);
}

// The arguments of a product with a packed matrix, or with a gate and `up`. An empty or null bias means none. `lay_out` sets x and out.
LinearArgs linear_args(const char* name, const Tensor& packed, const Tensor* up, const Tensor* bias, int64_t rows, int64_t in_features, int64_t out_features,
                       Activation activation = kIdentity) {
  const Matrix matrix = packed_of_size(kOp, name, packed, out_features, in_features);
  const Matrix up_matrix = up ? packed_of_size(kOp, "up", *up, out_features, in_features) : Matrix{};
  if (bias && bias->numel() == 0) bias = nullptr;
  if (bias) check_vector(kOp, name, *bias, (up ? 2 : 1) * out_features);
  return {nullptr, matrix, up_matrix, bias ? floats(*bias) : nullptr, nullptr, rows, in_features, out_features, in_features, up != nullptr, activation, nullptr};
}

// Adds the next `count` tokens of x, which belong to one sequence: the slots of their keys and values, and their attention problem.
void add_sequence(Layer* layer, const Tensor& keys, const Tensor& values, int64_t base, int64_t count, const Tensor* mask, double scaling,
                  const std::optional<double>& softcap) {
  const Dtype dtype = check_kv(kOp, keys, values);
  const PlaceArgs& place = layer->place;
  const auto fits = [&](const Tensor& cache, int64_t width) {
    return cache.size(0) == 1 && cache.size(1) == place.kv_heads && cache.size(3) == width && cache.stride(3) == 1 && base >= 0 && count > 0 &&
           base + count <= cache.size(2);
  };
  NEAP_CHECK(fits(keys, place.width) && fits(values, place.value_width), kOp, ": caches ", text(keys), " and ", text(values), " cannot take ", count,
             " tokens at ", base);
  NEAP_CHECK(dtype == place.kv_dtype, kOp, ": the caches of several sequences are of different dtypes");
  if (mask) check_mask(kOp, *mask, 1, count, base + count);
  const int64_t bytes = element_bytes(dtype);
  uint8_t *key = static_cast<uint8_t*>(keys.mutable_data_ptr()), *value = static_cast<uint8_t*>(values.mutable_data_ptr());
  for (int64_t token = base; token < base + count; ++token)
    layer->slots.push_back({key + token * keys.stride(2) * bytes, value + token * values.stride(2) * bytes, keys.stride(1) * bytes, values.stride(1) * bytes});
  AttentionArgs problem{};
  problem.batch = 1, problem.heads = place.heads, problem.queries = count;
  attend_over(&problem, keys, values, dtype, base + count, mask, mask == nullptr, scaling, softcap);
  layer->problems.push_back(problem);
}

}  // namespace

Tensor decoder_layer(Tensor x, Tensor cos, Tensor sin, std::vector<Tensor> norms, std::vector<Tensor> packed, std::vector<Tensor> biases,
                     std::vector<Tensor> keys, std::vector<Tensor> values, std::vector<int64_t> bases, std::vector<int64_t> counts,
                     std::vector<Tensor> masks, int64_t heads, int64_t intermediate, std::string activation, double eps, double weight_offset,
                     double scaling, std::optional<double> softcap) {
  check_float(kOp, "x", x, 3);
  check_float(kOp, "cos", cos, 3);
  check_float(kOp, "sin", sin, 3);
  const int64_t tokens = x.size(0) * x.size(1), width = x.size(2);
  const size_t sequences = keys.size();
  NEAP_CHECK(sequences > 0 && values.size() == sequences && bases.size() == sequences && counts.size() == sequences, kOp, ": ", sequences, " caches of keys, ",
             values.size(), " of values, ", bases.size(), " bases and ", counts.size(), " counts");
  NEAP_CHECK(masks.empty() || masks.size() == sequences, kOp, ": ", masks.size(), " masks for ", sequences, " sequences");
  NEAP_CHECK(norms.size() == 2 || norms.size() == 4, kOp, ": ", norms.size(), " norms, want 2, or 4 with head norms");
  NEAP_CHECK((packed.size() == 5 || packed.size() == 7) && (biases.empty() || biases.size() == packed.size() - 1), kOp, ": ", packed.size(), " matrices and ",
             biases.size(), " biases, want 7 and 6, or 5 and 4 if one matrix makes queries, keys and values; biases may be absent");
  NEAP_CHECK(!softcap || *softcap > 0, kOp, ": softcap must be positive");
  NEAP_CHECK(eps >= 0, kOp, ": eps is negative");
  Layer layer;
  layer.tokens = tokens;
  PlaceArgs& place = layer.place;
  place.kv_dtype = check_kv(kOp, keys[0], values[0]);
  place.heads = heads, place.kv_heads = keys[0].size(1), place.width = keys[0].size(3), place.value_width = values[0].size(3);
  NEAP_CHECK(heads > 0 && place.kv_heads > 0 && heads % place.kv_heads == 0, kOp, ": ", heads, " query heads cannot share ", place.kv_heads, " key heads");
  NEAP_CHECK(text(cos) == text(sin), kOp, ": cos ", text(cos), " and sin ", text(sin), " differ in shape");
  place.rotated = cos.size(2), place.angles = cos.size(0) * cos.size(1);
  NEAP_CHECK((cos.size(0) == 1 || cos.size(0) == x.size(0)) && cos.size(1) == x.size(1) && place.rotated % 2 == 0 && place.rotated <= place.width, kOp, ": cos ",
             text(cos), " does not fit x ", text(x), " with heads of ", place.width);
  for (size_t i = 0; i < norms.size(); ++i) check_vector(kOp, "a norm", norms[i], i < 2 ? width : place.width);

  if (!x.is_contiguous()) x = torch::stable::contiguous(x);
  if (!cos.is_contiguous()) cos = torch::stable::contiguous(cos);
  if (!sin.is_contiguous()) sin = torch::stable::contiguous(sin);
  Tensor result = empty(sizes_of(x));
  if (x.numel() == 0) return result;
  place.cos = floats(cos), place.sin = floats(sin), place.eps = (float)eps, place.weight_offset = (float)weight_offset;
  if (norms.size() == 4) place.q_norm = floats(norms[2]), place.k_norm = floats(norms[3]);
  int64_t covered = 0;
  for (size_t s = 0; s < sequences; ++s) {
    const bool masked = !masks.empty() && masks[s].numel() > 0;
    add_sequence(&layer, keys[s], values[s], bases[s], counts[s], masked ? &masks[s] : nullptr, scaling, softcap);
    covered += counts[s];
  }
  NEAP_CHECK(covered == tokens, kOp, ": the counts sum to ", covered, " tokens, but x has ", tokens);
  place.slots = layer.slots.data();

  layer.input_norm = {floats(x), floats(norms[0]), nullptr, width, width, (float)eps, (float)weight_offset};
  layer.mlp_norm = {nullptr, floats(norms[1]), nullptr, width, width, (float)eps, (float)weight_offset};
  const int64_t q = heads * place.width, k = place.kv_heads * place.width, v = place.kv_heads * place.value_width;
  const Sizes parts = packed.size() == 7 ? Sizes{q, k, v} : Sizes{q + k + v};
  const auto bias = [&](size_t i) { return biases.empty() ? nullptr : &biases[i]; };
  for (size_t i = 0; i < parts.size(); ++i)
    layer.projections.push_back(linear_args("a projection", packed[i], nullptr, bias(i), tokens, width, parts[i]));
  const size_t next = parts.size();
  layer.out = linear_args("out", packed[next], nullptr, bias(next), tokens, heads * place.value_width, width);
  layer.gated = linear_args("gate", packed[next + 1], &packed[next + 2], bias(next + 1), tokens, width, intermediate, gate_activation(kOp, activation));
  layer.down = linear_args("down", packed[next + 3], nullptr, bias(next + 2), tokens, intermediate, width);
  layer.out.residual = floats(x), layer.down.out = mutable_floats(result);

  double products = (double)layer.gated.out_features * width;  // of gate and up: the loop below counts the gate
  for (const LinearArgs* product : {&layer.out, &layer.gated, &layer.down}) products += (double)product->in_features * product->out_features;
  for (const LinearArgs& projection : layer.projections) products += (double)projection.in_features * projection.out_features;
  layer.ranks = std::clamp<int64_t>((int64_t)(products * (double)tokens / (double)kGrainFlops), 1, torch::stable::get_num_threads());
  layer.count(neap::kernels());
  Arena size(nullptr);
  layer.lay_out(&size, width, intermediate);
  Arena arena(thread_scratch(size.used()));
  layer.lay_out(&arena, width, intermediate);
  in_team(layer.ranks, [&](const Team& team) { layer.run(team); });
  return result;
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
