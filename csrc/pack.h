// Packing of weights into panels, and back. Runs once per matrix when a model is loaded, so it is plain C++. No torch.
#pragma once
#include "include/formats.h"

namespace neap {

// Writes panel number `panel` of a float matrix. Element (row, column) lies at weight[row * row_stride + column *
// column_stride]. `weight` has the format's element size.
void pack_panel(Format format, const void* weight, int64_t out_features, int64_t in_features, int64_t row_stride,
                int64_t column_stride, int64_t panel, uint8_t* out);

// The same for rows of GGUF blocks, [out_features, in_features / source_inputs * source_bytes]. in_features is a
// multiple of source_inputs.
void pack_blocks(Format format, const uint8_t* rows, int64_t out_features, int64_t in_features, int64_t panel,
                 uint8_t* out);

}  // namespace neap
