// Readers of packed panels: they dequantise 16 outputs of an input to float32 in registers, whatever the format.
//
// kHeld: vector registers per column that a reader holds; 0 if it is read as an operand from memory. kSums: those of a
// row's sum. kMost: the panels that a tile takes at most. kStreamRows: tiles of up to so many rows read one panel, from
// end to end. kNear: whether a tile prefetches to the L1 cache, not only to the L2 cache. kShared: whether several row
// tiles share one dequantised copy in memory instead of dequantising each for itself. A reader walks one depth block of
// a panel: begin(block, depth, rows). open(k) prepares the group that begins at input k; load(k) fetches the bytes of
// kUnit inputs, which begin a cache line at every kLineInputs-th input or oftener; column<j>(v) gives vector v of input
// k + j. The float32 numbers are those of GGUF's reference code: a product of scale and quant is exact in float32, so
// one fused multiply-add rounds as the reference does.
#pragma once
#include "formats.h"
#include "half_simd.h"

namespace neap::NEAP_ISA {

constexpr int kPanelVecs = kPanel / kLanes;

typedef int32_t UnalignedIntVec __attribute__((vector_size(kLanes * 4), aligned(1), may_alias));

NEAP_INLINE UintVec load_bits(const uint8_t* p) { return (UintVec)*reinterpret_cast<const UnalignedIntVec*>(p); }
NEAP_INLINE Vec load_halves(const uint8_t* p) { return load(reinterpret_cast<const Half*>(p)); }

// kLanes integers of 8 bits as float32.
#if defined(NEAP_AVX512)
NEAP_INLINE Vec load_bytes(const int8_t* p) {
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
NEAP_INLINE Vec load_bytes(const uint8_t* p) {
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
#elif defined(NEAP_AVX2)
NEAP_INLINE Vec load_bytes(const int8_t* p) {
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
NEAP_INLINE Vec load_bytes(const uint8_t* p) {
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
#elif defined(NEAP_NEON)
NEAP_INLINE uint32x2_t four_bytes(const void* p) {
  uint32_t bits;
  __builtin_memcpy(&bits, p, 4);
  return vdup_n_u32(bits);
}
NEAP_INLINE Vec load_bytes(const int8_t* p) {
  return (Vec)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(four_bytes(p))))));
}
NEAP_INLINE Vec load_bytes(const uint8_t* p) {
  return (Vec)vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(four_bytes(p))))));
}
#else
template <class Byte>
NEAP_INLINE Vec load_bytes(const Byte* p) {
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = (float)p[i];
  return v;
}
#endif

// What the quants of MXFP4 stand for (OCP's Microscaling Formats 1.0: floats of a sign, two bits of exponent and one of
// mantissa), doubled, so that all are whole; and the same plus kTableBias, so that none has a sign.
constexpr int kTableBias = 12;
alignas(16) constexpr int8_t kSignedTable[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
alignas(16) constexpr int8_t kBiasedTable[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// The table's byte for each byte of `places`, which are below 16.
NEAP_INLINE UintVec from_table(const int8_t (&table)[16], UintVec places) {
#if defined(NEAP_AVX512)
  const __m512i all = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)table));
  return (UintVec)_mm512_shuffle_epi8(all, (__m512i)places);
#elif defined(NEAP_AVX2)
  const __m256i all = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table));
  return (UintVec)_mm256_shuffle_epi8(all, (__m256i)places);
#elif defined(NEAP_NEON)
  return (UintVec)vqtbl1q_s8(vld1q_s8(table), (uint8x16_t)places);
#else
  UintVec found = {};
  for (int lane = 0; lane < kLanes; ++lane)
    for (int shift = 0; shift < 32; shift += 8)
      found[lane] |= (uint32_t)(uint8_t)table[places[lane] >> shift & 15] << shift;
  return found;
#endif
}

// 2 to the power of each byte less 128.
NEAP_INLINE Vec load_powers(const uint8_t* p) {
  const IntVec exponent = __builtin_convertvector(load_bytes(p), IntVec), is_tiny = exponent < 2;
  return (Vec)((is_tiny & (0x00200000 * (exponent + 1))) | (~is_tiny & ((exponent - 1) << 23)));
}

// The quant whose lowest 4 bits are those of `low`, whose higher bits stand above the lowest 4 of `high`, as float32.
template <int kBits>
NEAP_INLINE Vec number_of(UintVec low, UintVec high) {
#if defined(NEAP_AVX512)
  // A table look-up reads as many bits of its index as it needs, which spares the masks and the conversion.
  const __m512 first = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  if (kBits == 4) return (Vec)_mm512_permutexvar_ps((__m512i)low, first);
  if (kBits == 5) {
    const __m512 second = _mm512_setr_ps(16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31);
    return (Vec)_mm512_permutex2var_ps(first, (__m512i)((low & 15u) | (high & ~15u)), second);
  }
#endif
  constexpr uint32_t kMask = (1u << kBits) - 1u;
  return __builtin_convertvector((IntVec)((low & 15u) | (high & (kMask & ~15u))), Vec);
}

constexpr int64_t kNever = int64_t(1) << 62;

template <int kValue> struct Number { static constexpr int value = kValue; };

// Calls f(Number<0>()), f(Number<1>()), .. f(Number<kCount - 1>()).
template <int kCount, int kFirst = 0, class F>
NEAP_INLINE void for_inputs(const F& f) {
  if constexpr (kFirst < kCount) {
    f(Number<kFirst>());
    for_inputs<kCount, kFirst + 1>(f);
  }
}

// How a tile adds a product to a sum.
struct Sums {
  static constexpr int kSums = 1, kStreamRows = 0, kMost = kMaxPanels;
  static constexpr bool kNear = true;
  static NEAP_INLINE Vec add(Vec value, Vec column, Vec sum) { return fma(value, column, sum); }
};

// Rows of 16 numbers: also keys, values and dequantised panels. kStride: the bytes from one to the next; 0 if they are
// `row_bytes` apart: then a row's panels are one stream, and what comes next may be far away.
template <class E, int kStride = kPanel * (int)sizeof(E)>
struct Rows : Sums {
  static constexpr int kUnit = 1, kGroup = 1, kLineInputs = kStride ? 64 / kStride : 1;
  static constexpr int kHeld = sizeof(E) == 4 ? 0 : 1, kMost = kStride ? kMaxPanels : 8;
  static constexpr bool kShared = false, kNear = kStride != 0;
  const uint8_t* base;
  int64_t stride;
  const E* row;

  NEAP_INLINE void begin(const uint8_t* block, int64_t, int64_t row_bytes) {
    base = block;
    stride = kStride ? kStride : row_bytes;
  }
  NEAP_INLINE void open(int64_t) {}
  NEAP_INLINE void load(int64_t k) { row = reinterpret_cast<const E*>(base + k * (kStride ? kStride : stride)); }
  template <int kInput> NEAP_INLINE Vec column(int v) const { return neap::NEAP_ISA::load(row + v * kLanes); }
};

struct BfloatPairs : Sums {
  static constexpr int kUnit = 2, kGroup = 2, kLineInputs = 2;
  static constexpr int kHeld = kRegisters >= 32 ? 2 : 1;
  static constexpr bool kShared = kRegisters < 32;
  const uint8_t* base;
  UintVec pair[kPanelVecs];

  NEAP_INLINE void begin(const uint8_t* block, int64_t, int64_t) { base = block; }
  NEAP_INLINE void open(int64_t) {}
  NEAP_INLINE void load(int64_t k) {
    for (int v = 0; v < kPanelVecs; ++v) pair[v] = load_bits(base + k * kPanel * 2 + v * kLanes * 4);
  }
  template <int kInput> NEAP_INLINE Vec column(int v) const {
    return (Vec)(kInput ? pair[v] & 0xffff0000u : pair[v] << 16);
  }
};

// Panels of bfloat16 for products that round their inputs: what tiles take for an input is a pair of inputs.
struct BfloatDots : Rows<float> {
  static NEAP_INLINE Vec add(Vec value, Vec column, Vec sum) { return dot_pairs(value, column, sum); }
};

template <Format kFormat>
struct Quants : Sums {
  static constexpr int kHeld = 2;  // scales and offsets; the bits are cheap to fetch again
  static constexpr bool kShared = true;
  static constexpr Layout kLayout = kLayouts[kFormat];
  static constexpr int kUnit = 8, kGroup = (int)kLayout.group, kLineInputs = kLayout.bits == 8 ? 4 : 8;
  static constexpr int kHighBits = kLayout.bits == 8 ? 0 : kLayout.bits - 4;
  static constexpr int64_t kHighBytes = kHighBits ? kPanel * 4 : 0;  // a line of bits above the lowest 4
  // What is subtracted from each quant before it is scaled.
  static constexpr bool kHasTable = kFormat == kMxfp4;
  static constexpr int kBias = kFormat == kQ4_0   ? 8
                               : kFormat == kQ5_0 ? 16
                               : kFormat == kQ6_K ? 32
                               : kHasTable        ? kTableBias
                                                  : 0;
  static constexpr int kQuadBits = kHasTable ? 5 : kLayout.bits;  // of what `quads` gives

  const uint8_t *block, *scales, *quants;
  const uint8_t* group_quants;
  Vec scale[kPanelVecs], offset[kPanelVecs];
  // The line of 8 inputs and what is above it. Of 8 bits: even and odd inputs.
  UintVec low[kPanelVecs], high[kPanelVecs];

  NEAP_INLINE void begin(const uint8_t* next_block, int64_t depth, int64_t) {
    block = next_block;
    scales = block + kLayout.head_bytes;
    quants = scales + depth / kGroup * kLayout.scale_bytes;
  }

  NEAP_INLINE void open(int64_t k) {
    const int64_t group = k / kGroup;
    const uint8_t* group_scales = scales + group * kLayout.scale_bytes;
    group_quants = quants + group * quant_bytes(kLayout);
    for (int v = 0; v < kPanelVecs; ++v) {
      const int64_t halves = v * kLanes * 2, singles = v * kLanes;
      if constexpr (kFormat == kQ4_K || kFormat == kQ5_K) {
        scale[v] = load_halves(block + halves) * load_bytes(group_scales + singles);
        offset[v] = -(load_halves(block + kPanel * 2 + halves) * load_bytes(group_scales + kPanel + singles));
      } else if constexpr (kFormat == kQ6_K) {
        scale[v] = load_halves(block + halves) * load_bytes(reinterpret_cast<const int8_t*>(group_scales) + singles);
      } else if constexpr (kHasTable) {
        scale[v] = load_powers(group_scales + singles);
      } else {
        scale[v] = load_halves(group_scales + halves);
        if constexpr (kFormat == kQ4_1 || kFormat == kQ5_1) offset[v] = load_halves(group_scales + kPanel * 2 + halves);
      }
      if constexpr (kBias != 0 && !kHasTable) offset[v] = scale[v] * splat((float)-kBias);
      if constexpr (kHighBytes != 0) high[v] = load_bits(group_quants + v * kLanes * 4);
    }
  }

  NEAP_INLINE void load(int64_t k) {
    const int64_t within = k % kGroup;
    const uint8_t* line = group_quants + kHighBytes + within * kPanel * (kLayout.bits == 8 ? 8 : 4) / 8;
    for (int v = 0; v < kPanelVecs; ++v) {
      low[v] = load_bits(line + v * kLanes * 4);
      if constexpr (kLayout.bits == 8) high[v] = load_bits(line + kPanel * 4 + v * kLanes * 4);
      if constexpr (kHighBits != 0)
        if (within > 0) high[v] >>= 2 * kHighBits;
    }
  }

  template <int kInput> NEAP_INLINE Vec column(int v) const {
    constexpr int kByte = kInput / 2, kOdd = kInput % 2;
    if constexpr (kLayout.bits == 8) {
      const IntVec number = (IntVec)((kOdd ? high[v] : low[v]) << (24 - 8 * kByte)) >> 24;
      return __builtin_convertvector(number, Vec) * scale[v];
    } else if constexpr (kHasTable) {
      const IntVec number = (IntVec)(from_table(kSignedTable, low[v] >> (4 * kInput) & 15u) << 24) >> 24;
      return __builtin_convertvector(number, Vec) * scale[v];
    } else {
      constexpr int kShift = 4 - 8 * kByte - kHighBits * kOdd;  // moves the input's high bits above the lowest 4
      const UintVec above = kHighBits == 0 ? low[v]
                            : kShift >= 0  ? high[v] << (kShift & 31)
                                           : high[v] >> (-kShift & 31);
      return fma(scale[v], number_of<kLayout.bits>(low[v] >> (4 * kInput), above), offset[v]);
    }
  }

  // The quants of the 4 even or odd inputs of the line, without scale and bias, in the bytes of a lane.
  template <int kOdd> NEAP_INLINE UintVec quads(int v) const {
    if constexpr (kLayout.bits == 8) return kOdd ? high[v] : low[v];
    const UintVec lowest = (low[v] >> (4 * kOdd)) & 0x0f0f0f0fu;
    if constexpr (kHasTable) return from_table(kBiasedTable, lowest);
    if constexpr (kHighBits == 0) return lowest;
    return lowest | ((high[v] >> (kHighBits * kOdd)) & (0x01010101u * ((1u << kHighBits) - 1u))) << 4;
  }
};

template <Format kFormat> struct ReaderOf { typedef Quants<kFormat> Type; };
template <> struct ReaderOf<kPlain32> { typedef Rows<float> Type; };
template <> struct ReaderOf<kPlain16> { typedef Rows<Half> Type; };
template <> struct ReaderOf<kPlainBf16> { typedef BfloatPairs Type; };

// Dequantises a depth block of a panel to out [depth, 16].
template <class Reader>
void dequantise_block(const uint8_t* block, int64_t depth, float* out) {
  Reader reader;
  reader.begin(block, depth, {});
  for (int64_t k = 0; k < depth; k += Reader::kUnit) {
    if (k % Reader::kGroup == 0) reader.open(k);
    reader.load(k);
    const int64_t inputs = min64(Reader::kUnit, depth - k);
    for_inputs<Reader::kUnit>([&](auto input) {
      if (input.value < inputs)
        for (int v = 0; v < kPanelVecs; ++v)
          store(out + (k + input.value) * kPanel + v * kLanes, reader.template column<input.value>(v));
    });
  }
}

}  // namespace neap::NEAP_ISA
