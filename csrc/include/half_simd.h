// Loads of float16 and bfloat16 as float32, one number, four or kLanes at a time, and rounding to them.
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
  // Scaling by 2^112 corrects the exponent's bias, also for subnormal numbers. Infinity and NaN: see below.
  const float moved = float_of_bits(magnitude << 13) * 0x1p112f;
  uint32_t bits;
  __builtin_memcpy(&bits, &moved, 4);
  return float_of_bits(sign | (magnitude >= 0x7c00u ? bits | 0x7f800000u : bits));
}

// The nearest number of the other format, of two equally near ones the even one. NaN stays NaN.
NEAP_INLINE void round_to(float value, float* out) { *out = value; }
NEAP_INLINE void round_to(float value, Bfloat* out) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  out->bits = (uint16_t)(is_nan ? bits >> 16 | 0x40u : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
NEAP_INLINE void round_to(float value, Half* out) {
  uint32_t bits, small;
  __builtin_memcpy(&bits, &value, 4);
  const uint32_t magnitude = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000u;
  // Below 2^-14 the result is subnormal. Its unit, 2^-24, is that of float32 numbers from 0.5 on, so this addition
  // rounds to it.
  const float shifted = float_of_bits(magnitude) + 0.5f;
  __builtin_memcpy(&small, &shifted, 4);
  const uint32_t subnormal = small - 0x3f000000u;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  // 65520 and more: infinity.
  const uint32_t rounded = magnitude < (113u << 23) ? subnormal : magnitude < 0x477ff000u ? normal : special;
  out->bits = (uint16_t)(sign | rounded);
}

typedef float Quad __attribute__((vector_size(16)));
typedef float UnalignedQuad __attribute__((vector_size(16), aligned(4), may_alias));

NEAP_INLINE Quad load_four(const float* p) { return *reinterpret_cast<const UnalignedQuad*>(p); }
#if defined(NEAP_AVX512) || defined(NEAP_AVX2)
NEAP_INLINE Quad load_four(const Half* p) { return (Quad)_mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)p)); }
NEAP_INLINE Quad load_four(const Bfloat* p) {
  return (Quad)_mm_slli_epi32(_mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i*)p)), 16);
}
#elif defined(NEAP_NEON)
NEAP_INLINE Quad load_four(const Half* p) { return (Quad)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits))); }
NEAP_INLINE Quad load_four(const Bfloat* p) { return (Quad)vshll_n_u16(vld1_u16(&p->bits), 16); }
#else
template <class E>
NEAP_INLINE Quad load_four(const E* p) {
  return Quad{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
}
#endif

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
#elif defined(NEAP_NEON)
NEAP_INLINE Vec load(const Half* p) { return load_four(p); }
NEAP_INLINE Vec load(const Bfloat* p) { return load_four(p); }
#else
template <class E>
NEAP_INLINE Vec load(const E* p) {
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = to_float(p[i]);
  return v;
}
#endif

// Numbers d to d + 3 of kLanes rows, as four vectors with a number of each row.
template <class E>
NEAP_INLINE void load_columns(const E* const (&rows)[kLanes], int64_t d, Vec (&columns)[4]) {
  // Vector i has number d to d + 3 of rows i, 4 + i, .., so that transposing its quads puts the rows in order.
#if defined(NEAP_AVX512)
  __m512 r[4];
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_castps128_ps512((__m128)load_four(rows[i] + d));
    r[i] = _mm512_insertf32x4(r[i], (__m128)load_four(rows[4 + i] + d), 1);
    r[i] = _mm512_insertf32x4(r[i], (__m128)load_four(rows[8 + i] + d), 2);
    r[i] = _mm512_insertf32x4(r[i], (__m128)load_four(rows[12 + i] + d), 3);
  }
  const __m512d low01 = (__m512d)_mm512_unpacklo_ps(r[0], r[1]), high01 = (__m512d)_mm512_unpackhi_ps(r[0], r[1]);
  const __m512d low23 = (__m512d)_mm512_unpacklo_ps(r[2], r[3]), high23 = (__m512d)_mm512_unpackhi_ps(r[2], r[3]);
  columns[0] = (Vec)_mm512_unpacklo_pd(low01, low23);
  columns[1] = (Vec)_mm512_unpackhi_pd(low01, low23);
  columns[2] = (Vec)_mm512_unpacklo_pd(high01, high23);
  columns[3] = (Vec)_mm512_unpackhi_pd(high01, high23);
#elif defined(NEAP_AVX2)
  __m256 r[4];
  for (int i = 0; i < 4; ++i)
    r[i] = _mm256_set_m128((__m128)load_four(rows[4 + i] + d), (__m128)load_four(rows[i] + d));
  const __m256d low01 = (__m256d)_mm256_unpacklo_ps(r[0], r[1]), high01 = (__m256d)_mm256_unpackhi_ps(r[0], r[1]);
  const __m256d low23 = (__m256d)_mm256_unpacklo_ps(r[2], r[3]), high23 = (__m256d)_mm256_unpackhi_ps(r[2], r[3]);
  columns[0] = (Vec)_mm256_unpacklo_pd(low01, low23);
  columns[1] = (Vec)_mm256_unpackhi_pd(low01, low23);
  columns[2] = (Vec)_mm256_unpacklo_pd(high01, high23);
  columns[3] = (Vec)_mm256_unpackhi_pd(high01, high23);
#elif defined(NEAP_NEON)
  float32x4x2_t pairs[2];
  for (int i = 0; i < 2; ++i)
    pairs[i] = vtrnq_f32((float32x4_t)load_four(rows[2 * i] + d), (float32x4_t)load_four(rows[2 * i + 1] + d));
  for (int i = 0; i < 2; ++i) {
    columns[i] = (Vec)vtrn1q_f64((float64x2_t)pairs[0].val[i], (float64x2_t)pairs[1].val[i]);
    columns[2 + i] = (Vec)vtrn2q_f64((float64x2_t)pairs[0].val[i], (float64x2_t)pairs[1].val[i]);
  }
#else
  for (int i = 0; i < kLanes; ++i)
    for (int c = 0; c < 4; ++c) columns[c][i] = to_float(rows[i][d + c]);
#endif
}

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

// Calls f with a null pointer to the type of `dtype`.
template <class F>
NEAP_INLINE void with_type(Dtype dtype, const F& f) {
  switch (dtype) {
    case kFloat32: return f((float*)nullptr);
    case kFloat16: return f((Half*)nullptr);
    case kBfloat16: return f((Bfloat*)nullptr);
  }
}

// Rounds `count` numbers to `dtype`.
inline void round_row(const float* from, int64_t count, Dtype dtype, void* to) {
  with_type(dtype, [&](auto* type) {
    auto* out = static_cast<decltype(type)>(to);
    for (int64_t i = 0; i < count; ++i) round_to(from[i], out + i);
  });
}

// Rounds `count` numbers to bfloat16, two in a float's place. An odd last one is followed by 0.
inline void round_pairs(const float* from, int64_t count, float* to) {
  int64_t i = 0;
#if defined(NEAP_AVX512BF16)
  for (; i + 2 * kLanes <= count; i += 2 * kLanes)
    store(to + i / 2, (Vec)_mm512_cvtne2ps_pbh((__m512)load(from + i + kLanes), (__m512)load(from + i)));
#elif defined(NEAP_I8MM)
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    const bfloat16x8_t low = vcvtq_low_bf16_f32((float32x4_t)load(from + i));
    store(to + i / 2, (Vec)vcvtq_high_bf16_f32(low, (float32x4_t)load(from + i + kLanes)));
  }
#endif
  for (; i < count; i += 2) {
    Bfloat pair[2] = {};
    round_to(from[i], pair);
    if (i + 1 < count) round_to(from[i + 1], pair + 1);
    __builtin_memcpy(to + i / 2, pair, 4);
  }
}

// Calls f(i, load, store) for each group of kLanes numbers of a row of `width`; the last group may be partial.
template <class F>
NEAP_INLINE void for_lanes(int64_t width, const F& f) {
  const auto load_whole = [](const auto* p) { return load(p); };
  const auto store_whole = [](float* p, Vec v) { store(p, v); };
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) f(i, load_whole, store_whole);
  const int64_t rest = width - i;
  if (rest)
    f(i, [rest](const auto* p) { return load_part(p, rest); }, [rest](float* p, Vec v) { store_part(p, v, rest); });
}

}  // namespace neap::NEAP_ISA
