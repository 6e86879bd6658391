// Consecutive pre-norm decoder layers as one op: h = x + attention(norm(x)), then h + mlp(norm(h)), all steps of all
// layers in one parallel region. What attention and the MLP add may be normed, too, and an MLP that is parallel to
// attention adds to the same x. What a layer is given of each token may be mixed in last.
//
// It calls the same kernels in the same order as the separate ops do, so its result has the bits of the modules'.
#include "layer.h"
#include "packed.h"
#include "tensor_table.h"

namespace neap::binding {

namespace {

constexpr const char* kOp = "decoder_layers";

// The places of each layer's tensors, in their order. What a layer does not have is an empty tensor.
enum Norm { kInputNorm, kMlpNorm, kQueryNorm, kKeyNorm, kAttendedNorm, kOutputNorm, kNorms };
// Without keys, queries have all three. kInner is the experts' table and kUp their router.
enum Product { kQueries, kKeys, kValues, kOut, kInner, kUp, kDown, kMatrices };
// What follows the MLP: matrices, a norm, and the number that the layer's output is multiplied by.
enum End { kGivenGate, kGivenOut, kGivenNorm, kScale, kEnds };
// Those of kQueries to kOut have the products' numbers. kInnerBias: with that of kUp behind it, or the router's.
enum Bias { kInnerBias = kInner, kDownBias, kSinks, kBiases };
// Where head 0 of queries, keys and values is in the one projection of all three, and how far its heads are apart.
constexpr size_t kPlaces = 6;

// Adds the next `count` tokens of x, which belong to one sequence, at positions from `base` on: the slots of their keys
// and values, and their attention problem.
void add_sequence(Layer* layer, const TensorInfo& keys, const TensorInfo& values, int64_t base, int64_t count,
                  const Tensor* mask, double scaling, const std::optional<double>& softcap, const float* sinks) {
  const PlaceArgs& place = layer->place;
  const Dtype dtype = check_cache(kOp, keys, values, place.kv_heads, place.width, place.value_width, base, count);
  NEAP_CHECK(dtype == place.kv_dtype, kOp, ": the caches of several sequences are of different dtypes");
  if (mask) check_mask(kOp, *mask, 1, count, base + count);
  const int64_t bytes = element_bytes(dtype);
  uint8_t* key = static_cast<uint8_t*>(keys.mutable_data_ptr());
  uint8_t* value = static_cast<uint8_t*>(values.mutable_data_ptr());
  for (int64_t token = base; token < base + count; ++token)
    layer->slots.push_back({
        .key = key + token * keys.stride(2) * bytes,
        .value = value + token * values.stride(2) * bytes,
        .key_head = keys.stride(1) * bytes,
        .value_head = values.stride(1) * bytes,
    });
  const Queries queries{.batch = 1, .heads = place.heads, .count = count};
  layer->problems.push_back(
      attention_args(queries, keys, values, dtype, base + count, mask, mask == nullptr, scaling, softcap, sinks));
}

// What all layers of a call have in common.
struct Call {
  Tensor x;
  std::vector<Tensor> cos, sin;           // per kind of layer
  std::vector<TensorTable> keys, values;  // per sequence
  std::vector<int64_t> bases, counts;
  std::vector<Tensor> masks;   // per kind those of all sequences
  std::vector<int64_t> kinds;  // per layer; without them all are of kind 0
  int64_t heads;
  Activation activation;
  double eps, weight_offset, scaling, query_scale;
  std::optional<double> softcap;
  std::vector<int64_t> places;
  bool parallel_mlp;
  int64_t experts_per_token;  // 0: there are no experts
  bool norm_shares, norm_values;
  std::optional<Tensor> query_scales;  // [Q] or [B * Q]
  std::optional<Tensor> given;         // [B * Q, layers, P]

  int64_t tokens() const { return x.size(0) * x.size(1); }
};

// The tensors of one layer. No biases means that there are none.
struct LayerTensors {
  TensorTable norms, packed, biases, ends;
  int64_t intermediate;
  bool reads_kv;

  // Null if the layer has none, else contiguous [size].
  const float* bias(size_t at, const char* name, int64_t size) const {
    if (!biases.count || biases[at].numel() == 0) return nullptr;
    check_vector(kOp, name, biases[at], size);
    return floats(biases[at]);
  }
};

// Part `index` of `all`, which holds the same number for each of `layers` layers.
TensorTable part(const TensorTable& all, int64_t index, int64_t layers) {
  const size_t count = all.count / layers;
  return {all.first + index * count, count};
}

// An RMS norm of [size] weights, or a layer norm of [2, size]: weights and biases.
RowNormArgs norm_of(const Call& call, const TensorInfo& t, int64_t size, const float* x) {
  const bool centred = t.dim() == 2;
  check_float(kOp, "a norm", t, -1);
  NEAP_CHECK(t.is_contiguous() && t.numel() == (centred ? 2 : 1) * size && t.size(t.dim() - 1) == size, kOp,
             ": a norm must be contiguous with shape [", size, "] or [2, ", size, "], got ", text(t));
  return {
      .x = x,
      .weight = floats(t),
      .bias = centred ? floats(t) + size : nullptr,
      .width = size,
      .x_stride = size,
      .eps = (float)call.eps,
      .weight_offset = (float)call.weight_offset,
  };
}

Experts make_experts(const Call& call, const LayerTensors& t) {
  const int64_t width = call.x.size(2), tokens = call.tokens();
  Experts experts{.table = experts_of(kOp, t.packed[kInner]), .tokens = tokens, .activation = call.activation};
  const ExpertTable& table = experts.table;
  NEAP_CHECK(table.width == width && table.intermediate == t.intermediate, kOp, ": experts have matrices [",
             table.intermediate, ", ", table.width, "], want [", t.intermediate, ", ", width, "]");
  NEAP_CHECK(!t.biases.count || t.biases[kDownBias].numel() == 0, kOp, ": the biases of experts are in their table");
  check_chosen(kOp, call.experts_per_token, table.count);
  experts.router = linear_args<TensorInfo>(kOp, "router", t.packed[kUp], nullptr,
                                           t.bias(kInnerBias, "router", table.count), tokens, width, table.count);
  experts.choice = {.experts = table.count, .chosen = call.experts_per_token, .normed = call.norm_shares};
  experts.sum = {.width = width, .chosen = call.experts_per_token};
  return experts;
}

// Adds to a layer what follows its MLP and makes its output from `result`, in place.
void add_end(const Call& call, const LayerTensors& t, int64_t index, float* result, Layer* layer) {
  const auto has = [&](End end) { return t.ends[end].numel() > 0; };
  const float* scale = nullptr;
  if (has(kScale)) {
    check_vector(kOp, "a layer's scale", t.ends[kScale], 1);
    scale = floats(t.ends[kScale]);
  }
  if (!has(kGivenNorm)) {
    NEAP_CHECK(!scale || layer->output_norm.weight, kOp, ": a scale needs a norm of what the MLP adds");
    layer->output_norm.scale = scale;
    return;
  }
  NEAP_CHECK(call.given, kOp, ": layers that are given something need per_layer_inputs");
  const int64_t width = call.x.size(2), columns = call.given->size(2), tokens = layer->tokens;
  layer->given = floats(*call.given) + index * columns;
  layer->given_row = call.given->size(1) * columns;
  layer->given_gate = linear_args<TensorInfo>(kOp, "given_gate", t.ends[kGivenGate], nullptr, nullptr, tokens, width,
                                              columns, call.activation);
  layer->given_out =
      linear_args<TensorInfo>(kOp, "given_out", t.ends[kGivenOut], nullptr, nullptr, tokens, columns, width);
  layer->given_norm = norm_of(call, t.ends[kGivenNorm], width, nullptr);
  layer->given_norm.scale = scale;
  layer->given_gate.x = layer->given_norm.residual = layer->given_norm.out = result;
}

// A layer that reads from `x` and writes to `result`, both [tokens, D]. They may be the same memory: x is last read in
// the step before the one that writes the result.
Layer make_layer(const Call& call, const LayerTensors& t, int64_t index, const float* x, float* result) {
  const int64_t width = call.x.size(2);
  const TensorInfo &keys = call.keys[0][index], &values = call.values[0][index];
  const size_t kind = call.kinds.empty() ? 0 : call.kinds[index], sequences = call.keys.size();
  const Tensor &cos = call.cos[kind], &sin = call.sin[kind];
  Layer layer;
  layer.tokens = call.tokens();
  PlaceArgs& place = layer.place;
  place = {
      .cos = floats(cos),
      .sin = floats(sin),
      .kv_dtype = check_kv(kOp, keys, values),
      .heads = call.heads,
      .kv_heads = keys.size(1),
      .width = keys.size(3),
      .value_width = values.size(3),
      .rotated = cos.size(2),
      .angles = cos.size(0) * cos.size(1),
      .eps = (float)call.eps,
      .weight_offset = (float)call.weight_offset,
      .norms_values = call.norm_values,
      .q_scale = (float)call.query_scale,
      .q_scales = call.query_scales ? floats(*call.query_scales) : nullptr,
      .scales = call.query_scales ? call.query_scales->numel() : 1,
  };
  NEAP_CHECK(call.heads > 0 && place.kv_heads > 0 && call.heads % place.kv_heads == 0, kOp, ": ", call.heads,
             " query heads cannot share ", place.kv_heads, " key heads");
  NEAP_CHECK((cos.size(0) == 1 || cos.size(0) == call.x.size(0)) && cos.size(1) == call.x.size(1) &&
                 place.rotated % 2 == 0 && place.rotated <= place.width,
             kOp, ": cos ", text(cos), " does not fit x ", text(call.x), " with heads of ", place.width);
  const auto has = [&](Norm norm) { return t.norms[norm].numel() > 0; };
  for (const auto& [norm, weight] : {std::pair{kQueryNorm, &place.q_norm}, std::pair{kKeyNorm, &place.k_norm}})
    if (has(norm)) {
      check_vector(kOp, "a head norm", t.norms[norm], place.width);
      *weight = floats(t.norms[norm]);
    }
  const float* sinks = t.bias(kSinks, "sinks", call.heads);
  for (size_t s = 0; s < sequences; ++s) {
    const Tensor* mask = call.masks.empty() ? nullptr : &call.masks[kind * sequences + s];
    add_sequence(&layer, call.keys[s][index], call.values[s][index], call.bases[s], call.counts[s],
                 mask && mask->numel() > 0 ? mask : nullptr, call.scaling, call.softcap, sinks);
  }
  place.slots = layer.slots.data();

  layer.input_norm = norm_of(call, t.norms[kInputNorm], width, x);
  NEAP_CHECK(has(kMlpNorm) || call.parallel_mlp, kOp, ": an MLP after attention needs a norm");
  const TensorInfo& mlp_norm = t.norms[has(kMlpNorm) ? kMlpNorm : kInputNorm];
  layer.mlp_norm = norm_of(call, mlp_norm, width, call.parallel_mlp ? x : nullptr);
  NEAP_CHECK(!call.parallel_mlp || (!has(kAttendedNorm) && !has(kOutputNorm)), kOp,
             ": what a parallel MLP adds cannot be normed");
  const int64_t q = call.heads * place.width, k = place.kv_heads * place.width, v = place.kv_heads * place.value_width;
  const bool apart = t.packed[kKeys].numel() > 0;
  const Sizes parts = t.reads_kv ? Sizes{q} : apart ? Sizes{q, k, v} : Sizes{q + k + v};
  int64_t places[kPlaces] = {0, place.width, apart ? 0 : q, place.width, apart ? 0 : q + k, place.value_width};
  if (!t.reads_kv) std::copy(call.places.begin(), call.places.end(), places);
  const int64_t counts[] = {call.heads, place.kv_heads, place.kv_heads};
  for (size_t i = 0; i < (t.reads_kv ? 1 : 3); ++i) {
    const int64_t at = places[2 * i], step = places[2 * i + 1], size = i == 2 ? place.value_width : place.width;
    NEAP_CHECK(at >= 0 && step >= size && at + (counts[i] - 1) * step + size <= parts[apart ? i : 0], kOp,
               ": heads of ", size, " from ", at, " on, ", step, " apart, exceed a projection of ",
               parts[apart ? i : 0]);
  }
  layer.q_at = places[0], layer.k_at = places[2], layer.v_at = places[4];
  place.q_head = places[1], place.k_head = places[3], place.v_head = places[5];
  const auto matmul = [&](const char* name, size_t at, const TensorInfo* up, size_t bias_at, int64_t in_features,
                          int64_t out_features, Activation activation = kIdentity) {
    return linear_args(kOp, name, t.packed[at], up, t.bias(bias_at, name, (up ? 2 : 1) * out_features), layer.tokens,
                       in_features, out_features, activation);
  };
  for (size_t i = 0; i < parts.size(); ++i)
    layer.projections.push_back(matmul("a projection", kQueries + i, nullptr, i, width, parts[i]));
  const TensorInfo* up = t.packed[kUp].numel() ? &t.packed[kUp] : nullptr;
  layer.out = matmul("out", kOut, nullptr, kOut, call.heads * place.value_width, width);
  if (call.experts_per_token) {
    layer.experts = make_experts(call, t);
  } else {
    layer.inner = matmul(up ? "gate" : "inner", kInner, up, kInnerBias, width, t.intermediate, call.activation);
    layer.down = matmul("down", kDown, nullptr, kDownBias, t.intermediate, width);
  }
  layer.down.out = result;
  if (has(kAttendedNorm)) {
    layer.attended_norm = norm_of(call, t.norms[kAttendedNorm], width, nullptr);
    layer.attended_norm.residual = x;
  } else {
    (call.parallel_mlp ? layer.down.residuals[1] : layer.out.residuals[0]) = x;
  }
  if (has(kOutputNorm)) {
    layer.output_norm = norm_of(call, t.norms[kOutputNorm], width, nullptr);
    layer.output_norm.out = result;
  }
  if (t.ends.count) add_end(call, t, index, result, &layer);
  if (t.reads_kv) place.kv_heads = 0;  // nothing is placed
  return layer;
}

}  // namespace

Tensor decoder_layers(Tensor x, std::vector<Tensor> cos, std::vector<Tensor> sin, Tensor norm_table,
                      Tensor packed_table, Tensor bias_table, std::vector<Tensor> key_tables,
                      std::vector<Tensor> value_tables, std::vector<int64_t> bases, std::vector<int64_t> counts,
                      std::vector<Tensor> masks, std::vector<int64_t> kinds, std::vector<int64_t> stops,
                      int64_t num_layers, int64_t heads, std::vector<int64_t> intermediates, std::string activation,
                      double eps, double weight_offset, double scaling, std::optional<double> softcap,
                      std::vector<int64_t> places, double query_scale, bool parallel_mlp, int64_t experts_per_token,
                      bool norm_shares, std::optional<Tensor> query_scales, bool norm_values,
                      std::vector<int64_t> reads_kv, std::optional<Tensor> end_table,
                      std::optional<Tensor> per_layer_inputs) {
  check_float(kOp, "x", x, 3);
  NEAP_CHECK(num_layers > 0, kOp, ": ", num_layers, " layers");
  const size_t layers = num_layers, sequences = bases.size();
  const TensorTable norms = table_of(kOp, "norms", norm_table), packed = table_of(kOp, "packed", packed_table),
                    biases = table_of(kOp, "biases", bias_table),
                    ends = end_table ? table_of(kOp, "ends", *end_table) : TensorTable{};
  std::vector<TensorTable> keys, values;
  for (const Tensor& table : key_tables) keys.push_back(table_of(kOp, "keys", table));
  for (const Tensor& table : value_tables) values.push_back(table_of(kOp, "values", table));
  NEAP_CHECK(sequences > 0 && keys.size() == sequences && values.size() == sequences && counts.size() == sequences, kOp,
             ": ", keys.size(), " caches of keys, ", values.size(), " of values, ", sequences, " bases and ",
             counts.size(), " counts");
  for (size_t s = 0; s < sequences; ++s)
    NEAP_CHECK(keys[s].count == layers && values[s].count == layers, kOp, ": a cache of ", keys[s].count,
               " layers of keys and ", values[s].count, " of values, for ", layers, " layers");
  NEAP_CHECK(!cos.empty() && cos.size() == sin.size() && (masks.empty() || masks.size() == sequences * cos.size()), kOp,
             ": ", cos.size(), " cos, ", sin.size(), " sin and ", masks.size(), " masks, for ", sequences,
             " sequences");
  NEAP_CHECK(kinds.empty() || kinds.size() == layers, kOp, ": ", kinds.size(), " kinds of ", layers, " layers");
  for (int64_t kind : kinds)
    NEAP_CHECK(kind >= 0 && (size_t)kind < cos.size(), kOp, ": kind ", kind, " of ", cos.size());
  NEAP_CHECK(norms.count == kNorms * layers && packed.count == kMatrices * layers &&
                 (biases.count == 0 || biases.count == kBiases * layers) &&
                 (places.empty() || places.size() == kPlaces),
             kOp, ": ", norms.count, " norms, ", packed.count, " matrices, ", biases.count, " biases and ",
             places.size(), " places for ", layers, " layers, want 6, 7, 7 or 0 each, and 6 or 0 places");
  NEAP_CHECK(intermediates.size() == layers && (reads_kv.empty() || reads_kv.size() == layers) &&
                 (ends.count == 0 || ends.count == kEnds * layers),
             kOp, ": ", intermediates.size(), " widths of MLPs, ", reads_kv.size(), " of reads_kv and ", ends.count,
             " of ends for ", layers, " layers");
  stops.push_back(num_layers);
  for (size_t i = 0; i < stops.size(); ++i)
    NEAP_CHECK(stops[i] > (i ? stops[i - 1] : 0) && stops[i] <= num_layers, kOp, ": stop ", stops[i],
               " is out of order, or not between 1 and ", num_layers - 1);
  NEAP_CHECK(experts_per_token >= 0, kOp, ": ", experts_per_token, " experts per token");
  NEAP_CHECK(!softcap || *softcap > 0, kOp, ": softcap must be positive");
  NEAP_CHECK(eps >= 0, kOp, ": eps is negative");
  for (size_t i = 0; i < cos.size(); ++i) {
    check_float(kOp, "cos", cos[i], 3);
    check_float(kOp, "sin", sin[i], 3);
    NEAP_CHECK(text(cos[i]) == text(sin[i]), kOp, ": cos ", text(cos[i]), " and sin ", text(sin[i]),
               " differ in shape");
    for (Tensor* t : {&cos[i], &sin[i]})
      if (!t->is_contiguous()) *t = torch::stable::contiguous(*t);
  }
  if (query_scales) {
    check_float(kOp, "query_scales", *query_scales, 1);
    NEAP_CHECK(query_scales->numel() == x.size(1) || query_scales->numel() == x.size(0) * x.size(1), kOp,
               ": query_scales ", text(*query_scales), " do not fit x ", text(x));
    if (!query_scales->is_contiguous()) query_scales = torch::stable::contiguous(*query_scales);
  }
  if (per_layer_inputs) {
    check_float(kOp, "per_layer_inputs", *per_layer_inputs, 3);
    NEAP_CHECK(per_layer_inputs->size(0) == x.size(0) * x.size(1) && per_layer_inputs->size(1) == num_layers, kOp,
               ": per_layer_inputs ", text(*per_layer_inputs), " do not fit x ", text(x), " and ", num_layers,
               " layers");
    if (!per_layer_inputs->is_contiguous()) per_layer_inputs = torch::stable::contiguous(*per_layer_inputs);
  }
  if (!x.is_contiguous()) x = torch::stable::contiguous(x);
  const Call call{
      .x = x,
      .cos = cos,
      .sin = sin,
      .keys = keys,
      .values = values,
      .bases = bases,
      .counts = counts,
      .masks = masks,
      .kinds = kinds,
      .heads = heads,
      .activation = activation_of(kOp, activation),
      .eps = eps,
      .weight_offset = weight_offset,
      .scaling = scaling,
      .query_scale = query_scale,
      .softcap = softcap,
      .places = places,
      .parallel_mlp = parallel_mlp,
      .experts_per_token = experts_per_token,
      .norm_shares = norm_shares,
      .norm_values = norm_values,
      .query_scales = query_scales,
      .given = per_layer_inputs,
  };
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
    if (i == stops[stop]) {
      ++stop;
      leaving += x.numel();
    }
    const LayerTensors tensors{
        .norms = part(norms, i, num_layers),
        .packed = part(packed, i, num_layers),
        .biases = part(biases, i, num_layers),
        .ends = part(ends, i, num_layers),
        .intermediate = intermediates[i],
        .reads_kv = !reads_kv.empty() && reads_kv[i] != 0,
    };
    stack.push_back(make_layer(call, tensors, i, entering, leaving));
    entering = leaving;
    ranks = std::max(ranks, stack.back().ranks_wanted());
  }
  int64_t covered = 0;
  for (int64_t count : counts) covered += count;
  NEAP_CHECK(covered == call.tokens(), kOp, ": the counts sum to ", covered, " tokens, but x has ", call.tokens());
  for (Layer& layer : stack) {
    layer.ranks = ranks;
    layer.count(neap::kernels());
    Arena size(nullptr);
    layer.lay_out(&size, x.size(2));
    floats_used = std::max(floats_used, size.used());
  }
  // One layer's intermediate results overwrite those of the layer before.
  float* scratch = thread_scratch(floats_used);
  for (Layer& layer : stack) {
    Arena arena(scratch);
    layer.lay_out(&arena, x.size(2));
  }
  in_team(ranks, [&](Team& team) {
    for (const Layer& layer : stack) layer.run(team);
  });
  return states;
}

}  // namespace neap::binding
