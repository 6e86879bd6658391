// Many tensors as one argument of an op. To hand over a list of tensors costs about a microsecond each, because after a
// pass over all weights none of their descriptions is in the processor's caches.
#pragma once
#include "binding.h"

namespace neap::binding {

inline constexpr int64_t kTableDims = 4;

// What an op needs to know of a tensor of at most kTableDims dimensions. Its methods are those of Tensor.
struct TensorInfo {
  void* data;
  int64_t elements, dims, sizes[kTableDims], strides[kTableDims];
  ScalarType type;
  bool on_cpu, contiguous;

  bool is_cpu() const { return on_cpu; }
  bool is_contiguous() const { return contiguous; }
  ScalarType scalar_type() const { return type; }
  int64_t dim() const { return dims; }
  int64_t numel() const { return elements; }
  int64_t size(int64_t i) const { return sizes[i]; }
  int64_t stride(int64_t i) const { return strides[i]; }
  const void* const_data_ptr() const { return data; }
  void* mutable_data_ptr() const { return data; }
};

struct TensorTable {
  const TensorInfo* first;
  size_t count;
  const TensorInfo& operator[](size_t i) const { return first[i]; }
};

// Reads what `tensor_table` has made.
TensorTable table_of(const char* op, const char* name, const Tensor& table);

// tensor_table.cpp
Tensor tensor_table(std::vector<Tensor> tensors);

}  // namespace neap::binding
