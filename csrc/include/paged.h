// Attention over a cache of pages, as a plain struct for the CPU's and the GPU's kernels. No torch.
//
//   first   keys[slot(t)], values[slot(t)] = k[t], v[t]    for every token t; slot(t): row rows[t]'s, of positions[t]
//   then    out[t, h] = sum over p of softmax(cap(scaling * q[t, h] . keys[slot(p)])) * values[slot(p)]
//
// p runs from first_seen(positions[t]) to positions[t] of the token's own row; query head h reads key head h / (heads / kv_heads).
#pragma once
#include "elements.h"

namespace neap {

struct PagedArgs {
  const void *q, *k, *v;             // [tokens, heads, width], [tokens, kv_heads, width], [tokens, kv_heads, value_width]
  void *keys, *values;               // [num_pages, kv_heads, page_slots, width], [.., value_width], contiguous
  void* out;                         // [tokens, heads, value_width] contiguous
  const int64_t* pages;              // [num_rows, row_pages]: position p of a row is in its page p / page_slots, slot p % page_slots
  const int64_t *rows, *positions;   // [tokens]; a negative position: padding, nothing is written and its output is 0
  Dtype dtype;                       // of all that is not int64
  int64_t tokens, heads, kv_heads, width, value_width;
  int64_t num_pages, page_slots, num_rows, row_pages;
  int64_t q_token, q_head, k_token, k_head, v_token, v_head;  // strides in elements
  int64_t window;                    // the last positions that a query sees, or 0: all
  float scaling, softcap;            // softcap 0: none
};

constexpr int64_t first_seen(const PagedArgs& args, int64_t position) {
  return args.window > 0 && position >= args.window ? position - args.window + 1 : 0;
}

}  // namespace neap
