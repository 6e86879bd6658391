// Shared by the bindings: argument checks, allocation, and parallel loops on torch's threads. Uses the LibTorch Stable
// ABI only, so one library works with torch 2.11 and later.
#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "include/kernels.h"

namespace neap::binding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Sizes = std::vector<int64_t>;

#define NEAP_CHECK(condition, ...) STD_TORCH_CHECK(condition, "neap: ", __VA_ARGS__)

// Least work per thread: below this, waking a thread costs more than it saves.
inline constexpr int64_t kGrainFlops = 100'000;

template <class T>
std::string text(const T& t) {
  std::string out = "[";
  for (int64_t i = 0; i < t.dim(); ++i) out += (i ? ", " : "") + std::to_string(t.size(i));
  return out + "]";
}

template <class T>
void check_float(const char* op, const char* name, const T& t, int64_t dims) {
  NEAP_CHECK(t.is_cpu(), op, ": ", name, " must be on the CPU");
  NEAP_CHECK(t.scalar_type() == ScalarType::Float, op, ": ", name, " must be float32, the only dtype on the CPU");
  NEAP_CHECK(dims < 0 ? t.dim() >= 1 : t.dim() == dims, op, ": ", name, " has shape ", text(t), ", want ",
             dims < 0 ? std::string("at least 1 dimension") : std::to_string(dims) + " dimensions");
}

// The dtype of stored numbers, which kernels read as float32.
template <class T>
Dtype dtype_of(const char* op, const char* name, const T& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return kFloat32;
    case ScalarType::Half: return kFloat16;
    case ScalarType::BFloat16: return kBfloat16;
    default: NEAP_CHECK(false, op, ": ", name, " must be float32, float16 or bfloat16");
  }
  return kFloat32;
}

// Keys and values [B, H, S, D] on the CPU, of one dtype, which is returned.
template <class T>
Dtype check_kv(const char* op, const T& keys, const T& values) {
  for (const T* t : {&keys, &values})
    NEAP_CHECK(t->is_cpu() && t->dim() == 4, op, ": keys ", text(keys), " and values ", text(values),
               " must be on the CPU and have 4 dimensions");
  const Dtype dtype = dtype_of(op, "keys", keys);
  NEAP_CHECK(dtype_of(op, "values", values) == dtype, op, ": values are of another dtype than keys");
  return dtype;
}

template <class T>
void check_vector(const char* op, const char* name, const T& t, int64_t size) {
  check_float(op, name, t, 1);
  NEAP_CHECK(t.size(0) == size && t.is_contiguous(), op, ": ", name, " must be contiguous with shape [", size,
             "], got ", text(t));
}

inline Tensor empty(const Sizes& sizes, int32_t dtype = aoti_torch_dtype_float32()) {
  Sizes strides(sizes.size(), 1);
  for (int64_t i = (int64_t)sizes.size() - 2; i >= 0; --i)
    strides[i] = strides[i + 1] * std::max<int64_t>(sizes[i + 1], 1);
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(), dtype,
                                                  aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

inline neap::Activation activation_of(const char* op, const std::string& name) {
  static constexpr const char* kNames[] = {"silu", "gelu_tanh", "gelu", "relu", "clamped_swish"};  // from kSilu on
  const auto* found = std::find(std::begin(kNames), std::end(kNames), name);
  NEAP_CHECK(found != std::end(kNames), op, ": activation is '", name,
             "', want 'silu', 'gelu_tanh', 'gelu', 'relu' or 'clamped_swish'");
  return (neap::Activation)(neap::kSilu + (found - kNames));
}

inline Sizes sizes_of(const Tensor& t) {
  const auto sizes = t.sizes();
  return Sizes(sizes.begin(), sizes.end());
}

template <class T>
const float* floats(const T& t) {
  return static_cast<const float*>(t.const_data_ptr());
}
inline float* mutable_floats(const Tensor& t) { return static_cast<float*>(t.mutable_data_ptr()); }
inline int64_t* mutable_integers(const Tensor& t) { return static_cast<int64_t*>(t.mutable_data_ptr()); }

// Memory for `count` floats that the thread keeps between calls. A new allocation of this size causes page faults.
inline float* thread_scratch(int64_t count) {
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<float, Free> memory;
  thread_local int64_t capacity = 0;
  if (count > capacity) {
    memory.reset(static_cast<float*>(std::aligned_alloc(64, (size_t)((count + 15) / 16 * 64))));
    capacity = memory ? count : 0;
    if (!memory) throw std::bad_alloc();
  }
  return memory.get();
}

// Allocates pieces of one buffer of floats, each starting on a cache line. With a null buffer it only adds up sizes.
class Arena {
 public:
  explicit Arena(float* base) : base_(base) {}
  float* take(int64_t count) {
    float* taken = base_ ? base_ + used_ : nullptr;
    used_ += (count + 15) / 16 * 16;
    return taken;
  }
  int64_t used() const { return used_; }

 private:
  float* base_;
  int64_t used_ = 0;
};

// attention.cpp
Tensor contiguous_attention(Tensor q, Tensor k, Tensor v, int64_t kv_length, std::optional<Tensor> mask, bool causal,
                            double scaling, std::optional<double> softcap, std::optional<Tensor> sinks);
Tensor ragged_contiguous_attention(Tensor q, Tensor k, Tensor v, std::vector<Tensor> keys, std::vector<Tensor> values,
                                   std::vector<int64_t> bases, std::vector<int64_t> counts, std::vector<Tensor> masks,
                                   double scaling, std::optional<double> softcap, std::optional<Tensor> sinks);

// decoder_layers.cpp
Tensor decoder_layers(Tensor x, std::vector<Tensor> cos, std::vector<Tensor> sin, Tensor norms, Tensor packed,
                      Tensor biases, std::vector<Tensor> keys, std::vector<Tensor> values, std::vector<int64_t> bases,
                      std::vector<int64_t> counts, std::vector<Tensor> masks, std::vector<int64_t> kinds,
                      std::vector<int64_t> stops, int64_t num_layers, int64_t heads, std::vector<int64_t> intermediates,
                      std::string activation, double eps, double weight_offset, double scaling,
                      std::optional<double> softcap, std::vector<int64_t> places, double query_scale, bool parallel_mlp,
                      int64_t experts_per_token, bool norm_shares, std::optional<Tensor> query_scales, bool norm_values,
                      std::vector<int64_t> reads_kv, std::optional<Tensor> ends,
                      std::optional<Tensor> per_layer_inputs);

// layer.cpp
Tensor profile_layers(bool is_on);

// chain.cpp
std::tuple<Tensor, Tensor, Tensor, Tensor> draft_chains(Tensor states, Tensor outputs, std::vector<int64_t> tokens,
                                                        std::vector<int64_t> counts, std::vector<int64_t> places,
                                                        std::vector<int64_t> rooms, std::vector<double> survivals,
                                                        std::vector<double> factors, std::vector<double> least,
                                                        Tensor embedding, Tensor vocabulary, std::vector<Tensor> packed,
                                                        std::vector<Tensor> vectors, double shift, double eps,
                                                        double lowest, double highest, int64_t max_drafts);

}  // namespace neap::binding
