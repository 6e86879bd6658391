// A packed matrix as a tensor, and the products' arguments made from it.
#pragma once
#include <cstring>

#include "binding.h"

namespace neap::binding {

struct PackedView {
  Matrix matrix;
  int64_t out_features, in_features;
};

// Reads the header of a packed matrix, and checks that the tensor holds all its panels.
template <class T>
PackedView packed_view(const char* op, const char* name, const T& packed) {
  NEAP_CHECK(packed.is_cpu() && packed.scalar_type() == ScalarType::Byte && packed.dim() == 1 &&
                 packed.is_contiguous() && packed.numel() >= kHeaderBytes,
             op, ": ", name, " is not a packed matrix; pack_linear and pack_blocks make them");
  const uint8_t* bytes = static_cast<const uint8_t*>(packed.const_data_ptr());
  PackedHeader header;
  std::memcpy(&header, bytes, kHeaderBytes);
  constexpr int64_t kLimit = int64_t(1) << 40;  // no product of two sizes below overflows
  const bool sane =
      std::memcmp(header.magic, kPackedMagic, sizeof(header.magic)) == 0 && header.format >= 0 &&
      header.format < kFormats &&
      (header.rounds_inputs == 0 || (header.rounds_inputs == 1 && can_round_inputs((Format)header.format))) &&
      header.out_features >= 0 && header.in_features >= 0 && header.out_features < kLimit &&
      header.in_features < kLimit / 8;
  NEAP_CHECK(sane, op, ": ", name, " is not a packed matrix; pack_linear and pack_blocks make them");
  const Format format = (Format)header.format;
  const int64_t panel = panel_bytes(format, header.in_features), panels = num_panels(header.out_features);
  const bool whole = !is_quantised(format) || header.in_features % kLayouts[format].source_inputs == 0;
  NEAP_CHECK(whole && (panel == 0 || panels <= (packed.numel() - kHeaderBytes) / panel) &&
                 packed.numel() == kHeaderBytes + panels * panel,
             op, ": ", name, " is damaged: ", packed.numel(), " bytes do not hold a ", kLayouts[format].name,
             " matrix [", header.out_features, ", ", header.in_features, "]");
  return {
      .matrix =
          {
              .panels = bytes + kHeaderBytes,
              .format = format,
              .panel_bytes = panel,
              .rounds_inputs = header.rounds_inputs == 1,
          },
      .out_features = header.out_features,
      .in_features = header.in_features,
  };
}

// The same for a matrix of known size.
template <class T>
Matrix packed_of_size(const char* op, const char* name, const T& packed, int64_t out_features, int64_t in_features) {
  const PackedView view = packed_view(op, name, packed);
  NEAP_CHECK(view.out_features == out_features && view.in_features == in_features, op, ": ", name, " is a matrix [",
             view.out_features, ", ", view.in_features, "], want [", out_features, ", ", in_features, "]");
  return view.matrix;
}

// A product of `rows` rows with a packed matrix, or with a gate and `up`. A null bias means none. The caller sets x and
// out.
template <class T>
LinearArgs linear_args(const char* op, const char* name, const T& packed, const T* up, const float* bias, int64_t rows,
                       int64_t in_features, int64_t out_features, Activation activation = kIdentity) {
  return {
      .weight = packed_of_size(op, name, packed, out_features, in_features),
      .up = up ? packed_of_size(op, "up", *up, out_features, in_features) : Matrix{},
      .bias = bias,
      .rows = rows,
      .in_features = in_features,
      .out_features = out_features,
      .x_stride = in_features,
      .gated = up != nullptr,
      .activation = activation,
  };
}

// weights.cpp
// Dequantises a row of the matrix to out [in_features].
void dequantise_row(const PackedView& view, int64_t row, float* out);
Tensor pack_linear(Tensor weight);
Tensor pack_blocks(Tensor blocks, std::string kind, int64_t in_features);
void round_inputs_(Tensor packed);
Tensor unpack_linear(Tensor packed);
Tensor packed_rows(Tensor packed, Tensor indices);

}  // namespace neap::binding
