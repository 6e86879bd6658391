#include "pack.h"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace neap {

namespace {

uint64_t eight_at(const uint8_t* p) {
  uint64_t bytes;
  std::memcpy(&bytes, p, 8);
  return bytes;
}

constexpr uint64_t kEach = 0x0101010101010101;  // a one in each of 8 bytes

// Inputs [8 * i, 8 * i + 8) of a GGUF block: a quant in each byte. Without the format's bias, and of Q8_0 in two's
// complement.
template <Format format>
uint64_t eight_quants(const uint8_t* p, int i) {
  if constexpr (format == kQ8_0) {
    return eight_at(p + 2 + 8 * i);
  } else if constexpr (format == kQ6_K) {
    const int half = i / 16, quarter = i / 4 % 4, at = 8 * (i % 4);
    const uint64_t low = eight_at(p + 64 * half + 32 * (quarter % 2) + at) >> (quarter / 2 * 4);
    const uint64_t high = eight_at(p + 128 + 32 * half + at) >> (2 * quarter);
    return (low & kEach * 15) | (high & kEach * 3) << 4;
  } else if constexpr (format == kQ4_K || format == kQ5_K) {
    const int part = i / 4, at = 8 * (i % 4);  // of 32 inputs
    const uint8_t* low = p + (format == kQ5_K ? 48 : 16) + part / 2 * 32;
    const uint64_t quants = eight_at(low + at) >> (part % 2 * 4) & kEach * 15;
    return format == kQ5_K ? quants | (eight_at(p + 16 + at) >> part & kEach) << 4 : quants;
  } else {
    constexpr int source = (int)kLayouts[format].source_bytes;
    const uint64_t quants = eight_at(p + source - 16 + i % 2 * 8) >> (i / 2 * 4) & kEach * 15;
    if constexpr (kLayouts[format].bits == 4) return quants;
    // Bit j of a byte comes to byte j, and from anywhere in it to its bit 4.
    const uint64_t bits = p[source - 20 + i] * kEach & 0x8040201008040201;
    return quants | ((bits + kEach * 127) >> 7 & kEach) << 4;
  }
}

// The 6-bit scale and minimum of group `j` of Q4_K and Q5_K.
void put_scales(const uint8_t* s, int64_t j, uint8_t* scale, uint8_t* minimum) {
  *scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6 << 4);
  *minimum = j < 4 ? s[j + 4] & 63 : (s[j + 4] >> 4) | (s[j] >> 6 << 4);
}

// Every second of 8 bytes, from the first on.
uint32_t even_bytes(uint64_t bytes) {
  bytes &= 0x00ff00ff00ff00ff;
  bytes = (bytes | bytes >> 8) & 0x0000ffff0000ffff;
  return (uint32_t)(bytes | bytes >> 16);
}

// The lowest 4 bits of 8 bytes.
uint32_t low_halves(uint64_t bytes) {
  bytes &= kEach * 15;
  return even_bytes(bytes | bytes >> 4);
}

// Writes the quants of group number `group` of a GGUF block to `out`, the first byte of an output's lane.
template <Format format>
void put_quants(const uint8_t* source, int group, uint8_t* out) {
  constexpr Layout layout = kLayouts[format];
  constexpr int high_bits = layout.bits - 4, lines = (int)layout.group / 8;
  const auto put = [&](int line, uint32_t word) { std::memcpy(out + line * kPanel * 4, &word, sizeof(word)); };
  uint32_t above = 0;
#pragma GCC unroll 4
  for (int line = 0; line < lines; ++line) {
    const uint64_t eight = eight_quants<format>(source, group * lines + line);
    if constexpr (layout.bits == 8) {
      put(2 * line, even_bytes(eight));
      put(2 * line + 1, even_bytes(eight >> 8));
    } else {
      put(line + (high_bits ? 1 : 0), low_halves(eight));
      const uint64_t high = eight >> 4 & kEach * ((1u << high_bits) - 1);
      above |= even_bytes(high | high >> (8 - high_bits)) << (2 * high_bits * line);
    }
  }
  if constexpr (high_bits && layout.bits < 8) put(0, above);
}

template <Format format>
void pack_panel_of(const uint8_t* rows, int64_t lanes, int64_t in_features, uint8_t* out) {
  constexpr Layout layout = kLayouts[format];
  constexpr bool is_super = layout.head_bytes > 0, has_minimums = format == kQ4_K || format == kQ5_K;
  const int64_t row_bytes = in_features / layout.source_inputs * layout.source_bytes;
  const auto put_half = [](uint8_t* at, const uint8_t* half) { std::memcpy(at, half, 2); };
  // Row by row: blocks of 16 rows in turn, which would write a place at once, take twice as long where they are large.
  for (int64_t lane = 0; lane < lanes; ++lane)
    for (int64_t k = 0; k < in_features; k += layout.source_inputs) {
      const uint8_t* source = rows + lane * row_bytes + k / layout.source_inputs * layout.source_bytes;
      const int64_t depth = std::min(kDepthBlock, in_features - k / kDepthBlock * kDepthBlock);
      uint8_t* head = out + block_begin(format, k / kDepthBlock);
      uint8_t *scales = head + layout.head_bytes, *quants = scales + depth / layout.group * layout.scale_bytes;
      if constexpr (is_super) put_half(head + lane * 2, source + (has_minimums ? 0 : 208));
      if constexpr (has_minimums) put_half(head + kPanel * 2 + lane * 2, source + 2);
#pragma GCC unroll 16  // so that shifts and places are constants
      for (int64_t i = 0; i < layout.source_inputs / layout.group; ++i) {
        const int64_t group = k % kDepthBlock / layout.group + i;
        uint8_t* scale = scales + group * layout.scale_bytes;
        if constexpr (has_minimums) {
          put_scales(source + 4, i, scale + lane, scale + kPanel + lane);
        } else if constexpr (is_super) {
          scale[lane] = source[192 + i];
        } else if constexpr (layout.scale_bytes == kPanel) {
          scale[lane] = source[0];
        } else {
          put_half(scale + lane * 2, source);
          if constexpr (layout.scale_bytes == kPanel * 4) put_half(scale + kPanel * 2 + lane * 2, source + 2);
        }
        put_quants<format>(source, (int)i, quants + group * quant_bytes(layout) + lane * 4);
      }
    }
}

// Writes unit u of row `lane` to unit u * line + lane * step of `out`. `row` and `column`: bytes from a unit of `rows`
// to the next in this direction.
template <class Unit>
void place_units(const uint8_t* rows, int64_t row, int64_t column, int64_t lanes, int64_t count, int64_t line,
                 uint8_t* out, int64_t step = 1) {
  constexpr int64_t kSquare = 16;  // which stays in the nearest cache
  for (int64_t begin = 0; begin < count; begin += kSquare)
    for (int64_t lane = 0; lane < lanes; ++lane)
      for (int64_t u = begin; u < std::min(begin + kSquare, count); ++u)
        std::memcpy(out + (u * line + lane * step) * sizeof(Unit), rows + lane * row + u * column, sizeof(Unit));
}

}  // namespace

void pack_panel(Format format, const void* weight, int64_t out_features, int64_t in_features, int64_t row_stride,
                int64_t column_stride, int64_t panel, uint8_t* out) {
  const int64_t size = format == kPlain32 ? 4 : 2, first = panel * kPanel,
                lanes = std::min(kPanel, out_features - first);
  const uint8_t* rows = static_cast<const uint8_t*>(weight) + first * row_stride * size;
  const int64_t row = row_stride * size, column = column_stride * size;
  const bool has_pairs = format == kPlainBf16;
  if (lanes < kPanel || (has_pairs && in_features % 2)) std::memset(out, 0, panel_bytes(format, in_features));
  if (has_pairs && column_stride == 1 && in_features % 2 == 0) {
    place_units<uint32_t>(rows, row, 4, lanes, in_features / 2, kPanel, out);
  } else if (has_pairs) {
    // Depth blocks have an even number of inputs but for the last, so pairs never cross from one to the next.
    for (int64_t odd = 0; odd < 2; ++odd)
      place_units<uint16_t>(rows + odd * column, row, 2 * column, lanes, (in_features + 1 - odd) / 2, kPanel * 2,
                            out + odd * 2, 2);
  } else if (size == 4) {
    place_units<uint32_t>(rows, row, column, lanes, in_features, kPanel, out);
  } else {
    place_units<uint16_t>(rows, row, column, lanes, in_features, kPanel, out);
  }
}

void pack_blocks(Format format, const uint8_t* rows, int64_t out_features, int64_t in_features, int64_t panel,
                 uint8_t* out) {
  const int64_t row_bytes = in_features / kLayouts[format].source_inputs * kLayouts[format].source_bytes;
  const int64_t lanes = std::min(kPanel, out_features - panel * kPanel);
  if (lanes < kPanel) std::memset(out, 0, panel_bytes(format, in_features));
  constexpr decltype(&pack_panel_of<kQ4_0>) kOf[] = {pack_panel_of<kQ4_0>, pack_panel_of<kQ4_1>, pack_panel_of<kQ5_0>,
                                                     pack_panel_of<kQ5_1>, pack_panel_of<kQ8_0>, pack_panel_of<kQ4_K>,
                                                     pack_panel_of<kQ5_K>, pack_panel_of<kQ6_K>, pack_panel_of<kMxfp4>};
  static_assert(std::size(kOf) == kFormats - kQ4_0);
  kOf[format - kQ4_0](rows + panel * kPanel * row_bytes, lanes, in_features, out);
}

}  // namespace neap
