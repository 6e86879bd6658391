// Consecutive pre-norm decoder layers as one op: h = x + attention(norm(x)), then h + mlp(norm(h)), all steps of all
// layers in one parallel region.
//
// It calls the same kernels in the same order as the separate ops do, so its result has the bits of the modules'.
#include "attention_problem.h"
#include "packed.h"
#include "team.h"
#include "tensor_table.h"

#include <chrono>

namespace neap::binding {

namespace {

constexpr const char* kOp = "decoder_layers";

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

// So few tokens are normed by every thread for itself: that takes less time than waiting for each other's part.
constexpr int64_t kTokensNormedAlone = 8;

// The arguments of all steps of one layer, shared by the threads that run it.
struct Layer {
  int64_t tokens = 0, ranks = 1, scratch = 0;
  RmsNormArgs input_norm{}, mlp_norm{};
  std::vector<LinearArgs> projections;  // q, k and v, or one for all three
  PlaceArgs place{};
  std::vector<Slot> slots;
  std::vector<AttentionArgs> problems;            // one per sequence
  std::vector<std::vector<AttentionPart>> parts;  // of each problem: a trunk and its branches
  bool split_keys = false;
  LinearArgs out{}, gated{}, down{};
  // *_ends: running totals, see each_loop.
  std::vector<int64_t> projection_items, projection_ends, problem_ends, block_ends;
  int64_t out_items = 0, gated_items = 0, down_items = 0;
  float *scratches = nullptr, *normed = nullptr;

  bool norms_alone() const { return tokens <= kTokensNormedAlone; }
  void lay_out(Arena* arena, int64_t width, int64_t intermediate);
  void count(const Kernels& kernels);
  void run(Team& team) const;
};

// Sets the input and output pointers of every step to pieces of the arena.
void Layer::lay_out(Arena* arena, int64_t width, int64_t intermediate) {
  normed = arena->take((norms_alone() ? ranks : 1) * tokens * width);
  for (LinearArgs& projection : projections) projection.out = arena->take(tokens * projection.out_features);
  const int64_t q_width = place.heads * place.width, k_width = place.kv_heads * place.width;
  const bool apart = projections.size() == 3;
  place.q = projections[0].out, place.q_row = projections[0].out_features;
  place.k = apart ? projections[1].out : place.q + q_width, place.k_row = apart ? k_width : place.q_row;
  place.v = apart ? projections[2].out : place.q + q_width + k_width,
  place.v_row = apart ? projections[2].out_features : place.q_row;
  float* attended = arena->take(tokens * out.in_features);
  int64_t from = 0;
  for (AttentionArgs& problem : problems) {
    problem.q = place.q + from * place.q_row, problem.q_head = place.width, problem.q_row = place.q_row,
    problem.q_column = 1;
    problem.out = attended + from * out.in_features;
    from += problem.queries;
    const int64_t padded_width = (problem.value_width + kPanel - 1) / kPanel * kPanel;
    if (split_keys)
      problem.partials = arena->take(num_items(problem) * num_blocks(problem) * tile_queries(problem) *
                                     (problem.heads / problem.kv_heads) * (kPanel + padded_width));
  }
  float* hidden = arena->take(tokens * width);
  out.x = attended, out.out = hidden;
  mlp_norm.x = hidden;
  gated.out = arena->take(tokens * intermediate);
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
  out_items = kernels.linear_items(out, ranks), gated_items = kernels.linear_items(gated, ranks),
  down_items = kernels.linear_items(down, ranks);
}

void Layer::run(Team& team) const {
  const Kernels& kernels = neap::kernels();
  float* own = scratches + team.rank * scratch;
  StepClock clock(team.rank == 0 && is_profiled.load(std::memory_order_relaxed));
  const auto meet = [&](Step step) {
    team.meet();
    clock.end(step);
  };
  const auto linear = [&](const LinearArgs& args, int64_t items) {
    team.share(items, [&](int64_t b, int64_t e) { kernels.linear(args, items, b, e); });
    meet(kProducts);
  };
  // Returns the normed rows, for a step of so many items.
  const auto norm = [&](RmsNormArgs args, int64_t items) {
    args.out = normed;
    if (norms_alone()) {
      args.out += team.rank * tokens * args.width;
      if (team.has_work(items)) kernels.rms_norm(args, 0, tokens);
      clock.end(kNorms);
    } else {
      team.share(tokens, [&](int64_t b, int64_t e) { kernels.rms_norm(args, b, e); });
      meet(kNorms);
    }
    return args.out;
  };
  const auto with_x = [](LinearArgs args, const float* x) {
    args.x = x;
    return args;
  };
  const auto attend = [&](auto kernel, const std::vector<int64_t>& ends) {
    team.share(ends.back(), [&](int64_t begin, int64_t end) {
      each_loop(ends, begin, end, [&](size_t at, int64_t b, int64_t e) { kernel(problems[at], own, b, e); });
    });
    meet(kAttention);
  };
  const float* x = norm(input_norm, projection_ends.back());
  team.share(projection_ends.back(), [&](int64_t begin, int64_t end) {
    each_loop(projection_ends, begin, end, [&](size_t at, int64_t b, int64_t e) {
      kernels.linear(with_x(projections[at], x), projection_items[at], b, e);
    });
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
  x = norm(mlp_norm, gated_items);
  linear(with_x(gated, x), gated_items);
  linear(down, down_items);
}

// The arguments of a product with a packed matrix, or with a gate and `up`. An empty or null bias means none. `lay_out`
// sets x and out.
LinearArgs linear_args(const char* name, const TensorInfo& packed, const TensorInfo* up, const TensorInfo* bias,
                       int64_t rows, int64_t in_features, int64_t out_features, Activation activation = kIdentity) {
  const Matrix matrix = packed_of_size(kOp, name, packed, out_features, in_features);
  const Matrix up_matrix = up ? packed_of_size(kOp, "up", *up, out_features, in_features) : Matrix{};
  if (bias && bias->numel() == 0) bias = nullptr;
  if (bias) check_vector(kOp, name, *bias, (up ? 2 : 1) * out_features);
  return {nullptr,     matrix,        up_matrix,   bias ? floats(*bias) : nullptr,
          nullptr,     rows,          in_features, out_features,
          in_features, up != nullptr, activation,  nullptr};
}

// Adds the next `count` tokens of x, which belong to one sequence: the slots of their keys and values, from number
// `kept` on, and their attention problem. A causal branch is a part of the problem of its trunk.
void add_sequence(Layer* layer, const TensorInfo& keys, const TensorInfo& values, int64_t base, int64_t kept,
                  int64_t count, const Tensor* mask, double scaling, const std::optional<double>& softcap) {
  const Dtype dtype = check_kv(kOp, keys, values);
  const PlaceArgs& place = layer->place;
  const auto fits = [&](const TensorInfo& cache, int64_t width) {
    return cache.size(0) == 1 && cache.size(1) == place.kv_heads && cache.size(3) == width && cache.stride(3) == 1 &&
           base >= 0 && kept >= base && count > 0 && kept + count <= cache.size(2);
  };
  NEAP_CHECK(fits(keys, place.width) && fits(values, place.value_width), kOp, ": caches ", text(keys), " and ",
             text(values), " cannot take ", count, " tokens at ", kept, " for position ", base);
  NEAP_CHECK(dtype == place.kv_dtype, kOp, ": the caches of several sequences are of different dtypes");
  if (mask) check_mask(kOp, *mask, 1, count, base + count);
  const int64_t bytes = element_bytes(dtype);
  uint8_t *key = static_cast<uint8_t*>(keys.mutable_data_ptr()),
          *value = static_cast<uint8_t*>(values.mutable_data_ptr());
  for (int64_t token = kept; token < kept + count; ++token)
    layer->slots.push_back({key + token * keys.stride(2) * bytes, value + token * values.stride(2) * bytes,
                            keys.stride(1) * bytes, values.stride(1) * bytes});
  if (kept > base && !mask && !layer->problems.empty() && layer->problems.back().k == keys.const_data_ptr() &&
      layer->problems.back().causal) {
    AttentionArgs& trunk = layer->problems.back();
    layer->parts.back().push_back({trunk.queries, count, base + count, base, kept - base});
    trunk.queries += count, trunk.keys = std::max(trunk.keys, base + count);
    return;
  }
  AttentionArgs problem{};
  problem.batch = 1, problem.heads = place.heads, problem.queries = count;
  attend_over(&problem, keys, values, dtype, base + count, mask, mask == nullptr, scaling, softcap, base, kept - base);
  layer->problems.push_back(problem);
  layer->parts.push_back({problem.own});
}

}  // namespace

namespace {

// What all layers of a call have in common.
struct Call {
  Tensor x, cos, sin;
  std::vector<TensorTable> keys, values;  // per sequence
  std::vector<int64_t> bases, kept, counts;
  std::vector<Tensor> masks;
  int64_t heads, intermediate;
  Activation activation;
  double eps, weight_offset, scaling;
  std::optional<double> softcap;

  int64_t tokens() const { return x.size(0) * x.size(1); }
};

// The tensors of one layer. No biases means that there are none.
struct LayerTensors { TensorTable norms, packed, biases; };

// Part `index` of `all`, which holds the same number for each of `layers` layers.
TensorTable part(const TensorTable& all, int64_t index, int64_t layers) {
  const size_t count = all.count / layers;
  return {all.first + index * count, count};
}

// A layer that reads from `x` and writes to `result`, both [tokens, D]. They may be the same memory: x is last read in
// the step before the one that writes the result.
Layer make_layer(const Call& call, const LayerTensors& t, int64_t index, const float* x, float* result) {
  const int64_t width = call.x.size(2);
  Layer layer;
  layer.tokens = call.tokens();
  PlaceArgs& place = layer.place;
  const TensorInfo &keys = call.keys[0][index], &values = call.values[0][index];
  place.kv_dtype = check_kv(kOp, keys, values);
  place.heads = call.heads, place.kv_heads = keys.size(1), place.width = keys.size(3),
  place.value_width = values.size(3);
  NEAP_CHECK(call.heads > 0 && place.kv_heads > 0 && call.heads % place.kv_heads == 0, kOp, ": ", call.heads,
             " query heads cannot share ", place.kv_heads, " key heads");
  place.rotated = call.cos.size(2), place.angles = call.cos.size(0) * call.cos.size(1);
  NEAP_CHECK((call.cos.size(0) == 1 || call.cos.size(0) == call.x.size(0)) && call.cos.size(1) == call.x.size(1) &&
                 place.rotated % 2 == 0 && place.rotated <= place.width,
             kOp, ": cos ", text(call.cos), " does not fit x ", text(call.x), " with heads of ", place.width);
  for (size_t i = 0; i < t.norms.count; ++i) check_vector(kOp, "a norm", t.norms[i], i < 2 ? width : place.width);
  place.cos = floats(call.cos), place.sin = floats(call.sin), place.eps = (float)call.eps,
  place.weight_offset = (float)call.weight_offset;
  if (t.norms.count == 4) place.q_norm = floats(t.norms[2]), place.k_norm = floats(t.norms[3]);
  for (size_t s = 0; s < call.keys.size(); ++s) {
    const bool masked = !call.masks.empty() && call.masks[s].numel() > 0;
    add_sequence(&layer, call.keys[s][index], call.values[s][index], call.bases[s], call.kept[s], call.counts[s],
                 masked ? &call.masks[s] : nullptr, call.scaling, call.softcap);
  }
  for (size_t i = 0; i < layer.problems.size(); ++i)
    layer.problems[i].parts = layer.parts[i].data(), layer.problems[i].num_parts = (int64_t)layer.parts[i].size();
  place.slots = layer.slots.data();

  layer.input_norm = {x, floats(t.norms[0]), nullptr, width, width, place.eps, place.weight_offset};
  layer.mlp_norm = {nullptr, floats(t.norms[1]), nullptr, width, width, place.eps, place.weight_offset};
  const int64_t q = call.heads * place.width, k = place.kv_heads * place.width, v = place.kv_heads * place.value_width;
  const Sizes parts = t.packed.count == 7 ? Sizes{q, k, v} : Sizes{q + k + v};
  const auto bias = [&](size_t i) { return t.biases.count ? &t.biases[i] : nullptr; };
  const auto product = [&](const char* name, size_t at, const TensorInfo* up, size_t bias_at, int64_t in_features,
                           int64_t out_features, Activation activation = kIdentity) {
    return linear_args(name, t.packed[at], up, bias(bias_at), layer.tokens, in_features, out_features, activation);
  };
  for (size_t i = 0; i < parts.size(); ++i)
    layer.projections.push_back(product("a projection", i, nullptr, i, width, parts[i]));
  const size_t next = parts.size();
  layer.out = product("out", next, nullptr, next, call.heads * place.value_width, width);
  layer.gated = product("gate", next + 1, &t.packed[next + 2], next + 1, width, call.intermediate, call.activation);
  layer.down = product("down", next + 3, nullptr, next + 2, call.intermediate, width);
  layer.out.residual = x, layer.down.out = result;
  return layer;
}

// How many threads the work of a layer is worth.
int64_t ranks_for(const Layer& layer) {
  // Of gate and up: the loop below counts the gate.
  double products = (double)layer.gated.out_features * layer.gated.in_features;
  for (const LinearArgs* product : {&layer.out, &layer.gated, &layer.down})
    products += (double)product->in_features * product->out_features;
  for (const LinearArgs& projection : layer.projections)
    products += (double)projection.in_features * projection.out_features;
  return std::clamp<int64_t>((int64_t)(products * (double)layer.tokens / (double)kGrainFlops), 1,
                             torch::stable::get_num_threads());
}

}  // namespace

Tensor decoder_layers(Tensor x, Tensor cos, Tensor sin, Tensor norm_table, Tensor packed_table, Tensor bias_table,
                      std::vector<Tensor> key_tables, std::vector<Tensor> value_tables, std::vector<int64_t> bases,
                      std::vector<int64_t> kept, std::vector<int64_t> counts, std::vector<Tensor> masks,
                      std::vector<int64_t> stops, int64_t num_layers, int64_t heads, int64_t intermediate,
                      std::string activation, double eps, double weight_offset, double scaling,
                      std::optional<double> softcap) {
  check_float(kOp, "x", x, 3);
  check_float(kOp, "cos", cos, 3);
  check_float(kOp, "sin", sin, 3);
  NEAP_CHECK(num_layers > 0, kOp, ": ", num_layers, " layers");
  const size_t layers = num_layers, sequences = bases.size();
  const TensorTable norms = table_of(kOp, "norms", norm_table), packed = table_of(kOp, "packed", packed_table),
                    biases = table_of(kOp, "biases", bias_table);
  std::vector<TensorTable> keys, values;
  for (const Tensor& table : key_tables) keys.push_back(table_of(kOp, "keys", table));
  for (const Tensor& table : value_tables) values.push_back(table_of(kOp, "values", table));
  NEAP_CHECK(sequences > 0 && keys.size() == sequences && values.size() == sequences && kept.size() == sequences &&
                 counts.size() == sequences,
             kOp, ": ", keys.size(), " caches of keys, ", values.size(), " of values, ", sequences, " bases, ",
             kept.size(), " places and ", counts.size(), " counts");
  for (size_t s = 0; s < sequences; ++s)
    NEAP_CHECK(keys[s].count == layers && values[s].count == layers, kOp, ": a cache of ", keys[s].count,
               " layers of keys and ", values[s].count, " of values, for ", layers, " layers");
  NEAP_CHECK(masks.empty() || masks.size() == sequences, kOp, ": ", masks.size(), " masks for ", sequences,
             " sequences");
  NEAP_CHECK(norms.count == 2 * layers || norms.count == 4 * layers, kOp, ": ", norms.count, " norms for ", layers,
             " layers, want 2 each, or 4 with head norms");
  const size_t matrices = packed.count / layers;
  NEAP_CHECK(
      (matrices == 5 || matrices == 7) && packed.count == matrices * layers &&
          (biases.count == 0 || biases.count == packed.count - layers),
      kOp, ": ", packed.count, " matrices and ", biases.count, " biases for ", layers,
      " layers, want 7 and 6 each, or 5 and 4 if one matrix makes queries, keys and values; biases may be absent");
  stops.push_back(num_layers);
  for (size_t i = 0; i < stops.size(); ++i)
    NEAP_CHECK(stops[i] > (i ? stops[i - 1] : 0) && stops[i] <= num_layers, kOp, ": stop ", stops[i],
               " is out of order, or not between 1 and ", num_layers - 1);
  NEAP_CHECK(!softcap || *softcap > 0, kOp, ": softcap must be positive");
  NEAP_CHECK(eps >= 0, kOp, ": eps is negative");
  NEAP_CHECK(text(cos) == text(sin), kOp, ": cos ", text(cos), " and sin ", text(sin), " differ in shape");

  for (Tensor* t : {&x, &cos, &sin})
    if (!t->is_contiguous()) *t = torch::stable::contiguous(*t);
  const Call call{x,    cos,           sin,     keys,   values,       bases,
                  kept, counts,        masks,   heads,  intermediate, gate_activation(kOp, activation),
                  eps,  weight_offset, scaling, softcap};
  Sizes sizes = sizes_of(x);
  sizes.insert(sizes.begin(), (int64_t)stops.size());
  Tensor states = empty(sizes);
  if (x.numel() == 0) return states;

  std::vector<Layer> stack;
  stack.reserve(layers);
  int64_t ranks = 1, floats_used = 0;
  // Layers up to a stop overwrite its state, the next ones read it and write to that of the next stop.
  const float* entering = floats(x);
  float* leaving = mutable_floats(states);
  for (int64_t i = 0, stop = 0; i < num_layers; ++i) {
    if (i == stops[stop]) ++stop, leaving += x.numel();
    const LayerTensors tensors{part(norms, i, num_layers), part(packed, i, num_layers), part(biases, i, num_layers)};
    stack.push_back(make_layer(call, tensors, i, entering, leaving));
    entering = leaving;
    ranks = std::max(ranks, ranks_for(stack.back()));
  }
  int64_t covered = 0;
  for (int64_t count : counts) covered += count;
  NEAP_CHECK(covered == call.tokens(), kOp, ": the counts sum to ", covered, " tokens, but x has ", call.tokens());
  for (Layer& layer : stack) {
    layer.ranks = ranks;
    layer.count(neap::kernels());
    Arena size(nullptr);
    layer.lay_out(&size, x.size(2), intermediate);
    floats_used = std::max(floats_used, size.used());
  }
  // One layer's intermediate results overwrite those of the layer before.
  float* scratch = thread_scratch(floats_used);
  for (Layer& layer : stack) {
    Arena arena(scratch);
    layer.lay_out(&arena, x.size(2), intermediate);
  }
  in_team(ranks, [&](Team& team) {
    for (const Layer& layer : stack) layer.run(team);
  });
  return states;
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
