#include "pack.h"

#include <algorithm>
#include <cstring>

namespace neap {

namespace {

uint16_t half_at(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  return bits;
}

// The quants and scales of one GGUF block, in the order of the inputs.
struct Block {
  uint8_t quants[256];              // unsigned: the format's bias is not subtracted. Q8_0: signed, two's complement
  uint16_t d, minimum;              // float16 bits; `minimum` is m of Q4_1 and Q5_1, dmin of Q4_K and Q5_K
  uint8_t scales[16], minimums[8];  // of the groups of a super-block; Q6_K: signed scales
};

// Unpacks the 6-bit scales and minimums of Q4_K and Q5_K.
void read_scales(const uint8_t* s, Block* block) {
  for (int j = 0; j < 4; ++j) {
    block->scales[j] = s[j] & 63;
    block->minimums[j] = s[j + 4] & 63;
    block->scales[j + 4] = (s[j + 8] & 15) | (s[j] >> 6 << 4);
    block->minimums[j + 4] = (s[j + 8] >> 4) | (s[j + 4] >> 6 << 4);
  }
}

void read_small(Format format, const uint8_t* p, Block* block) {
  const bool has_minimum = format == kQ4_1 || format == kQ5_1;
  block->d = half_at(p);
  p += 2;
  block->minimum = 0;
  if (has_minimum) {
    block->minimum = half_at(p);
    p += 2;
  }
  if (format == kQ8_0) {
    std::memcpy(block->quants, p, 32);
    return;
  }
  uint32_t high = 0;
  if (kLayouts[format].bits == 5) {
    std::memcpy(&high, p, 4);
    p += 4;
  }
  for (int j = 0; j < 16; ++j) {
    block->quants[j] = (p[j] & 15) | (high >> j & 1) << 4;
    block->quants[j + 16] = (p[j] >> 4) | (high >> (j + 16) & 1) << 4;
  }
}

void read_super(Format format, const uint8_t* p, Block* block) {
  if (format == kQ6_K) {
    const uint8_t *low = p, *high = p + 128;
    std::memcpy(block->scales, p + 192, 16);
    block->d = half_at(p + 208);
    for (int half = 0; half < 2; ++half)
      for (int l = 0; l < 32; ++l) {
        const uint8_t *ql = low + 64 * half + l, bits = high[32 * half + l];
        uint8_t* out = block->quants + 128 * half + l;
        out[0] = (ql[0] & 15) | (bits & 3) << 4;
        out[32] = (ql[32] & 15) | (bits >> 2 & 3) << 4;
        out[64] = (ql[0] >> 4) | (bits >> 4 & 3) << 4;
        out[96] = (ql[32] >> 4) | (bits >> 6) << 4;
      }
    return;
  }
  block->d = half_at(p);
  block->minimum = half_at(p + 2);
  read_scales(p + 4, block);
  const uint8_t *high = p + 16, *low = format == kQ5_K ? p + 48 : p + 16;
  for (int chunk = 0; chunk < 4; ++chunk)
    for (int l = 0; l < 32; ++l) {
      const uint8_t quant = low[32 * chunk + l];
      const int bits = format == kQ5_K ? high[l] >> (2 * chunk) : 0;
      block->quants[64 * chunk + l] = (quant & 15) | (bits & 1) << 4;
      block->quants[64 * chunk + 32 + l] = (quant >> 4) | (bits >> 1 & 1) << 4;
    }
}

// Every second of 8 bytes, from the first on.
uint32_t even_bytes(uint64_t bytes) {
  bytes &= 0x00ff00ff00ff00ff;
  bytes = (bytes | bytes >> 8) & 0x0000ffff0000ffff;
  return (uint32_t)(bytes | bytes >> 16);
}

// The lowest 4 bits of 8 bytes.
uint32_t low_halves(uint64_t bytes) {
  bytes &= 0x0f0f0f0f0f0f0f0f;
  return even_bytes(bytes | bytes >> 4);
}

// Writes the quants of a group for output `lane`. `quants` is the group's first byte in the panel.
void place_quants(const Layout& layout, const uint8_t* from, int lane, uint8_t* quants) {
  const auto put = [&](int64_t line, uint32_t word) {
    std::memcpy(quants + line * kPanel * 4 + lane * 4, &word, sizeof(word));
  };
  const int high_bits = layout.bits - 4;
  uint32_t above = 0;
  for (int64_t line = 0; line < layout.group / 8; ++line) {
    uint64_t eight;
    std::memcpy(&eight, from + 8 * line, sizeof(eight));
    if (layout.bits == 8) {
      put(2 * line, even_bytes(eight));
      put(2 * line + 1, even_bytes(eight >> 8));
      continue;
    }
    put(line + (high_bits ? 1 : 0), low_halves(eight));
    const uint64_t high = eight >> 4 & 0x0101010101010101 * ((1u << high_bits) - 1);
    above |= even_bytes(high | high >> (8 - high_bits)) << (2 * high_bits * line);
  }
  if (high_bits && layout.bits < 8) put(0, above);
}

}  // namespace

void pack_panel(Format format, const void* weight, int64_t out_features, int64_t in_features, int64_t row_stride,
                int64_t column_stride, int64_t panel, uint8_t* out) {
  const int64_t size = format == kPlain32 ? 4 : 2, first = panel * kPanel, pair = format == kPlainBf16 ? 2 : 1;
  const int64_t lanes = std::min(kPanel, out_features - first);
  std::memset(out, 0, panel_bytes(format, in_features));
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const uint8_t* row = static_cast<const uint8_t*>(weight) + (first + lane) * row_stride * size;
    // Depth blocks have an even number of inputs but for the last, so pairs never cross from one to the next.
    for (int64_t k = 0; k < in_features; ++k)
      std::memcpy(out + ((k / pair * kPanel + lane) * pair + k % pair) * size, row + k * column_stride * size, size);
  }
}

void pack_blocks(Format format, const uint8_t* rows, int64_t out_features, int64_t in_features, int64_t panel,
                 uint8_t* out) {
  const Layout& layout = kLayouts[format];
  const int64_t row_bytes = in_features / layout.source_inputs * layout.source_bytes, first = panel * kPanel;
  const int64_t lanes = std::min(kPanel, out_features - first);
  const bool is_super = layout.head_bytes > 0, has_minimums = format == kQ4_K || format == kQ5_K;
  std::memset(out, 0, panel_bytes(format, in_features));
  const auto put_half = [](uint8_t* at, uint16_t bits) { std::memcpy(at, &bits, 2); };
  for (int64_t lane = 0; lane < lanes; ++lane)
    for (int64_t k = 0; k < in_features; k += layout.source_inputs) {
      Block block;
      const uint8_t* source = rows + (first + lane) * row_bytes + k / layout.source_inputs * layout.source_bytes;
      (is_super ? read_super : read_small)(format, source, &block);
      const int64_t depth = std::min(kDepthBlock, in_features - k / kDepthBlock * kDepthBlock);
      uint8_t* head = out + block_begin(format, k / kDepthBlock);
      uint8_t *scales = head + layout.head_bytes, *quants = scales + depth / layout.group * layout.scale_bytes;
      if (is_super) put_half(head + lane * 2, block.d);
      if (has_minimums) put_half(head + kPanel * 2 + lane * 2, block.minimum);
      for (int64_t i = 0; i < layout.source_inputs; i += layout.group) {
        const int64_t group = (k % kDepthBlock + i) / layout.group;
        uint8_t* scale = scales + group * layout.scale_bytes;
        if (is_super) {
          scale[lane] = block.scales[group];
          if (has_minimums) scale[kPanel + lane] = block.minimums[group];
        } else {
          put_half(scale + lane * 2, block.d);
          if (layout.scale_bytes == kPanel * 4) put_half(scale + kPanel * 2 + lane * 2, block.minimum);
        }
        place_quants(layout, block.quants + i, (int)lane, quants + group * quant_bytes(layout));
      }
    }
}

}  // namespace neap
