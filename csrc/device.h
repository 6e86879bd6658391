// Shared by the ops that run on CPU and GPU: argument checks, allocation on the input's device, and launches on its
// current stream.
#pragma once
#include <torch/csrc/stable/accelerator.h>

#include "binding.h"

// Weak, because a torch without CUDA does not define it: one library works with both.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace neap::binding {

// Checks the tensors of one call of an op. All must be on the device of `first`; error messages name op and argument.
class Call {
 public:
  Call(const char* op, const Tensor& first) : op_(op), first_(first), cpu_(first.is_cpu()) {}

  bool on_cpu() const { return cpu_; }

  Dtype dtype(const char* name, const Tensor& t) const { return dtype_of(op_, name, t); }

  // `sizes`: -1 matches any size.
  void shape(const char* name, const Tensor& t, const Sizes& sizes) const {
    bool fits = t.dim() == (int64_t)sizes.size();
    for (size_t i = 0; fits && i < sizes.size(); ++i) fits = sizes[i] < 0 || t.size(i) == sizes[i];
    std::string wanted;
    for (int64_t size : sizes)
      wanted += (wanted.empty() ? "" : ", ") + (size < 0 ? std::string("any") : std::to_string(size));
    NEAP_CHECK(fits, op_, ": ", name, " has shape ", text(t), ", want [", wanted, "]");
    NEAP_CHECK(t.is_cpu() == cpu_ && (cpu_ || t.get_device_index() == first_.get_device_index()), op_, ": ", name,
               " is on another device than the first tensor");
  }

  // A matrix whose rows are contiguous; the stride between rows is arbitrary.
  void rows(const char* name, const Tensor& t, const Sizes& sizes) const {
    shape(name, t, sizes);
    NEAP_CHECK(t.numel() == 0 || t.size(1) == 1 || t.stride(1) == 1, op_, ": the last dimension of ", name,
               " must be contiguous");
  }

  void contiguous(const char* name, const Tensor& t, const Sizes& sizes) const {
    shape(name, t, sizes);
    NEAP_CHECK(t.is_contiguous(), op_, ": ", name, " must be contiguous");
  }

  Weight weight(const char* name, const Tensor& t, int64_t num_rows, int64_t columns) const {
    contiguous(name, t, {num_rows, columns});
    return {.data = t.const_data_ptr(), .dtype = dtype(name, t), .rows = t.size(0), .columns = t.size(1)};
  }

  const float* floats(const char* name, const Tensor& t, const Sizes& sizes) const {
    contiguous(name, t, sizes);
    NEAP_CHECK(t.scalar_type() == ScalarType::Float, op_, ": ", name, " must be float32");
    return static_cast<const float*>(t.const_data_ptr());
  }

  const int64_t* integers(const char* name, const Tensor& t, const Sizes& sizes) const {
    contiguous(name, t, sizes);
    NEAP_CHECK(t.scalar_type() == ScalarType::Long, op_, ": ", name, " must be int64");
    return static_cast<const int64_t*>(t.const_data_ptr());
  }

  Tensor empty(const Sizes& sizes, int32_t dtype) const {
    Sizes strides(sizes.size(), 1);
    for (int64_t i = (int64_t)sizes.size() - 2; i >= 0; --i)
      strides[i] = strides[i + 1] * std::max<int64_t>(sizes[i + 1], 1);
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(), dtype,
                                                    cpu_ ? aoti_torch_device_type_cpu() : aoti_torch_device_type_cuda(),
                                                    cpu_ ? 0 : first_.get_device_index(), &handle));
    return Tensor(handle);
  }

  // Calls `launch(stream)` with the current stream of the first tensor's device. `launch` returns 0 or a CUDA error.
  template <class F>
  void on_gpu(const F& launch) const {
#if defined(NEAP_WITH_CUDA)
    NEAP_CHECK(aoti_torch_get_current_cuda_stream != nullptr, op_, ": this torch has no CUDA");
    const int32_t device = first_.get_device_index();
    torch::stable::accelerator::DeviceGuard guard(device);
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
    const int code = launch(stream);
    NEAP_CHECK(code == 0, op_, ": the kernel launch failed: ", cuda_error(code));
#else
    (void)launch;
    NEAP_CHECK(false, op_, ": this library was built without CUDA");
#endif
  }

 private:
  const char* op_;
  const Tensor& first_;
  bool cpu_;
};

}  // namespace neap::binding
