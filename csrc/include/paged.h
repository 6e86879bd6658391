// Paged attention, with its arguments as a plain struct for the CPU and GPU kernels. No torch.
//
//   1. keys[slot(t)], values[slot(t)] = k[t], v[t]    for every token t, where slot(t) is that of position
//                                                     positions[t] in block table table_indices[t]
//   2. out[t, h] = sum over p of softmax(cap(scaling * q[t, h] . keys[slot(p)])) * values[slot(p)]
//
// p runs from first_seen(positions[t]) to positions[t] in the token's sequence. Query head h reads key head
// h / (heads / kv_heads).
//
// Words: a block is a run of `block_tokens` positions in the pools of keys and values, a slot is the place of one token
// in a block, and a block table lists the blocks of one sequence. A block of CUDA threads is a thread block here.
#pragma once
#include <algorithm>

#include "elements.h"

namespace neap {

struct PagedArgs {
  const void *q, *k, *v;  // [tokens, heads, width], [tokens, kv_heads, width], [.., value_width]
  void *keys, *values;    // [num_blocks, kv_heads, block_tokens, width], [.., value_width], contiguous
  void* out;              // [tokens, heads, value_width] contiguous
  // [num_tables, table_blocks]: position p of a sequence is in slot p % block_tokens of its block p / block_tokens.
  const int64_t* block_tables;
  const int64_t* table_indices;  // [tokens]: which block table is that of the token's sequence
  const int64_t* positions;      // [tokens]; a negative one marks padding: nothing is written, its output is 0
  Dtype dtype;                   // of all tensors that are not int64
  int64_t tokens, heads, kv_heads, width, value_width;
  int64_t num_blocks, block_tokens, num_tables, table_blocks;
  int64_t q_token, q_head, k_token, k_head, v_token, v_head;  // strides in elements
  int64_t window;                                             // number of last positions that a query sees, or 0: all
  float scaling, softcap;                                     // softcap 0: none
  float* partials;    // GPU: results of pieces, [PagedPlan::num_partials]; null if that is 0
  uint32_t* tickets;  // GPU: counters, [PagedPlan::num_tickets]; the launch initialises them
};

// The first position that the query at `position` sees.
NEAP_ANYWHERE constexpr int64_t first_seen(const PagedArgs& args, int64_t position) {
  return args.window > 0 && position >= args.window ? position - args.window + 1 : 0;
}

// The GPU kernel's split of the work. A token's keys are cut into at most kPieces pieces, which depend on the token's
// position alone. `shares` thread blocks process the pieces in turns, and the results of the pieces are joined in their
// order. So the bits of the result do not depend on the number of thread blocks, which depends on the other tokens of
// the pass.
constexpr int64_t kPieces = 32;
constexpr int64_t kPieceKeys = 128;           // the number of keys of a piece is a multiple of this, except in the last
constexpr int64_t kQueryFloats = 2048;        // room for the queries of a thread block in shared memory
constexpr int64_t kWantedThreadBlocks = 512;  // enough to give every multiprocessor of the largest GPU work

struct PagedPlan {
  bool wide;        // keys and values are read 16 bytes at a time
  int64_t heads;    // query heads per thread block: 1, 4 or 8
  int64_t columns;  // output numbers per head and thread block
  int64_t tiles;    // tiles of a token's output: key heads x tiles of their query heads x tiles of columns
  int64_t shares;   // largest number of thread blocks that divide a tile's pieces among them

  int64_t num_tickets(int64_t tokens) const { return shares > 1 ? tokens * tiles : 0; }
  int64_t num_partials(int64_t tokens) const {
    return shares > 1 ? tokens * tiles * kPieces * heads * (columns + 2) : 0;
  }
};

// Whether addresses and widths allow reading keys and values 16 bytes at a time.
inline bool is_wide(const PagedArgs& args) {
  const uint64_t together = (uint64_t)args.keys | (uint64_t)args.values |
                            (uint64_t)(args.width * element_bytes(args.dtype)) |
                            (uint64_t)(args.value_width * element_bytes(args.dtype));
  return together % 16 == 0;
}

// The plan depends on shapes and addresses alone, never on positions, because a captured CUDA graph is replayed with
// other positions.
inline PagedPlan paged_plan(const PagedArgs& args) {
  PagedPlan plan{};
  plan.wide = is_wide(args);
  const int64_t group = args.heads / args.kv_heads;
  // Tiles of 4 heads, or 8 if 16 bytes hold eight numbers. One head at a time if the cache is read number by number,
  // which is rare.
  plan.heads = group == 1 || !plan.wide ? 1 : group <= 4 || args.dtype == kFloat32 ? 4 : 8;
  while (plan.heads > 1 && plan.heads * args.width > kQueryFloats) plan.heads = plan.heads == 8 ? 4 : 1;
  const int64_t widest = 32 * (plan.wide ? 16 / element_bytes(args.dtype) : 1);
  plan.columns = std::min(widest, args.value_width);
  plan.tiles = args.kv_heads * ((group + plan.heads - 1) / plan.heads) * ((args.value_width + widest - 1) / widest);
  const int64_t capacity = std::max<int64_t>(1, args.table_blocks * args.block_tokens);
  const int64_t useful = std::min(kPieces, (capacity + kPieceKeys - 1) / kPieceKeys);
  plan.shares =
      std::max<int64_t>(1, std::min(useful, kWantedThreadBlocks / std::max<int64_t>(1, args.tokens * plan.tiles)));
  return plan;
}

// Launches both kernels on `stream`. Returns 0 or a CUDA error.
int launch_paged_attention(const PagedArgs& args, const PagedPlan& plan, void* stream);

}  // namespace neap
