// A vector of kLanes floats, and the functions on it that the kernels use.
//
// Compiled once per instruction set. Everything is in a namespace of that set's name, and the kernels use no std::
// templates. Otherwise the linker would merge inline functions of two objects, and AVX-512 code could run on a machine
// without it.
#pragma once
#include <cstdint>

#include "elements.h"

#if defined(NEAP_AVX512)
#include <immintrin.h>
#if defined(NEAP_AVX512BF16)
#define NEAP_ISA avx512bf16
#else
#define NEAP_ISA avx512
#endif
#elif defined(NEAP_AVX2)
#include <immintrin.h>
#define NEAP_ISA avx2
#elif defined(NEAP_NEON)
#include <arm_neon.h>
#if defined(NEAP_I8MM)
#define NEAP_ISA i8mm
#elif defined(NEAP_DOTPROD)
#define NEAP_ISA dotprod
#else
#define NEAP_ISA neon
#endif
#else
#define NEAP_ISA portable
#endif
#define NEAP_STRINGIFY_(name) #name
#define NEAP_STRINGIFY(name) NEAP_STRINGIFY_(name)
#define NEAP_INLINE inline __attribute__((always_inline))

namespace neap::NEAP_ISA {

// kAccumulators: vectors of sums in a tile. kMaxPanels: streams of weights that one tile reads; few, because tiles
// prefetch what they read next, and then more streams only get into each other's way. kOwnTiles: up to so many row
// tiles of a quantised matrix dequantise it each for itself, which takes less time than a copy that they share.
// Measured on Zen 5 (decision 007): AVX-512 and AVX2.
#if defined(NEAP_AVX512)
constexpr int kLanes = 16, kAccumulators = 24, kMaxTileRows = 12, kMaxPanels = 3, kRegisters = 32, kOwnTiles = 3;
#elif defined(NEAP_AVX2)
constexpr int kLanes = 8, kAccumulators = 12, kMaxTileRows = 6, kMaxPanels = 3, kRegisters = 16, kOwnTiles = 2;
#elif defined(NEAP_NEON)
constexpr int kLanes = 4, kAccumulators = 24, kMaxTileRows = 6, kMaxPanels = 6, kRegisters = 32, kOwnTiles = 1;
#elif defined(NEAP_PORTABLE_LANES)
// For tests: runs the code paths of wider instruction sets on a machine without them.
constexpr int kLanes = NEAP_PORTABLE_LANES, kAccumulators = 24, kMaxTileRows = 12, kMaxPanels = 3, kRegisters = 32,
              kOwnTiles = 3;
#else
constexpr int kLanes = 4, kAccumulators = 12, kMaxTileRows = 3, kMaxPanels = 3, kRegisters = 16, kOwnTiles = 1;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t UintVec __attribute__((vector_size(kLanes * 4)));
typedef float UnalignedVec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

NEAP_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
NEAP_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

NEAP_INLINE Vec load(const float* p) { return *reinterpret_cast<const UnalignedVec*>(p); }
NEAP_INLINE void store(float* p, Vec v) { *reinterpret_cast<UnalignedVec*>(p) = v; }

NEAP_INLINE Vec splat(float x) {
#if defined(NEAP_AVX512)
  return (Vec)_mm512_set1_ps(x);
#elif defined(NEAP_AVX2)
  return (Vec)_mm256_set1_ps(x);
#elif defined(NEAP_NEON)
  return (Vec)vdupq_n_f32(x);
#else
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = x;
  return v;
#endif
}

// a * b + c. An intrinsic, and the build uses -ffp-contract=off: otherwise a compiler could fuse in one tile shape and
// not in another, and the bits of a row's result would depend on the number of rows in the pass.
NEAP_INLINE Vec fma(Vec a, Vec b, Vec c) {
#if defined(NEAP_AVX512)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(NEAP_AVX2)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(NEAP_NEON)
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// a0 * b0 + a1 * b1 + c for the two bfloat16 numbers of each lane of a and b. The instructions of AVX-512 BF16 and of
// ARM take subnormal numbers for 0, and round in orders of their own.
NEAP_INLINE Vec dot_pairs(Vec a, Vec b, Vec c) {
#if defined(NEAP_AVX512BF16)
  return (Vec)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
#elif defined(NEAP_I8MM)
  return (Vec)vbfdotq_f32((float32x4_t)c, (bfloat16x8_t)a, (bfloat16x8_t)b);
#else
  const UintVec first = (UintVec)a, second = (UintVec)b;
  return fma((Vec)(first & 0xffff0000u), (Vec)(second & 0xffff0000u), fma((Vec)(first << 16), (Vec)(second << 16), c));
#endif
}

NEAP_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }

// Sum of the lanes, in a fixed order.
NEAP_INLINE float sum_lanes(Vec v) {
  float lanes[kLanes];
  store(lanes, v);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

NEAP_INLINE float max_lanes(Vec v) {
  float largest = v[0];
  for (int i = 1; i < kLanes; ++i) largest = v[i] > largest ? v[i] : largest;
  return largest;
}

// e^x to about 1 ulp; 0 below -87.3 (no subnormals), e^88.7 above 88.7. Cephes' polynomial.
NEAP_INLINE Vec exp(Vec x) {
  const IntVec underflow = x < splat(-87.3f);
  x = x > splat(88.7f) ? splat(88.7f) : x;
  x = underflow ? splat(0.f) : x;
  const Vec magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
  const Vec shifted = fma(x, splat(1.44269504088896341f), magic);
  const Vec n = shifted - magic;
  Vec r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  Vec p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + splat(1.f);
  // 2^n in two steps, because n = 128 alone does not fit the exponent.
  const IntVec bits = (IntVec)shifted - (IntVec)magic;
  const IntVec half = bits >> 1;
  p = p * (Vec)((half + 127) << 23) * (Vec)((bits - half + 127) << 23);
  return underflow ? splat(0.f) : p;
}

NEAP_INLINE Vec sigmoid(Vec x) { return splat(1.f) / (splat(1.f) + exp(-x)); }

// To 3 ulp. Eigen's rational approximation between -4 and 4, beyond which it is 1.
NEAP_INLINE Vec erf(Vec x) {
  x = max(splat(-4.f), x > splat(4.f) ? splat(4.f) : x);
  const Vec square = x * x;
  Vec p = fma(splat(-2.72614225801306e-10f), square, splat(2.77068142495902e-08f));
  p = fma(p, square, splat(-2.10102402082508e-06f));
  p = fma(p, square, splat(-5.69250639462346e-05f));
  p = fma(p, square, splat(-7.34990630326855e-04f));
  p = fma(p, square, splat(-2.95459980854025e-03f));
  p = fma(p, square, splat(-1.60960333262415e-02f));
  Vec q = fma(splat(-1.45660718464996e-05f), square, splat(-2.13374055278905e-04f));
  q = fma(q, square, splat(-1.68282697438203e-03f));
  q = fma(q, square, splat(-7.37332916720468e-03f));
  q = fma(q, square, splat(-1.42647390514189e-02f));
  const Vec r = x * p / q;
  return max(splat(-1.f), r > splat(1.f) ? splat(1.f) : r);
}

NEAP_INLINE Vec tanh(Vec x) {
  const IntVec negative = x < splat(0.f);
  const Vec magnitude = negative ? -x : x;
  const Vec square = x * x;
  // Near zero the exponential form loses digits by cancellation, so a Taylor polynomial is used there.
  Vec p = fma(splat(-0.0539682540f), square, splat(0.133333333f));
  p = fma(p, square, splat(-0.333333333f));
  p = fma(p * square, magnitude, magnitude);
  const Vec q = splat(1.f) - splat(2.f) / (exp(magnitude + magnitude) + splat(1.f));
  const Vec r = magnitude < splat(0.2f) ? p : q;
  return negative ? -r : r;
}

}  // namespace neap::NEAP_ISA
