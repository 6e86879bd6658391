// The token a row of scores chooses: the largest, or the one at a uniform number's place in the distribution. -1 where
// there is none: see ChoiceArgs.
#pragma once
#include "choices.h"
#include "half_simd.h"

namespace neap::NEAP_ISA {

NEAP_INLINE double weight_of(double value) { return value; }
template <class E>
NEAP_INLINE double weight_of(E value) {
  return (double)to_float(value);
}

// A NaN and an infinity differ from themselves by a NaN.
NEAP_INLINE bool is_finite(double value) { return value - value == 0; }

template <class E>
NEAP_INLINE int64_t first_nan(const E* x, int64_t size) {
  int64_t i = 0;
  while (i < size && weight_of(x[i]) == weight_of(x[i])) ++i;
  return i;
}

// The first of the largest; a NaN counts as larger than all numbers, as in PyTorch.
template <class E>
inline int64_t largest(const E* x, int64_t size) {
  constexpr int64_t kBlock = 16 * kLanes;
  float best = -__builtin_inff();
  int64_t at = 0, from = 0;
  IntVec sound = splat(0.f) == splat(0.f);
  // Block maxima first: which number it was is asked only where a block exceeds all before it.
  for (; from + kBlock <= size; from += kBlock) {
    Vec tops[2] = {load(x + from), load(x + from + kLanes)};
    for (int64_t i = 0; i < kBlock; i += 2 * kLanes)
      for (int side = 0; side < 2; ++side) {
        const Vec value = load(x + from + i + side * kLanes);
        sound = sound & (value == value);
        tops[side] = max(tops[side], value);
      }
    if (!(max_lanes(max(tops[0], tops[1])) > best)) continue;
    for (int64_t i = from; i < from + kBlock; ++i)
      if (to_float(x[i]) > best) {
        best = to_float(x[i]);
        at = i;
      }
  }
  bool whole = true;
  for (int i = 0; i < kLanes; ++i) whole = whole && sound[i];
  for (int64_t i = from; i < size; ++i) {
    const float value = to_float(x[i]);
    whole = whole && value == value;
    if (value > best) {
      best = value;
      at = i;
    }
  }
  return whole ? at : first_nan(x, size);
}

inline int64_t largest(const double* x, int64_t size) {
  int64_t at = first_nan(x, size);
  if (at < size) return at;
  at = 0;
  for (int64_t i = 0; i < size; ++i)
    if (x[i] > x[at]) at = i;
  return at;
}

// The first token at which the running total of weight(i) exceeds `point` of the whole, summed in order as torch.cumsum
// does; -1 where nothing has any mass, or the total is not finite. The total at the start of every piece is noted, so
// that one piece is summed again, not all.
template <class F>
inline int64_t at_point(int64_t size, double point, const F& weight) {
  constexpr int64_t kPieces = 512;
  const int64_t piece = ceil_div(size, kPieces);
  double starts[kPieces], total = 0;
  int64_t last = -1, pieces = 0;
  for (int64_t begin = 0; begin < size; begin += piece) {
    starts[pieces++] = total;
    for (int64_t i = begin; i < min64(size, begin + piece); ++i) {
      const double value = weight(i);
      total += value;
      last = value > 0 ? i : last;
    }
  }
  if (!is_finite(total)) return -1;
  const double wanted = point * total;
  while (pieces > 0 && starts[pieces - 1] > wanted) --pieces;
  if (pieces == 0) return last;
  double sum = starts[pieces - 1];
  for (int64_t i = (pieces - 1) * piece; i < size; ++i) {
    sum += weight(i);
    if (sum > wanted) return i;
  }
  return last;  // rounding put the point past the last that has any mass
}

template <class E>
inline void choose_rows(const ChoiceArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const E* scores = (const E*)args.scores + row * args.stride;
    int64_t& choice = args.choices[row];
    if (args.uniforms) {
      choice = at_point(args.vocabulary, args.uniforms[row], [=](int64_t i) { return weight_of(scores[i]); });
    } else {
      choice = largest(scores, args.vocabulary);
      if (!is_finite(weight_of(scores[choice]))) choice = -1;
    }
  }
}

inline void choose(const ChoiceArgs& args, int64_t begin, int64_t end) {
  switch (args.type) {
    case kWeights32: return choose_rows<float>(args, begin, end);
    case kWeights16: return choose_rows<Half>(args, begin, end);
    case kWeightsB16: return choose_rows<Bfloat>(args, begin, end);
    case kWeights64: return choose_rows<double>(args, begin, end);
  }
}

}  // namespace neap::NEAP_ISA
