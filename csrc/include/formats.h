// The formats in which weights are kept in memory, and how a packed matrix is laid out in bytes. No torch.
//
// A matrix [out_features, in_features] is cut into panels of 16 outputs. A panel is a sequence of depth blocks of 256
// inputs, the last one shorter. Kernels dequantise the weights to float32 in registers, so a pass reads only the stored
// bytes. All formats give the very float32 numbers that dequantising the matrix beforehand would give. A matrix may ask
// that its inputs be rounded as its weights are. Those of a bfloat16 matrix are then rounded to bfloat16, and pairs of
// inputs are multiplied at once and summed in float32. Those of a matrix of GGUF's blocks are rounded to 8 bits, and
// their products with quants are summed as integers (see rounded.h).
//
//   float32, float16   [inputs, 16]
//   bfloat16           [inputs / 2, 16 outputs, 2 inputs]: two inputs fill the 32-bit lane of an output
//   GGUF's blocks      d (and dmin) [16] once per depth block if the format has super-blocks; scales of all groups;
//                      quants of all groups
//
// A group is a run of inputs that share a scale. Its quants of 4 bits are lines of 8 inputs, one 32-bit lane per
// output, input j in bits [4j, 4j + 4). So the low halves of the lane's bytes are inputs 0, 2, 4 and 6, and the high
// halves inputs 1, 3, 5 and 7. Quants of 8 bits have two lines for 8 inputs, one for the even and one for the odd
// inputs. Higher bits stand in a line of their own before the others: h bits of each input of the group per lane, input
// 8i + 2j + p at bit 8j + h * (2i + p), so that a shift and a mask move those of 4 inputs above the low halves of
// bytes.
#pragma once
#include <cstdint>

#include "elements.h"

namespace neap {

constexpr int64_t kPanel = 16;        // output columns of one weight panel
constexpr int64_t kDepthBlock = 256;  // products summed in one chain before they are added to the total

// The first three are those of Dtype. The numbers stand in packed matrices, which may be stored: never change them.
enum Format : int32_t {
  kPlain32 = 0,
  kPlain16 = 1,
  kPlainBf16 = 2,
  kQ4_0 = 3,
  kQ4_1 = 4,
  kQ5_0 = 5,
  kQ5_1 = 6,
  kQ8_0 = 7,
  kQ4_K = 8,
  kQ5_K = 9,
  kQ6_K = 10,
  kMxfp4 = 11,
  kFormats = 12
};

// How a quantised format is laid out. A weight is scale * quant + offset; MXFP4's quants stand for numbers in a table.
struct Layout {
  const char* name;                     // GGUF's
  int bits;                             // of a quant
  int64_t group;                        // inputs that share a scale
  int64_t head_bytes;                   // per panel and depth block: d, and dmin, of super-blocks
  int64_t scale_bytes;                  // per panel and group
  int64_t source_inputs, source_bytes;  // inputs and bytes of a block in a GGUF file
};

constexpr Layout kLayouts[kFormats] = {
    {"F32", 32, 1, 0, 0, 1, 4},        {"F16", 16, 1, 0, 0, 1, 2},        {"BF16", 16, 1, 0, 0, 1, 2},
    {"Q4_0", 4, 32, 0, 32, 32, 18},    {"Q4_1", 4, 32, 0, 64, 32, 20},    {"Q5_0", 5, 32, 0, 32, 32, 22},
    {"Q5_1", 5, 32, 0, 64, 32, 24},    {"Q8_0", 8, 32, 0, 32, 32, 34},    {"Q4_K", 4, 32, 64, 32, 256, 144},
    {"Q5_K", 5, 32, 64, 32, 256, 176}, {"Q6_K", 6, 16, 32, 16, 256, 210}, {"MXFP4", 4, 32, 0, 16, 32, 17},
};

constexpr bool is_quantised(Format format) { return format >= kQ4_0; }
constexpr bool can_round_inputs(Format format) { return format >= kPlainBf16; }

constexpr int64_t quant_bytes(const Layout& layout) { return layout.group * layout.bits * kPanel / 8; }

// Bytes of a panel's depth block of `depth` inputs.
constexpr int64_t block_bytes(Format format, int64_t depth) {
  if (format == kPlain32) return depth * kPanel * 4;
  if (format == kPlain16) return depth * kPanel * 2;
  if (format == kPlainBf16) return (depth + 1) / 2 * kPanel * 4;
  const Layout& layout = kLayouts[format];
  return layout.head_bytes + depth / layout.group * (layout.scale_bytes + quant_bytes(layout));
}

// Where depth block number `block` begins in a panel.
constexpr int64_t block_begin(Format format, int64_t block) { return block * block_bytes(format, kDepthBlock); }

constexpr int64_t panel_bytes(Format format, int64_t in_features) {
  return block_begin(format, in_features / kDepthBlock) +
         (in_features % kDepthBlock ? block_bytes(format, in_features % kDepthBlock) : 0);
}

// The first bytes of a packed matrix. The panels follow.
struct PackedHeader {
  char magic[8];
  int32_t format;
  int32_t rounds_inputs;  // 1: products round their inputs; not for float32 and float16
  int64_t out_features, in_features;
  char padding[32];
};
constexpr char kPackedMagic[8] = {'n', 'e', 'a', 'p', 'W', '1', 0, 0};
constexpr int64_t kHeaderBytes = 64;
static_assert(sizeof(PackedHeader) == kHeaderBytes, "panels begin on a cache line");

constexpr int64_t num_panels(int64_t out_features) { return ceil_div(out_features, kPanel); }

// A packed matrix as kernels see it.
struct Matrix {
  const uint8_t* panels;
  Format format;
  int64_t panel_bytes;
  bool rounds_inputs;
};

}  // namespace neap
