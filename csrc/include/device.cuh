// Shared by the GPU kernels. They compile with nvcc, or with a host compiler and tests/shared/ops/emulator.h for tests
// without a GPU.
#pragma once
#include <stdint.h>

#include <type_traits>

#if defined(NEAP_EMULATED)
#include "emulator.h"
#else
#include <cuda_runtime.h>
#define NEAP_SHARED(type, name, count) __shared__ type name[count]
#define NEAP_LAUNCH(kernel, grid, threads, stream, ...) \
  kernel<<<grid, threads, 0, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)
#endif

#include "elements.h"

namespace neap::gpu {

constexpr int kWarp = 32;
constexpr unsigned kAll = 0xffffffffu;
constexpr int kThreads = 128, kWarps = kThreads / kWarp;
constexpr int kTile = 8;  // tokens that share one read of the weights

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(Bfloat value) { return __uint_as_float((uint32_t)value.bits << 16); }
__device__ __forceinline__ float to_float(Half value) {
#if defined(NEAP_EMULATED)
  return emulator::float_of_half(value.bits);
#else
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(value.bits));
  return out;
#endif
}

// Rounds to nearest, ties to even.
template <class E>
__device__ __forceinline__ E from_float(float value) {
  if constexpr (sizeof(E) == 4) {
    return value;
  } else if constexpr (std::is_same_v<E, Bfloat>) {
    const uint32_t bits = __float_as_uint(value);
    if (value != value) return {(uint16_t)(bits >> 16 | 0x40u)};
    return {(uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
  } else {
#if defined(NEAP_EMULATED)
    return {emulator::half_of_float(value)};
#else
    E out;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
    return out;
#endif
  }
}

struct alignas(16) Sixteen { uint32_t v[4]; };

// Loads kSize consecutive numbers: either one, or 16 bytes of them, to which p must be aligned.
template <int kSize, class E>
__device__ __forceinline__ void load_chunk(const E* p, float (&out)[kSize]) {
  if constexpr (kSize == 1) {
    out[0] = to_float(*p);
  } else {
    static_assert(kSize * sizeof(E) == 16);
    const Sixteen raw = *reinterpret_cast<const Sixteen*>(p);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if constexpr (sizeof(E) == 4) out[i] = __uint_as_float(raw.v[i]);
      else out[i] = to_float(E{(uint16_t)(raw.v[i / 2] >> 16 * (i % 2))});
    }
  }
}

// Loads kSize consecutive numbers: one, or eight of a matrix for which takes_eight holds.
template <int kSize, class E>
__device__ __forceinline__ void load_numbers(const E* p, float (&out)[kSize]) {
  constexpr int kChunk = kSize == 1 ? 1 : 16 / sizeof(E);
#pragma unroll
  for (int first = 0; first < kSize; first += kChunk) {
    float chunk[kChunk];
    load_chunk<kChunk>(p + first, chunk);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) out[first + i] = chunk[i];
  }
}
// Whether load_numbers can read eight numbers of all rows of a matrix at p with this stride.
template <class E>
inline bool takes_eight(const E* p, int64_t stride) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0 && stride % 8 == 0;
}

__device__ __forceinline__ float silu(float value) { return value / (1.f + expf(-value)); }

// Keeps a number of an array in a register: a choice between two of them could become one between addresses.
__device__ __forceinline__ void hold(float& value) {
#if !defined(NEAP_EMULATED)
  asm("" : "+f"(value));
#else
  (void)value;
#endif
}

template <class T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAll, value, step);
  return value;
}

// The sum over the block's threads, returned to all of them. `scratch`: one number per warp; it may be reused right
// after the call.
template <class T>
__device__ __forceinline__ T block_sum(T value, T* scratch) {
  value = warp_sum(value);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = value;
  __syncthreads();
  T total = 0;
  for (unsigned warp = 0; warp < blockDim.x / kWarp; ++warp) total += scratch[warp];
  __syncthreads();
  return total;
}

// Writes a value that other blocks read after this thread has executed a fence (see is_last_block).
template <class T>
__device__ __forceinline__ void publish(T* p, T value) {
#if defined(NEAP_EMULATED)
  emulator::publish(p, value);
#else
  __stcg(p, value);
#endif
}

// True in all threads of the last of `count` blocks to call this. That block can read what the others published before.
// The ticket, which must be zero before the first block, is zero again afterwards.
__device__ __forceinline__ bool is_last_block(uint32_t* ticket, unsigned count, unsigned* scratch) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) *scratch = atomicInc(ticket, count - 1);
  __syncthreads();
  const bool last = *scratch == count - 1;
  __syncthreads();
  if (last) __threadfence();
  return last;
}

// Calls f with a null pointer of the element type of `dtype`.
template <class F>
int with_element(Dtype dtype, const F& f) {
  switch (dtype) {
    case kFloat32: return f(static_cast<const float*>(nullptr));
    case kFloat16: return f(static_cast<const Half*>(nullptr));
    case kBfloat16: return f(static_cast<const Bfloat*>(nullptr));
  }
  return (int)cudaErrorInvalidValue;
}

}  // namespace neap::gpu
