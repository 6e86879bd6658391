// Loads of float16 and bfloat16 as float32, one number or kLanes at a time.
#pragma once
#include "elements.h"
#include "simd.h"

namespace neap::NEAP_ISA {

NEAP_INLINE float float_of_bits(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

NEAP_INLINE float to_float(float value) { return value; }
NEAP_INLINE float to_float(Bfloat value) { return float_of_bits((uint32_t)value.bits << 16); }
NEAP_INLINE float to_float(Half value) {
  const uint32_t magnitude = value.bits & 0x7fffu, sign = (uint32_t)(value.bits & 0x8000u) << 16;
  // Scaling by 2^112 corrects the exponent's bias, also for subnormal numbers. Infinity and NaN get float32's exponent below.
  const float moved = float_of_bits(magnitude << 13) * 0x1p112f;
  uint32_t bits;
  __builtin_memcpy(&bits, &moved, 4);
  return float_of_bits(sign | (magnitude >= 0x7c00u ? bits | 0x7f800000u : bits));
}

#if defined(NEAP_AVX512)
NEAP_INLINE Vec load(const Half* p) { return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
NEAP_INLINE Vec load(const Bfloat* p) {
  return (Vec)_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
#elif defined(NEAP_AVX2)
NEAP_INLINE Vec load(const Half* p) { return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
NEAP_INLINE Vec load(const Bfloat* p) {
  return (Vec)_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
#else
template <class E>
NEAP_INLINE Vec load(const E* p) {
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = to_float(p[i]);
  return v;
}
#endif

// Loads `count` < kLanes numbers; the other lanes are 0.
template <class E>
NEAP_INLINE Vec load_part(const E* p, int64_t count) {
  float lanes[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = to_float(p[i]);
  return load(lanes);
}

NEAP_INLINE void store_part(float* p, Vec v, int64_t count) {
  float lanes[kLanes];
  store(lanes, v);
  for (int64_t i = 0; i < count; ++i) p[i] = lanes[i];
}

// Calls f(i, load, store) for each group of kLanes numbers of a row of `width`; the last group may be partial.
template <class F>
NEAP_INLINE void for_lanes(int64_t width, const F& f) {
  const auto load_whole = [](const auto* p) { return load(p); };
  const auto store_whole = [](float* p, Vec v) { store(p, v); };
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) f(i, load_whole, store_whole);
  const int64_t rest = width - i;
  if (rest) f(i, [rest](const auto* p) { return load_part(p, rest); }, [rest](float* p, Vec v) { store_part(p, v, rest); });
}

}  // namespace neap::NEAP_ISA
