// Depth blocks of quantised panels that are taken apart once for many rows: quants in bytes, scales as float32.
#pragma once
#include "rounded.h"

namespace neap::NEAP_ISA {

// A depth block of a panel. kSigned: a quant's bias is subtracted from its byte.
template <Format kFormat, bool kSigned>
struct TakenBlock {
  typedef RoundedQuants<kFormat> Reader;
  static constexpr int kGroup = Reader::kGroup, kGroups = kDepthBlock / kGroup;
  static constexpr int kOffsets = Reader::kHasOffset ? kGroups * kPanelVecs : 1;
  UintVec quants[kDepthBlock / 4 * kPanelVecs];  // of each 4 inputs, as `Quants::quads` gives them
  Vec scales[kGroups * kPanelVecs], offsets[kOffsets];

  NEAP_INLINE void take_apart(const uint8_t* block, int64_t depth) {
    Reader reader;
    reader.begin(block, depth, {});
    UintVec* to = quants;
    for (int64_t group = 0; group < depth / kGroup; ++group) {
      reader.open(group * kGroup);
      for (int v = 0; v < kPanelVecs; ++v) {
        scales[group * kPanelVecs + v] = reader.scale[v];
        if constexpr (Reader::kHasOffset) offsets[group * kPanelVecs + v] = reader.offset[v];
      }
      for_inputs<kGroup / 8>([&](auto line) __attribute__((always_inline)) {
        reader.load(group * kGroup + 8 * decltype(line)::value);
        for (int v = 0; v < kPanelVecs; ++v) *to++ = without_bias(reader.template quads<0>(v));
        for (int v = 0; v < kPanelVecs; ++v) *to++ = without_bias(reader.template quads<1>(v));
      });
    }
  }

  static NEAP_INLINE UintVec without_bias(UintVec quads) {
    typedef int8_t Bytes __attribute__((vector_size(sizeof(UintVec))));
    if constexpr (!kSigned || Reader::kBias == 0) return quads;
    return (UintVec)((Bytes)quads - (int8_t)Reader::kBias);
  }
};

// x times panels [first, first + panels) of a matrix, whose format is chosen: as multiply_panels.
using BlockProduct = void (*)(const Matrix&, int64_t in_features, const float* x, int64_t stride, int64_t rows,
                              int64_t first, int64_t panels, const uint8_t* next, float* c);

// Takes apart each depth block of panels [first, first + panels) and calls multiply(block, panel, first input, groups,
// what is read next, cache lines of it to prefetch per group). `next`: the panel that is read after them.
template <class Block, class Multiply>
NEAP_INLINE void for_blocks(const Matrix& matrix, int64_t in_features, int64_t first, int64_t panels,
                            const uint8_t* next, const Multiply& multiply) {
  Block taken;
  for (int64_t p = 0; p < panels; ++p) {
    const uint8_t* panel = matrix.panels + (first + p) * matrix.panel_bytes;
    const uint8_t* following = p + 1 < panels ? panel + matrix.panel_bytes : next;
    for (int64_t k = 0; k < in_features; k += kDepthBlock) {
      const int64_t depth = min64(kDepthBlock, in_features - k), groups = depth / Block::kGroup;
      const int64_t begin = block_begin(matrix.format, k / kDepthBlock);
      const int64_t end = begin + block_bytes(matrix.format, depth);
      taken.take_apart(panel + begin, depth);
      multiply(taken, p, k, groups, end < matrix.panel_bytes ? panel + end : following,
               ceil_div(end - begin, 64 * groups));
    }
  }
}

}  // namespace neap::NEAP_ISA
