// The ops that pack weights, unpack them, and look up their rows: argument checks, allocation and calls of pack.h and
// the CPU kernels.
#include <sys/mman.h>

#include <cstddef>
#include <cstring>

#include "pack.h"
#include "packed.h"
#include "team.h"

namespace neap::binding {

namespace {

// Memory for a packed matrix, zeroed, in pages of its own: once a file has the same bytes, pages of this file can take
// their place. Asks for pages of 2 MiB, which save page walks: weights are read from end to end at every pass. The
// system may refuse.
Tensor own_pages(int64_t bytes) {
  void* data = mmap(nullptr, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  NEAP_CHECK(data != MAP_FAILED, "DefaultCPUAllocator: can't allocate memory: a packed matrix takes ", bytes, " bytes");
#if defined(__linux__)
  constexpr uintptr_t kHuge = 2 << 20;
  const uintptr_t begin = ((uintptr_t)data + kHuge - 1) & ~(kHuge - 1);
  const uintptr_t end = ((uintptr_t)data + (uintptr_t)bytes) & ~(kHuge - 1);
  if (begin < end) madvise((void*)begin, end - begin, MADV_HUGEPAGE);
#endif
  return torch::stable::from_blob(data, {bytes}, {1}, torch::stable::Device(torch::headeronly::DeviceType::CPU),
                                  ScalarType::Byte, [bytes](void* owned) { munmap(owned, (size_t)bytes); });
}

// Allocates a packed matrix and writes its header. pack(panel, out) writes each panel.
template <class Pack>
Tensor packed_matrix(Format format, int64_t out_features, int64_t in_features, const Pack& pack) {
  const int64_t panels = num_panels(out_features), bytes = panel_bytes(format, in_features);
  Tensor packed = own_pages(kHeaderBytes + panels * bytes);
  PackedHeader header{.format = format, .out_features = out_features, .in_features = in_features};
  std::memcpy(header.magic, kPackedMagic, sizeof(header.magic));
  uint8_t* out = static_cast<uint8_t*>(packed.mutable_data_ptr());
  std::memcpy(out, &header, kHeaderBytes);
  parallel(panels, (double)out_features * (double)in_features, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) pack(panel, out + kHeaderBytes + panel * bytes);
  });
  return packed;
}

// Dequantises `depth` inputs, a depth block, of panel number `panel` from input k on: block [depth, 16].
void dequantise_block(const PackedView& view, int64_t panel, int64_t k, int64_t depth, float* block) {
  const Matrix& matrix = view.matrix;
  kernels().dequantise(matrix.format,
                       matrix.panels + panel * matrix.panel_bytes + block_begin(matrix.format, k / kDepthBlock), depth,
                       block);
}

// Dequantises the first `count` rows of panel number `panel` to rows [count, in_features].
void dequantise_panel(const PackedView& view, int64_t panel, int64_t count, float* rows) {
  float block[kDepthBlock * kPanel];
  for (int64_t k = 0; k < view.in_features; k += kDepthBlock) {
    const int64_t depth = std::min(kDepthBlock, view.in_features - k);
    dequantise_block(view, panel, k, depth, block);
    // By squares, which stay in the nearest cache.
    for (int64_t from = 0; from < depth; from += kPanel)
      for (int64_t lane = 0; lane < count; ++lane)
        for (int64_t i = from; i < std::min(from + kPanel, depth); ++i)
          rows[lane * view.in_features + k + i] = block[i * kPanel + lane];
  }
}

}  // namespace

void dequantise_row(const PackedView& view, int64_t row, float* out) {
  float block[kDepthBlock * kPanel];
  for (int64_t k = 0; k < view.in_features; k += kDepthBlock) {
    const int64_t depth = std::min(kDepthBlock, view.in_features - k);
    dequantise_block(view, row / kPanel, k, depth, block);
    for (int64_t i = 0; i < depth; ++i) out[k + i] = block[i * kPanel + row % kPanel];
  }
}

Tensor pack_linear(Tensor weight) {
  NEAP_CHECK(weight.is_cpu() && weight.dim() == 2, "pack_linear: weight has shape ", text(weight),
             ", want 2 dimensions on the CPU");
  const ScalarType type = weight.scalar_type();
  NEAP_CHECK(type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16,
             "pack_linear: weight must be float32, float16 or bfloat16");
  const Format format = type == ScalarType::Float ? kPlain32 : type == ScalarType::Half ? kPlain16 : kPlainBf16;
  const int64_t n = weight.size(0), k = weight.size(1);
  return packed_matrix(format, n, k, [&](int64_t panel, uint8_t* out) {
    pack_panel(format, weight.const_data_ptr(), n, k, weight.stride(0), weight.stride(1), panel, out);
  });
}

Tensor pack_blocks(Tensor blocks, std::string kind, int64_t in_features) {
  int index = kQ4_0;
  while (index < kFormats && kind != kLayouts[index].name) ++index;
  NEAP_CHECK(index < kFormats, "pack_blocks: there is no format '", kind,
             "'; names are Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, MXFP4");
  const Format format = (Format)index;
  const Layout& layout = kLayouts[format];
  NEAP_CHECK(blocks.is_cpu() && blocks.scalar_type() == ScalarType::Byte && blocks.dim() == 2 && blocks.is_contiguous(),
             "pack_blocks: blocks must be contiguous uint8 [rows, bytes] on the CPU");
  NEAP_CHECK(in_features >= 0 && in_features % layout.source_inputs == 0, "pack_blocks: ", in_features,
             " inputs do not divide into blocks of ", layout.source_inputs);
  NEAP_CHECK(blocks.size(1) == in_features / layout.source_inputs * layout.source_bytes, "pack_blocks: rows of ",
             blocks.size(1), " bytes, but ", in_features, " inputs in ", kind, " take ",
             in_features / layout.source_inputs * layout.source_bytes);
  const uint8_t* rows = static_cast<const uint8_t*>(blocks.const_data_ptr());
  return packed_matrix(format, blocks.size(0), in_features, [&](int64_t panel, uint8_t* out) {
    neap::pack_blocks(format, rows, blocks.size(0), in_features, panel, out);
  });
}

void round_inputs_(Tensor packed) {
  const PackedView view = packed_view("round_inputs_", "packed", packed);
  NEAP_CHECK(can_round_inputs(view.matrix.format), "round_inputs_: packed is a ", kLayouts[view.matrix.format].name,
             " matrix, want BF16 or GGUF's blocks");
  const int32_t rounds = 1;
  std::memcpy(static_cast<uint8_t*>(packed.mutable_data_ptr()) + offsetof(PackedHeader, rounds_inputs), &rounds,
              sizeof(rounds));
}

Tensor unpack_linear(Tensor packed) {
  const PackedView view = packed_view("unpack_linear", "packed", packed);
  Tensor out = empty({view.out_features, view.in_features});
  parallel(num_panels(view.out_features), (double)out.numel(), [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel)
      dequantise_panel(view, panel, std::min(kPanel, view.out_features - panel * kPanel),
                       mutable_floats(out) + panel * kPanel * view.in_features);
  });
  return out;
}

Tensor packed_rows(Tensor packed, Tensor indices) {
  const PackedView view = packed_view("packed_rows", "packed", packed);
  NEAP_CHECK(indices.is_cpu() && indices.scalar_type() == ScalarType::Long,
             "packed_rows: indices must be int64 on the CPU");
  if (!indices.is_contiguous()) indices = torch::stable::contiguous(indices);
  const int64_t* wanted = static_cast<const int64_t*>(indices.const_data_ptr());
  const int64_t width = view.in_features;
  for (int64_t i = 0; i < indices.numel(); ++i)
    NEAP_CHECK(wanted[i] >= 0 && wanted[i] < view.out_features, "packed_rows: index ", wanted[i], " is outside [0, ",
               view.out_features, ")");
  Sizes shape = sizes_of(indices);
  shape.push_back(width);
  Tensor out = empty(shape);
  float* to = mutable_floats(out);
  // Rows of a whole panel are dequantised together.
  const auto is_panel = [&](int64_t i) {
    for (int64_t lane = 0; lane < kPanel; ++lane)
      if (wanted[i + lane] != wanted[i] + lane) return false;
    return wanted[i] % kPanel == 0;
  };
  parallel(indices.numel(), (double)indices.numel() * (double)(kPanel * width), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin, count; i < end; i += count) {
      count = i + kPanel <= end && is_panel(i) ? kPanel : 1;
      if (count == kPanel) dequantise_panel(view, wanted[i] / kPanel, kPanel, to + i * width);
      else dequantise_row(view, wanted[i], to + i * width);
    }
  });
  return out;
}

}  // namespace neap::binding
