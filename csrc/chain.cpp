// Chains of drafts by an exit head as one op: embedding row, block, draft vocabulary, router and stop rule of every
// step, for all sequences together, in one parallel region.
//
//   first step   joined = fuse @ [unit(low); unit(middle); unit(last); unit(e)]    e: the token's row of the embedding
//   later steps  joined = next @ [o; unit(e)]                                      o: the step's before
//   y            = joined + down @ (silu(gate @ n) * (up @ n)),  n = unit(joined) * norm
//   o            = unit(y);  logits = rows @ (o * gain) + bias
//   probability  as the op `route` gives it for o * gain
//
// A product's row does not depend on the other rows, so a sequence's chain does not depend on its company.
#include "device.h"
#include "packed.h"
#include "team.h"

namespace neap::binding {

namespace {

constexpr const char* kOp = "draft_chains";
constexpr int kTop = 2;

// One sequence. Its known tokens are fed first; the last of them, and every draft, gives a draft.
struct Drafting {
  const int64_t* known;
  int64_t num_known, place, room;  // place: tokens of the chain before the first known one
  float survival, factor, least;
  int64_t num_fed = 0, num_drafted = 0, token = 0;
};

struct Chains {
  // Embedding: packed, or row-major.
  bool packed_embedding = false;
  PackedView packed_rows{};
  Weight plain_rows{};
  const float *norm = nullptr, *gain = nullptr;
  const int64_t* vocabulary = nullptr;
  LinearArgs fuse{}, next{}, gated{}, down{};
  LinearArgs rows{}, hidden{};  // their number of rows is that of the sequences that draft
  DraftTopArgs top{};
  RouteArgs route{};
  std::vector<Drafting> sequences;
  int64_t ranks = 1, depth_width = 0, width = 0, embedding_width = 0, num_fresh = 0, max_drafts = 0;
  const float* states = nullptr;                                // [num_fresh, 3 * depth_width]
  float *inputs = nullptr, *normed = nullptr, *sums = nullptr;  // of a step's rows; sums: y
  float* carried = nullptr;                                     // [N, width]: each sequence's last o
  float *adapted = nullptr, *units = nullptr;                   // of the rows that draft
  int64_t *tokens = nullptr, *lengths = nullptr;                // results
  float *probabilities = nullptr, *outputs = nullptr;
  float* embedded = nullptr;  // [N, embedding_width], if the embedding is packed
  // The sequences of the step, and the place of each among those that draft in it, or -1. One thread changes them,
  // between two meetings.
  std::vector<int64_t> active, slots, distances;
  int64_t num_drafting = 0;

  void lay_out(Arena* arena);
  void choose_step();
  void unit(const void* x, Dtype dtype, int64_t size, float* out) const;
  void normalise(const float* x, const float* weight, float* out) const;
  void prepare(int64_t row, bool first) const;
  void finish(int64_t row) const;
  void decide();
  void run(Team& team);
};

void Chains::lay_out(Arena* arena) {
  const int64_t count = (int64_t)sequences.size(), blocks = vocabulary_blocks(top.rows.rows);
  fuse.x_stride = next.x_stride = std::max(3 * depth_width, width) + embedding_width;
  fuse.x = next.x = inputs = arena->take(count * fuse.x_stride);
  fuse.out = next.out = arena->take(count * width);
  gated.x = normed = arena->take(count * width);
  down.x = gated.out = arena->take(count * gated.out_features);
  down.residuals[0] = fuse.out;
  down.out = sums = arena->take(count * width);
  carried = arena->take(count * width);
  rows.x = adapted = arena->take(count * width);
  hidden.x = units = arena->take(count * width);
  top.x = rows.out = arena->take(count * top.rows.rows);
  route.inner = hidden.out = arena->take(count * hidden.out_features);
  if (packed_embedding) embedded = arena->take(count * embedding_width);
  top.block_values = arena->take(count * blocks * kTop);
  top.block_indices = reinterpret_cast<int32_t*>(arena->take(count * blocks * kTop));
  top.block_mass = arena->take(count * blocks * 2);
  route.top = top.values = arena->take(count * kTop);
  top.indices = reinterpret_cast<int64_t*>(arena->take(count * kTop * 2));
  route.log_mass = top.log_mass = arena->take(count);
  route.probability = arena->take(count);
}

// Numbers the active sequences that draft in this step: all their known tokens but one have been fed.
void Chains::choose_step() {
  num_drafting = 0;
  for (size_t row = 0; row < active.size(); ++row) {
    Drafting& chain = sequences[active[row]];
    if (chain.num_fed < chain.num_known) chain.token = chain.known[chain.num_fed];
    const bool drafts = chain.num_fed + 1 >= chain.num_known;
    slots[row] = drafts ? num_drafting++ : -1;
    if (drafts) distances[slots[row]] = chain.place + chain.num_fed + 1;
  }
  rows.rows = hidden.rows = top.tokens = route.tokens = num_drafting;
}

// The RMS norm of a row, without gain.
void Chains::unit(const void* x, Dtype dtype, int64_t size, float* out) const {
  const NormArgs args{
      .x = x, .dtype = dtype, .out = out, .width = size, .x_stride = size, .out_stride = size, .eps = route.eps};
  kernels().norm(args, 0, 1);
}

// The RMS norm of a row of `width` numbers.
void Chains::normalise(const float* x, const float* weight, float* out) const {
  const RowNormArgs args{.x = x, .weight = weight, .out = out, .width = width, .x_stride = width, .eps = route.eps};
  kernels().row_norm(args, 0, 1);
}

// Writes a row of the input of `fuse` or `next`.
void Chains::prepare(int64_t row, bool first) const {
  const int64_t sequence = active[row], token = sequences[sequence].token;
  float* x = inputs + row * fuse.x_stride;
  if (first && sequence < num_fresh) {
    for (int64_t i = 0; i < 3; ++i, x += depth_width)
      unit(states + (sequence * 3 + i) * depth_width, kFloat32, depth_width, x);
  } else {
    std::copy_n(carried + sequence * width, width, x);
    x += width;
  }
  if (packed_embedding) {
    float* e = embedded + row * embedding_width;
    dequantise_row(packed_rows, token, e);
    unit(e, kFloat32, embedding_width, x);
  } else {
    const int64_t at = token * embedding_width * element_bytes(plain_rows.dtype);
    unit(static_cast<const uint8_t*>(plain_rows.data) + at, plain_rows.dtype, embedding_width, x);
  }
}

// The row's output, and what draft rows and router read of it.
void Chains::finish(int64_t row) const {
  const int64_t sequence = active[row], slot = slots[row];
  const float* y = sums + row * width;
  float* o = carried + sequence * width;
  unit(y, kFloat32, width, o);
  if (slot < 0) return;
  std::copy_n(o, width, outputs + (sequence * max_drafts + sequences[sequence].num_drafted) * width);
  normalise(y, gain, adapted + slot * width);
  unit(adapted + slot * width, kFloat32, width, units + slot * width);
}

// Takes the drafts of the step, and leaves only the sequences whose chains go on.
void Chains::decide() {
  const Kernels& kernels = neap::kernels();
  kernels.draft_join(top, 0, num_drafting);
  kernels.route_finish(route, 0, num_drafting);
  size_t going = 0;
  for (size_t row = 0; row < active.size(); ++row) {
    const int64_t sequence = active[row], slot = slots[row];
    Drafting& chain = sequences[sequence];
    ++chain.num_fed;
    if (slot >= 0) {
      chain.token = vocabulary[top.indices[slot * kTop]];
      const int64_t at = sequence * max_drafts + chain.num_drafted++;
      tokens[at] = chain.token;
      probabilities[at] = route.probability[slot];
      lengths[sequence] = chain.num_drafted;
      chain.survival *= std::min(route.probability[slot] * chain.factor, route.highest);
      if (chain.num_drafted == chain.room || !(chain.survival >= chain.least)) continue;
    }
    active[going++] = sequence;
  }
  active.resize(going);
  choose_step();
}

void Chains::run(Team& team) {
  const Kernels& kernels = neap::kernels();
  // A product of `count` rows from number `first` on.
  const auto linear = [&](LinearArgs args, int64_t first, int64_t count) {
    args.x += first * args.x_stride;
    args.out += first * args.out_features;
    args.rows = count;
    if (args.residuals[0]) args.residuals[0] += first * args.out_features;
    const int64_t items = kernels.linear_items(args, ranks);
    team.share(items, [&](int64_t b, int64_t e) { kernels.linear(args, items, b, e); });
  };
  const auto each_row = [&](const auto& f) {
    team.share((int64_t)active.size(), [&](int64_t b, int64_t e) {
      for (int64_t row = b; row < e; ++row) f(row);
    });
    team.meet();
  };
  const int64_t blocks = vocabulary_blocks(top.rows.rows), panels = num_panels(top.rows.rows),
                block_panels = kVocabularyBlock / kPanel;
  for (bool first = true; !active.empty(); first = false) {
    // Read once: after a step that only feeds, decide() changes it while other threads may not have passed the
    // condition below.
    const int64_t drafting = num_drafting;
    const int64_t count = (int64_t)active.size(), fresh = first ? num_fresh : 0;
    each_row([&](int64_t row) { prepare(row, first); });
    if (fresh > 0) linear(fuse, 0, fresh);
    if (fresh < count) linear(next, fresh, count - fresh);
    team.meet();
    each_row([&](int64_t row) { normalise(fuse.out + row * width, norm, normed + row * width); });
    linear(gated, 0, count);
    team.meet();
    linear(down, 0, count);
    team.meet();
    each_row([&](int64_t row) { finish(row); });
    if (drafting > 0) {
      linear(hidden, 0, drafting);
      // Each thread reduces the logits that it has just written.
      team.share(blocks, [&](int64_t b, int64_t e) {
        kernels.linear(rows, panels, b * block_panels, std::min(e * block_panels, panels));
        kernels.logit_blocks(top, b, e);
      });
      team.meet();
    }
    team.gather();
    if (team.rank == 0) decide();
    team.gather();
  }
}

LinearArgs matmul(const char* name, const Tensor& packed, int64_t in_features, int64_t out_features,
                  const float* bias = nullptr) {
  const Tensor* no_up = nullptr;
  return linear_args(kOp, name, packed, no_up, bias, 0, in_features, out_features);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> draft_chains(Tensor states, Tensor outputs, std::vector<int64_t> tokens,
                                                        std::vector<int64_t> counts, std::vector<int64_t> places,
                                                        std::vector<int64_t> rooms, std::vector<double> survivals,
                                                        std::vector<double> factors, std::vector<double> least,
                                                        Tensor embedding, Tensor vocabulary, std::vector<Tensor> packed,
                                                        std::vector<Tensor> vectors, double shift, double eps,
                                                        double lowest, double highest, int64_t max_drafts) {
  check_float(kOp, "states", states, 3);
  check_float(kOp, "outputs", outputs, 2);
  NEAP_CHECK(states.size(1) == 3, kOp, ": states has shape ", text(states), ", want [any, 3, any]");
  NEAP_CHECK(packed.size() == 7, kOp, ": ", packed.size(),
             " matrices, want fuse, next, gate, up, down, rows and hidden");
  NEAP_CHECK(vectors.size() == 7, kOp, ": ", vectors.size(),
             " vectors, want norm, gain, the bias of rows, and the router's bias, output, features and skip");
  NEAP_CHECK(eps >= 0, kOp, ": eps is negative");
  if (!states.is_contiguous()) states = torch::stable::contiguous(states);
  if (!outputs.is_contiguous()) outputs = torch::stable::contiguous(outputs);

  const int64_t num_fresh = states.size(0), depth_width = states.size(2), width = outputs.size(1);
  const int64_t count = num_fresh + outputs.size(0);
  const size_t n = (size_t)count;
  NEAP_CHECK(counts.size() == n && places.size() == n && rooms.size() == n && survivals.size() == n &&
                 factors.size() == n && least.size() == n,
             kOp, ": ", count, " sequences, but ", counts.size(), " counts, ", places.size(), " places, ", rooms.size(),
             " rooms, ", survivals.size(), " survivals, ", factors.size(), " factors and ", least.size(),
             " least survivals");

  const bool packed_embedding = embedding.is_cpu() && embedding.scalar_type() == ScalarType::Byte;
  const PackedView packed_rows = packed_embedding ? packed_view(kOp, "embedding", embedding) : PackedView{};
  const Weight plain_rows = packed_embedding ? Weight{} : Call(kOp, states).weight("embedding", embedding, -1, -1);
  const int64_t vocabulary_size = packed_embedding ? packed_rows.out_features : plain_rows.rows;
  const int64_t embedding_width = packed_embedding ? packed_rows.in_features : plain_rows.columns;
  const auto check_token = [&](const char* what, int64_t token) {
    NEAP_CHECK(token >= 0 && token < vocabulary_size, kOp, ": ", what, " ", token, " is outside [0, ", vocabulary_size,
               ")");
  };
  NEAP_CHECK(vocabulary.is_cpu() && vocabulary.scalar_type() == ScalarType::Long && vocabulary.dim() == 1 &&
                 vocabulary.is_contiguous(),
             kOp, ": vocabulary must be a contiguous int64 vector on the CPU");
  const int64_t* draft_tokens = static_cast<const int64_t*>(vocabulary.const_data_ptr());
  const int64_t drafts = vocabulary.size(0);
  NEAP_CHECK(drafts >= kTop && drafts < INT32_MAX, kOp, ": vocabulary has ", drafts, " tokens, want at least ", kTop);
  for (int64_t i = 0; i < drafts; ++i) check_token("draft token", draft_tokens[i]);

  const int64_t inner = packed_view(kOp, "gate", packed[2]).out_features;
  const int64_t confidence_width = packed_view(kOp, "hidden", packed[6]).out_features;
  const LinearArgs fuse = matmul("fuse", packed[0], 3 * depth_width + embedding_width, width);
  const LinearArgs next = matmul("next", packed[1], width + embedding_width, width);
  const LinearArgs gated = linear_args(kOp, "gate", packed[2], &packed[3], nullptr, 0, width, inner, kSilu);
  const LinearArgs down = matmul("down", packed[4], inner, width);
  const bool has_bias = vectors[2].numel() > 0;
  const LinearArgs rows = matmul("rows", packed[5], width, drafts, has_bias ? floats(vectors[2]) : nullptr);
  const LinearArgs hidden = matmul("hidden", packed[6], width, confidence_width);
  check_vector(kOp, "norm", vectors[0], width);
  check_vector(kOp, "gain", vectors[1], width);
  if (has_bias) check_vector(kOp, "the bias of rows", vectors[2], drafts);
  check_vector(kOp, "the router's bias", vectors[3], confidence_width);
  check_vector(kOp, "the router's output", vectors[4], confidence_width);
  check_vector(kOp, "the router's features", vectors[5], kFeatures * confidence_width);
  check_vector(kOp, "the router's skip", vectors[6], kFeatures);

  std::vector<Drafting> sequences;
  int64_t from = 0;
  for (size_t s = 0; s < n; ++s) {
    NEAP_CHECK(counts[s] >= 1 && from + counts[s] <= (int64_t)tokens.size(), kOp, ": sequence ", (int64_t)s, " has ",
               counts[s], " of ", tokens.size(), " tokens");
    NEAP_CHECK(rooms[s] >= 1 && rooms[s] <= max_drafts && places[s] >= 0, kOp, ": sequence ", (int64_t)s,
               " has room for ", rooms[s], " drafts from place ", places[s], " on, want 1 to ", max_drafts,
               " from 0 on");
    sequences.push_back({
        .known = tokens.data() + from,
        .num_known = counts[s],
        .place = places[s],
        .room = rooms[s],
        .survival = (float)survivals[s],
        .factor = (float)factors[s],
        .least = (float)least[s],
    });
    from += counts[s];
  }
  NEAP_CHECK(from == (int64_t)tokens.size(), kOp, ": the counts sum to ", from, ", but there are ", tokens.size(),
             " tokens");
  for (const int64_t token : tokens) check_token("token", token);

  Tensor drafted = empty({count, max_drafts}, aoti_torch_dtype_int64());
  Tensor lengths = empty({count}, aoti_torch_dtype_int64());
  Tensor probabilities = empty({count, max_drafts}), reached = empty({count, max_drafts, width});
  Chains chains{
      .packed_embedding = packed_embedding,
      .packed_rows = packed_rows,
      .plain_rows = plain_rows,
      .norm = floats(vectors[0]),
      .gain = floats(vectors[1]),
      .vocabulary = draft_tokens,
      .fuse = fuse,
      .next = next,
      .gated = gated,
      .down = down,
      .rows = rows,
      .hidden = hidden,
      .top = {.rows = {.dtype = kFloat32, .rows = drafts, .columns = width}, .k = kTop},
      .route =
          {
              .hidden = {.dtype = kFloat32, .rows = confidence_width, .columns = width},
              .bias = floats(vectors[3]),
              .output = floats(vectors[4]),
              .feature_weight = floats(vectors[5]),
              .skip = floats(vectors[6]),
              .k = kTop,
              .shift = (float)shift,
              .eps = (float)eps,
              .lowest = (float)lowest,
              .highest = (float)highest,
          },
      .sequences = std::move(sequences),
      .depth_width = depth_width,
      .width = width,
      .embedding_width = embedding_width,
      .num_fresh = num_fresh,
      .max_drafts = max_drafts,
      .states = floats(states),
      .tokens = mutable_integers(drafted),
      .lengths = mutable_integers(lengths),
      .probabilities = mutable_floats(probabilities),
      .outputs = mutable_floats(reached),
  };
  std::fill_n(chains.tokens, drafted.numel(), -1);
  std::fill_n(chains.probabilities, probabilities.numel(), 0.f);
  std::fill_n(chains.outputs, reached.numel(), 0.f);
  if (count == 0) return {drafted, probabilities, lengths, reached};

  double flops = 2.0 * (double)width * (double)inner + (double)drafts * width;
  for (const LinearArgs* matmul : {&chains.next, &chains.down, &chains.hidden})
    flops += (double)matmul->in_features * (double)matmul->out_features;
  chains.ranks =
      std::clamp<int64_t>((int64_t)(flops * (double)count / (double)kGrainFlops), 1, torch::stable::get_num_threads());
  Arena size(nullptr);
  chains.lay_out(&size);
  Arena arena(thread_scratch(size.used()));
  chains.lay_out(&arena);
  std::copy_n(floats(outputs), outputs.numel(), chains.carried + num_fresh * width);
  chains.slots.resize(n);
  chains.distances.resize(n);
  chains.route.distance = chains.distances.data();
  for (int64_t s = 0; s < count; ++s) chains.active.push_back(s);
  chains.choose_step();
  in_team(chains.ranks, [&](Team& team) { chains.run(team); });
  return {drafted, probabilities, lengths, reached};
}

}  // namespace neap::binding
