// Runs the launches of exits and choices on the emulator: see emulated_main.h.
#include "../../../csrc/cuda/kernels.cu"
#include "emulated_main.h"

int run(const Call& c) {
  using namespace neap;
  if (c.name == "draft_top") {
    DraftTopArgs a{};
    a.tokens = c.integer();
    const Dtype dtype = (Dtype)c.integer();
    const int64_t rows = c.integer(), columns = c.integer();
    a.k = (int)c.integer();
    a.x = c.data<float>(), a.rows = {c.data<char>(), dtype, rows, columns}, a.bias = c.data<float>();
    a.block_values = c.data<float>();
    a.block_indices = c.data<int32_t>();
    a.block_mass = c.data<float>();
    a.values = c.data<float>();
    a.indices = c.data<int64_t>();
    a.log_mass = c.data<float>();
    return launch_draft_top(a, nullptr);
  }
  if (c.name == "route") {
    RouteArgs a{};
    a.tokens = c.integer();
    a.dtype = (Dtype)c.integer();
    a.x_stride = c.integer();
    const Dtype dtype = (Dtype)c.integer();
    const int64_t width = c.integer(), columns = c.integer();
    a.k = (int)c.integer();
    a.shift = (float)c.next();
    a.eps = (float)c.next();
    a.lowest = (float)c.next();
    a.highest = (float)c.next();
    a.x = c.data<char>(), a.hidden = {c.data<char>(), dtype, width, columns}, a.bias = c.data<float>(),
    a.output = c.data<float>();
    a.feature_weight = c.data<float>();
    a.skip = c.data<float>();
    a.top = c.data<float>();
    a.log_mass = c.data<float>();
    a.distance = c.data<int64_t>();
    a.inner = c.data<float>();
    a.tickets = c.data<uint32_t>();
    a.probability = c.data<float>();
    return launch_route(a, nullptr);
  }
  if (c.name == "choose") {
    ChoiceArgs a{};
    a.type = (Weighting)c.integer();
    a.rows = c.integer();
    a.vocabulary = a.stride = c.integer();
    a.scores = c.data<char>();
    a.uniforms = c.data<double>();
    a.parts = c.data<ChoicePart>();
    a.choices = c.data<int64_t>();
    return launch_choose(a, nullptr);
  }
  if (c.name == "slots") {
    draft::SlotArgs a{};
    a.width = c.integer();
    const auto num_rows = (int)c.integer();
    draft::Proposers p{};
    p.tables.vocabulary_size = c.integer();
    for (draft::NgramOrder& order : p.tables.orders) order.size = c.integer();
    p.learned.num_sets = c.integer();
    a.control = c.data<draft::Control>(), a.slots = c.data<draft::Slot>(), a.tokens = c.data<int32_t>();
    a.rows = c.data<draft::Row>(), a.newest = c.data<int64_t>(), a.token_rows = c.data<int64_t>();
    a.logit_rows = c.data<int64_t>(), a.drawing = c.data<double>(), a.chosen = c.data<int64_t>();
    a.state_rows = c.data<int64_t>(), a.state_slots = c.data<int64_t>(), a.spare_slot = draft::kMostRows;
    p.tables.has_lookup = p.tables.has_ngrams = true;
    p.tables.lookup = *c.data<draft::TableConfidence>(), p.tables.ngrams = *c.data<draft::TableConfidence>();
    p.tables.weights = *c.data<draft::JointWeights>();
    for (draft::NgramOrder& order : p.tables.orders) {
      order.keys = c.data<uint32_t>(), order.tokens = c.data<uint32_t>();
      order.counts = c.data<uint8_t>(), order.shares = c.data<uint8_t>();
    }
    p.learned.entries = c.data<draft::LearnedEntry>();
    p.exit_tokens = c.data<int64_t>(), p.exit_probabilities = c.data<float>();
    int failed = launch_begin_rows(a, 0, nullptr);
    for (int place = 0; place < draft::kPlaces; ++place) failed |= launch_draft_place(a, p, num_rows, place, nullptr);
    failed |= launch_plan_pass(a, nullptr);
    return failed | launch_accept_rows(a, nullptr);
  }
  return -1;
}
