// Head norms, rotary positions, and writing new keys and values to their slots: see PlaceArgs.
#pragma once
#include "rowwise.h"

namespace neap::NEAP_ISA {

// Normalises (unless `norm` is null) and rotates one head of one token from `in` to `out`, which may be equal.
inline void place_head(const PlaceArgs& args, const float* norm, int64_t token, const float* in, float* out) {
  if (norm) {
    rms_norm({in, norm, out, args.width, args.width, args.eps, args.weight_offset}, 0, 1);
    in = out;
  }
  const int64_t angle = token % args.angles * args.rotated;
  rotary({in, args.cos + angle, args.sin + angle, out, 1, 1, args.rotated, 0, 0, 0, 0, 0}, 0, 1);
  if (in != out) __builtin_memcpy(out + args.rotated, in + args.rotated, sizeof(float) * (args.width - args.rotated));
}

inline void place(const PlaceArgs& args, int64_t begin, int64_t end) {
  const int64_t lines = args.heads + 2 * args.kv_heads;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t token = item / lines, line = item % lines;
    const Slot& slot = args.slots[token];
    if (line < args.heads) {
      float* q = args.q + token * args.q_row + line * args.width;
      place_head(args, args.q_norm, token, q, q);
    } else if (line < args.heads + args.kv_heads) {
      const int64_t head = line - args.heads;
      place_head(args, args.k_norm, token, args.k + token * args.k_row + head * args.width, slot.key + head * slot.key_head);
    } else {
      const int64_t head = line - args.heads - args.kv_heads;
      __builtin_memcpy(slot.value + head * slot.value_head, args.v + token * args.v_row + head * args.value_width, sizeof(float) * args.value_width);
    }
  }
}

}  // namespace neap::NEAP_ISA
