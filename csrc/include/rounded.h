// Products of quantised weights and inputs that are rounded to 8 bits.
//
// 32 inputs of a row share a scale, which makes the largest magnitude 127. Products of an input and a quant are summed
// as integers, which is exact, over the inputs that share a weight's scale. Only then are they scaled and added in
// float32, in order. So the bits of a row's result do not depend on its company, and hardly on the instruction set:
// only how float32 sums begin does.
#pragma once
#include "tile.h"

namespace neap::NEAP_ISA {

constexpr int64_t kRoundedInputs = 32;

// 32 inputs of a row, rounded. Byte j of word 2i + p is input 8i + 2j + p, as the quants of a line lie.
struct InputGroup {
  uint32_t words[8];
  float scale, scaled_sum;  // of an input's unit, and the sum of the inputs times it
  int32_t sums[2];          // of the first and of the last 16 inputs
};
constexpr int64_t kGroupFloats = sizeof(InputGroup) / sizeof(float);
static_assert(sizeof(InputGroup) == 48, "rows of groups are read as rows of floats");

// Puts 16 numbers in [-127, 127] into bytes, those of each 8 in the order 0, 2, 4, 6, 1, 3, 5, 7.
NEAP_INLINE void pack_bytes(const int32_t* numbers, uint32_t* words) {
#if defined(NEAP_AVX512) || defined(NEAP_AVX2)
  const __m128i* from = reinterpret_cast<const __m128i*>(numbers);
  const __m128i first = _mm_packs_epi32(_mm_loadu_si128(from), _mm_loadu_si128(from + 1));
  const __m128i second = _mm_packs_epi32(_mm_loadu_si128(from + 2), _mm_loadu_si128(from + 3));
  const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(words), _mm_shuffle_epi8(_mm_packs_epi16(first, second), order));
#elif defined(NEAP_NEON)
  const int16x8_t first = vcombine_s16(vmovn_s32(vld1q_s32(numbers)), vmovn_s32(vld1q_s32(numbers + 4)));
  const int16x8_t second = vcombine_s16(vmovn_s32(vld1q_s32(numbers + 8)), vmovn_s32(vld1q_s32(numbers + 12)));
  const uint8x16_t order = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15};
  vst1q_s8(reinterpret_cast<int8_t*>(words), vqtbl1q_s8(vcombine_s8(vmovn_s16(first), vmovn_s16(second)), order));
#else
  for (int word = 0; word < 4; ++word) {
    words[word] = 0;
    for (int byte = 0; byte < 4; ++byte)
      words[word] |= (uint32_t)(numbers[word / 2 * 8 + byte * 2 + word % 2] & 255) << (8 * byte);
  }
#endif
}

// Rounds `count` inputs, a multiple of 32. A group with an input that is not finite gets a scale that is not a number.
// One without an input above 1e-30 is 0.
inline void round_groups(const float* x, int64_t count, InputGroup* groups) {
  constexpr int kVecs = kRoundedInputs / kLanes;
  for (InputGroup* group = groups; group < groups + count / kRoundedInputs; ++group, x += kRoundedInputs) {
    Vec largest = splat(0.f), spoilt = splat(0.f);
    for (int v = 0; v < kVecs; ++v) {
      const Vec value = load(x + v * kLanes);
      largest = max(largest, max(value, -value));
      spoilt += value - value;
    }
    const float most = max_lanes(largest), nan = sum_lanes(spoilt);
    const bool is_usable = most > 1e-30f && nan == 0.f;
    const Vec inverse = splat(is_usable ? 127.f / most : 0.f), magic = splat(12582912.f);  // see exp
    alignas(64) int32_t numbers[kRoundedInputs];
    for (int v = 0; v < kVecs; ++v) {
      const Vec shifted = is_usable ? load(x + v * kLanes) * inverse + magic : magic;
      *reinterpret_cast<IntVec*>(numbers + v * kLanes) = (IntVec)shifted - (IntVec)magic;
    }
    for (int half = 0; half < 2; ++half) {
      pack_bytes(numbers + 16 * half, group->words + 4 * half);
      group->sums[half] = 0;
      for (int i = 0; i < 16; ++i) group->sums[half] += numbers[16 * half + i];
    }
    group->scale = is_usable ? most / 127.f : nan;
    group->scaled_sum = group->scale * (float)(group->sums[0] + group->sums[1]);
  }
}

// Sums of products of bytes in each lane: 4 quants in [0, 2^kBits), or of 8 bits and signed, times 4 inputs. `kAt`
// counts the additions from 0 to kLast, which is the last one.
//
// AVX-512 VNNI adds them at once. It takes quants without a sign: kBias is what it adds to signed ones. Without it,
// products are summed in 16 bits for as long as these hold them. NEAP_IN_ORDER keeps the compiler from adding them in
// another order: it would first compute all products and keep them in memory.
#define NEAP_IN_ORDER(sum) __asm__ volatile("" : "+v"(sum))
template <int kBits>
struct ByteSums {
#if defined(NEAP_AVX512VNNI)
  static constexpr int kBias = kBits == 8 ? 128 : 0;
  IntVec total;
  NEAP_INLINE void begin(int32_t value) { total = (IntVec)_mm512_set1_epi32(value); }
  static NEAP_INLINE UintVec prepared(UintVec quants) { return kBits == 8 ? quants ^ 0x80808080u : quants; }
  template <int kAt, int kLast> NEAP_INLINE void add(UintVec quants, uint32_t inputs) {
    total = (IntVec)_mm512_dpbusd_epi32((__m512i)total, (__m512i)quants, _mm512_set1_epi32((int)inputs));
  }
#elif defined(NEAP_AVX512) || defined(NEAP_AVX2)
  static constexpr int kBias = 0;
  static constexpr int kRun = kBits == 8 ? 1 : 32767 / (((1 << kBits) - 1) * 127 * 2);
  IntVec total, run;
  static NEAP_INLINE UintVec prepared(UintVec quants) { return quants; }
#if defined(NEAP_AVX512)
  NEAP_INLINE void begin(int32_t value) { total = (IntVec)_mm512_set1_epi32(value); }
  template <int kAt, int kLast> NEAP_INLINE void add(UintVec quants, uint32_t inputs) {
    __m512i weight = (__m512i)quants, input = _mm512_set1_epi32((int)inputs);
    if (kBits == 8) {
      input = _mm512_mask_sub_epi8(input, _mm512_movepi8_mask(weight), _mm512_setzero_si512(), input);
      weight = _mm512_abs_epi8(weight);
    }
    const __m512i products = _mm512_maddubs_epi16(weight, input);
    run = (IntVec)(kAt % kRun == 0 ? products : _mm512_add_epi16((__m512i)run, products));
    NEAP_IN_ORDER(run);
    if (kAt % kRun == kRun - 1 || kAt == kLast) total += (IntVec)_mm512_madd_epi16((__m512i)run, _mm512_set1_epi16(1));
  }
#else
  NEAP_INLINE void begin(int32_t value) { total = (IntVec)_mm256_set1_epi32(value); }
  template <int kAt, int kLast> NEAP_INLINE void add(UintVec quants, uint32_t inputs) {
    __m256i weight = (__m256i)quants, input = _mm256_set1_epi32((int)inputs);
    if (kBits == 8) {
      input = _mm256_sign_epi8(input, weight);
      weight = _mm256_abs_epi8(weight);
    }
    const __m256i products = _mm256_maddubs_epi16(weight, input);
    run = (IntVec)(kAt % kRun == 0 ? products : _mm256_add_epi16((__m256i)run, products));
    NEAP_IN_ORDER(run);
    if (kAt % kRun == kRun - 1 || kAt == kLast) total += (IntVec)_mm256_madd_epi16((__m256i)run, _mm256_set1_epi16(1));
  }
#endif
#else
  static constexpr int kBias = 0;
  IntVec total;
  NEAP_INLINE void begin(int32_t value) {
    for (int i = 0; i < kLanes; ++i) total[i] = value;
  }
  static NEAP_INLINE UintVec prepared(UintVec quants) { return quants; }
  template <int kAt, int kLast> NEAP_INLINE void add(UintVec quants, uint32_t inputs) {
    for (int byte = 0; byte < 4; ++byte) {
      const IntVec number =
          kBits == 8 ? (IntVec)(quants << (24 - 8 * byte)) >> 24 : (IntVec)(quants >> (8 * byte) & 255u);
      total += number * (int32_t)(int8_t)(inputs >> (8 * byte));
    }
  }
#endif
};

#undef NEAP_IN_ORDER

// Quantised panels for rounded inputs. What tiles take for rows of inputs are rows of InputGroup.
template <Format kFormat>
struct RoundedQuants : Quants<kFormat> {
  // One row waits for memory. The processor's own prefetching is fastest along a single stream that never jumps, and
  // groups of 32 inputs are independent sums, so one panel keeps it busy.
  static constexpr int kHeld = 2, kSums = 2, kStreamRows = 1;
  static constexpr bool kShared = false;
  // Whether sums of inputs are multiplied, too. A bias is subtracted from the sums of products instead.
  static constexpr bool kHasOffset = kFormat == kQ4_1 || kFormat == kQ5_1 || kFormat == kQ4_K || kFormat == kQ5_K;
};

#if defined(NEAP_NEON)
// Four sums and the products of 4 quants each with word number kWord of four. Without SDOT, two products are added in
// 16 bits, which hold the largest ones.
template <int kWord>
NEAP_INLINE int32x4_t add_word(int32x4_t sums, int8x16_t quants, int8x16_t words) {
#if defined(NEAP_DOTPROD)
  return vdotq_laneq_s32(sums, quants, words, kWord);
#else
  const int8x16_t word = (int8x16_t)vdupq_laneq_s32((int32x4_t)words, kWord);
  return vpadalq_s16(sums, vpaddq_s16(vmull_s8(vget_low_s8(quants), vget_low_s8(word)), vmull_high_s8(quants, word)));
#endif
}

// A group's inputs stay in registers, and its sums are taken for one vector of outputs after the other: both with the
// quants fit 32 registers up to 6 rows. SMMLA multiplies 8 inputs, which are two words, of two rows and two outputs.
template <Format kFormat, int kRows, int kPanels>
__attribute__((noinline)) void rounded_tile(const TileArgs& t) {
  typedef RoundedQuants<kFormat> Reader;
  static_assert(kPanels == 1, "the sums of one panel fill the registers");
  constexpr int kGroup = Reader::kGroup, kLines = kGroup / 8;
#if defined(NEAP_I8MM)
  constexpr int kPairs = kRows / 2;
#else
  constexpr int kPairs = 0;
#endif
  const uint8_t* ahead = t.ahead.next;
  int64_t turn = t.ahead.turn;
  const InputGroup* rows[kRows];
  for (int r = 0; r < kRows; ++r) rows[r] = reinterpret_cast<const InputGroup*>(t.a + r * t.a_stride);
  Reader reader;
  reader.begin(t.b, t.depth, t.row_bytes);
  Vec sum[kRows][kPanelVecs] = {};
  for (int64_t k = 0; k < t.depth; k += kGroup) {
    const int64_t group = k / kRoundedInputs, half = k % kRoundedInputs / 16;
    if (k >= turn) {
      ahead += t.ahead.jump;
      turn = kNever;
    }
    for (int line = 0; line < kLines; ++line, ahead += 8 * t.ahead.step) {
      __builtin_prefetch(ahead);
      if (Reader::kLayout.bits == 8) __builtin_prefetch(ahead + 64);
    }
    reader.open(k);
    int8x16_t words[kRows][kLines / 2];
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r)
      for (int i = 0; i < kLines / 2; ++i) words[r][i] = (int8x16_t)vld1q_u32(rows[r][group].words + half * 4 + 4 * i);
#if defined(NEAP_I8MM)
#pragma GCC unroll 12
    for (int r = 0; r + 1 < kRows; r += 2)  // a line's words of both rows
      for (int i = 0; i < kLines / 2; ++i) {
        const int64x2_t first = (int64x2_t)words[r][i], second = (int64x2_t)words[r + 1][i];
        words[r][i] = (int8x16_t)vtrn1q_s64(first, second);
        words[r + 1][i] = (int8x16_t)vtrn2q_s64(first, second);
      }
#endif
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVecs; ++v) {
      Reader column = reader;  // whose state is that of the vector alone
      int32x4_t sums[kRows];   // of a pair: outputs 0 and 1 of both rows, outputs 2 and 3
      for (int32x4_t& zero : sums) zero = vdupq_n_s32(0);
      for_inputs<kLines>([&](auto line) __attribute__((always_inline)) {
        constexpr int kLine = decltype(line)::value, kWord = kLine % 2 * 2;
        column.load(k + kLine * 8);
        const int8x16_t even = (int8x16_t)column.template quads<0>(v), odd = (int8x16_t)column.template quads<1>(v);
#if defined(NEAP_I8MM)
        const int8x16_t first = (int8x16_t)vzip1q_s32((int32x4_t)even, (int32x4_t)odd);
        const int8x16_t second = (int8x16_t)vzip2q_s32((int32x4_t)even, (int32x4_t)odd);
#pragma GCC unroll 12
        for (int r = 0; r < 2 * kPairs; r += 2) {
          const int8x16_t inputs = words[r + kLine % 2][kLine / 2];
          sums[r] = vmmlaq_s32(sums[r], inputs, first);
          sums[r + 1] = vmmlaq_s32(sums[r + 1], inputs, second);
        }
#endif
#pragma GCC unroll 12
        for (int r = 2 * kPairs; r < kRows; ++r)
          sums[r] = add_word<kWord + 1>(add_word<kWord>(sums[r], even, words[r][kLine / 2]), odd, words[r][kLine / 2]);
      });
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        const InputGroup& input = rows[r][group];
        int32x4_t total = sums[r];
        if (r < 2 * kPairs) {
          const int64x2_t first = (int64x2_t)sums[r & ~1], second = (int64x2_t)sums[r | 1];
          total = (int32x4_t)(r % 2 == 0 ? vtrn1q_s64(first, second) : vtrn2q_s64(first, second));
        }
        if constexpr (Reader::kBias != 0)
          total -= vdupq_n_s32(Reader::kBias * (kGroup == 16 ? input.sums[half] : input.sums[0] + input.sums[1]));
        const Vec product = (Vec)vcvtq_f32_s32(total) * splat(input.scale);
        sum[r][v] = fma(product, reader.scale[v], sum[r][v]);
        if constexpr (Reader::kHasOffset) sum[r][v] = fma(splat(input.scaled_sum), reader.offset[v], sum[r][v]);
      }
    }
  }
  store_sums(t.c, t.c_stride, t.accumulate, sum);
}
#else
template <Format kFormat, int kRows, int kPanels>
__attribute__((noinline)) void rounded_tile(const TileArgs& t) {
  typedef RoundedQuants<kFormat> Reader;
  typedef ByteSums<Reader::kQuadBits> Quads;
  constexpr int kColumns = kPanels * kPanelVecs, kGroup = Reader::kGroup, kWords = kGroup / 4, kLine = 8;
  constexpr int32_t kBias = Reader::kBias + Quads::kBias;
  const uint8_t* ahead = t.ahead.next;
  const int64_t ahead_step = kLine * t.ahead.step, ahead_stride = t.ahead.panel_stride;
  int64_t turn = t.ahead.turn;
  const InputGroup* rows[kRows];
  for (int r = 0; r < kRows; ++r) rows[r] = reinterpret_cast<const InputGroup*>(t.a + r * t.a_stride);
  Reader readers[kPanels];
  for (int p = 0; p < kPanels; ++p) readers[p].begin(t.b + p * t.panel_stride, t.depth, t.row_bytes);
  Vec sum[kRows][kColumns] = {};
  for (int64_t k = 0; k < t.depth; k += kGroup) {
    const int64_t group = k / kRoundedInputs, half = k % kRoundedInputs / 16;
    if (k >= turn) {
      ahead += t.ahead.jump;
      turn = kNever;
    }
    Quads quads[kRows][kColumns];
#pragma GCC unroll 24
    for (int p = 0; p < kPanels; ++p) readers[p].open(k);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const InputGroup& input = rows[r][group];
      const int32_t begin = kBias == 0 ? 0 : -kBias * (kGroup == 16 ? input.sums[half] : input.sums[0] + input.sums[1]);
#pragma GCC unroll 24
      for (int c = 0; c < kColumns; ++c) quads[r][c].begin(begin);
    }
    for_inputs<kWords>([&](auto word) __attribute__((always_inline)) {
      constexpr int kWord = decltype(word)::value;
      if constexpr (kWord % 2 == 0) {
#pragma GCC unroll 24
        for (int p = 0; p < kPanels; ++p) {
          readers[p].load(k + kWord / 2 * kLine);
          __builtin_prefetch(ahead + p * ahead_stride);
          if (Reader::kLayout.bits == 8) __builtin_prefetch(ahead + p * ahead_stride + 64);
        }
        ahead += ahead_step;
      }
      UintVec column[kColumns];
#pragma GCC unroll 24
      for (int p = 0; p < kPanels; ++p)
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVecs; ++v)
          column[p * kPanelVecs + v] = Quads::prepared(readers[p].template quads<kWord % 2>(v));
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        const uint32_t inputs = rows[r][group].words[half * 4 + kWord];
#pragma GCC unroll 24
        for (int c = 0; c < kColumns; ++c) quads[r][c].template add<kWord, kWords - 1>(column[c], inputs);
      }
    });
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const Vec scale = splat(rows[r][group].scale), scaled_sum = splat(rows[r][group].scaled_sum);
#pragma GCC unroll 24
      for (int c = 0; c < kColumns; ++c) {
        const Reader& reader = readers[c / kPanelVecs];
        const Vec product = __builtin_convertvector(quads[r][c].total, Vec) * scale;
        sum[r][c] = fma(product, reader.scale[c % kPanelVecs], sum[r][c]);
        if constexpr (Reader::kHasOffset) sum[r][c] = fma(scaled_sum, reader.offset[c % kPanelVecs], sum[r][c]);
      }
    }
  }
  store_sums(t.c, t.c_stride, t.accumulate, sum);
}
#endif

template <Format kFormat, int kRows, int kPanels>
struct TileOf<RoundedQuants<kFormat>, kRows, kPanels> {
  static constexpr TileFn kTile = rounded_tile<kFormat, kRows, kPanels>;
};

}  // namespace neap::NEAP_ISA
