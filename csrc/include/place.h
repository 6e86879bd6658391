// Head norms, rotary positions, and writing new keys and values to their slots: see PlaceArgs.
#pragma once
#include "half_simd.h"
#include "rowwise.h"

namespace neap::NEAP_ISA {

// Normalises one head of one token in place.
inline void norm_head(const PlaceArgs& args, const float* weight, int64_t width, float* head) {
  const RowNormArgs norm_args{
      .x = head,
      .weight = weight,
      .out = head,
      .width = width,
      .x_stride = width,
      .eps = args.eps,
      .weight_offset = args.weight_offset,
  };
  row_norm(norm_args, 0, 1);
}

// Normalises (unless `norm` is null) and rotates one head of one token in place.
inline void turn_head(const PlaceArgs& args, const float* norm, int64_t token, float* head) {
  if (norm) norm_head(args, norm, args.width, head);
  const int64_t angle = token % args.angles * args.rotated;
  const RotaryArgs rotary_args{
      .x = head,
      .cos = args.cos + angle,
      .sin = args.sin + angle,
      .out = head,
      .heads = 1,
      .length = 1,
      .width = args.rotated,
  };
  rotary(rotary_args, 0, 1);
}

inline void place(const PlaceArgs& args, int64_t begin, int64_t end) {
  const int64_t lines = args.heads + 2 * args.kv_heads;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t token = item / lines, line = item % lines;
    const Slot& slot = args.slots[token];
    if (line < args.heads) {
      float* q = args.q + token * args.q_row + line * args.q_head;
      if (args.q_scale != 1.f)
        for (int64_t i = 0; i < args.width; ++i) q[i] *= args.q_scale;
      turn_head(args, args.q_norm, token, q);
      if (args.q_scales)
        for (int64_t i = 0; i < args.width; ++i) q[i] *= args.q_scales[token % args.scales];
    } else if (line < args.heads + args.kv_heads) {
      const int64_t head = line - args.heads;
      float* k = args.k + token * args.k_row + head * args.k_head;
      turn_head(args, args.k_norm, token, k);
      round_row(k, args.width, args.kv_dtype, slot.key + head * slot.key_head);
    } else {
      const int64_t head = line - args.heads - args.kv_heads;
      float* v = args.v + token * args.v_row + head * args.v_head;
      if (args.norms_values) norm_head(args, nullptr, args.value_width, v);
      round_row(v, args.value_width, args.kv_dtype, slot.value + head * slot.value_head);
    }
  }
}

}  // namespace neap::NEAP_ISA
