// Runs paged attention on the emulator: see emulated_main.h.
#include "../../../csrc/cuda/paged.cu"
#include "emulated_main.h"

int run(const Call& c) {
  using namespace neap;
  PagedArgs a{};
  a.dtype = (Dtype)c.integer();
  a.tokens = c.integer();
  a.heads = c.integer();
  a.kv_heads = c.integer();
  a.width = c.integer();
  a.value_width = c.integer();
  a.num_blocks = c.integer();
  a.block_tokens = c.integer();
  a.num_tables = c.integer();
  a.table_blocks = c.integer();
  a.q_token = c.integer();
  a.q_head = c.integer();
  a.k_token = c.integer();
  a.k_head = c.integer();
  a.v_token = c.integer();
  a.v_head = c.integer();
  a.scaling = (float)c.next();
  a.softcap = (float)c.next();
  a.window = c.integer();
  const int64_t shares = c.integer();  // 0: as planned
  a.q = c.data<char>();
  a.k = c.data<char>();
  a.v = c.data<char>();
  a.keys = c.data<char>();
  a.values = c.data<char>();
  a.block_tables = c.data<int64_t>();
  a.table_indices = c.data<int64_t>();
  a.positions = c.data<int64_t>();
  a.out = c.data<char>();
  PagedPlan plan = paged_plan(a);
  if (shares) plan.shares = shares;
  // Of any content, as the allocator hands them out.
  std::unique_ptr<float[]> partials(new float[plan.num_partials(a.tokens)]);
  std::unique_ptr<uint32_t[]> tickets(new uint32_t[plan.num_tickets(a.tokens)]);
  std::fill_n(partials.get(), plan.num_partials(a.tokens), NAN);
  std::fill_n(tickets.get(), plan.num_tickets(a.tokens), 77u);
  a.partials = partials.get();
  a.tickets = tickets.get();
  const int code = launch_paged_attention(a, plan, nullptr);
  for (int64_t i = 0; code == 0 && i < plan.num_tickets(a.tokens); ++i)
    if (tickets[i]) emulator::die("a ticket is left");
  return code;
}
