// float16 and bfloat16 as bits: the formats of stored weights and states. Kernels compute in float32.
#pragma once
#include <cstdint>

#if defined(__CUDACC__)
#define NEAP_ANYWHERE __host__ __device__
#else
// Compiled once per instruction set, too: the linker must not choose one of them for all (see simd.h).
#define NEAP_ANYWHERE __attribute__((always_inline))
#endif

namespace neap {

enum Dtype : int32_t { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2 };

struct Half { uint16_t bits; };
struct Bfloat { uint16_t bits; };

NEAP_ANYWHERE constexpr int64_t element_bytes(Dtype dtype) { return dtype == kFloat32 ? 4 : 2; }

NEAP_ANYWHERE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace neap
