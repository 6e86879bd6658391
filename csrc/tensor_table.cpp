#include "tensor_table.h"

#include <cstring>

namespace neap::binding {

namespace {

constexpr char kTableMagic[8] = {'n', 'e', 'a', 'p', 't', 'b', 'l', '1'};

struct TableHeader {
  char magic[8];
  int64_t count;
};

}  // namespace

// uint8: a header, and the description of each tensor, with its address. The tensors must outlive the table and keep
// their memory.
Tensor tensor_table(std::vector<Tensor> tensors) {
  Tensor table =
      empty({(int64_t)(sizeof(TableHeader) + tensors.size() * sizeof(TensorInfo))}, aoti_torch_dtype_uint8());
  auto* bytes = static_cast<uint8_t*>(table.mutable_data_ptr());
  TableHeader header{{}, (int64_t)tensors.size()};
  std::memcpy(header.magic, kTableMagic, sizeof(kTableMagic));
  std::memcpy(bytes, &header, sizeof(header));
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& t = tensors[i];
    NEAP_CHECK(t.dim() <= kTableDims, "tensor_table: a tensor has shape ", text(t), ", want at most ", kTableDims,
               " dimensions");
    TensorInfo info{
        .data = t.mutable_data_ptr(),
        .elements = t.numel(),
        .dims = t.dim(),
        .type = t.scalar_type(),
        .on_cpu = t.is_cpu(),
        .contiguous = t.is_contiguous(),
    };
    for (int64_t d = 0; d < t.dim(); ++d) {
      info.sizes[d] = t.size(d);
      info.strides[d] = t.stride(d);
    }
    std::memcpy(bytes + sizeof(header) + i * sizeof(info), &info, sizeof(info));
  }
  return table;
}

TensorTable table_of(const char* op, const char* name, const Tensor& table) {
  TableHeader header{};
  const bool large = table.is_cpu() && table.scalar_type() == ScalarType::Byte && table.is_contiguous() &&
                     table.numel() >= (int64_t)sizeof(header);
  const auto* bytes = large ? static_cast<const uint8_t*>(table.const_data_ptr()) : nullptr;
  if (bytes) std::memcpy(&header, bytes, sizeof(header));
  NEAP_CHECK(bytes && std::memcmp(header.magic, kTableMagic, sizeof(kTableMagic)) == 0 &&
                 table.numel() == (int64_t)(sizeof(header) + header.count * sizeof(TensorInfo)),
             op, ": ", name, " is not a table; tensor_table makes them");
  return {reinterpret_cast<const TensorInfo*>(bytes + sizeof(header)), (size_t)header.count};
}

}  // namespace neap::binding
