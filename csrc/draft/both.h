// What drafting computes on a CPU and on a GPU: functions that take no memory and call no library but math.h.
#pragma once
#include <math.h>
#include <stdint.h>

#if defined(__CUDACC__)
#define NEAP_BOTH __host__ __device__
#else
#define NEAP_BOTH
#endif

namespace neap::draft {

NEAP_BOTH inline double limited(double value, double least, double most) {
  return value < least ? least : value > most ? most : value;
}
template <class T>
NEAP_BOTH inline T least_of(T a, T b) {
  return b < a ? b : a;
}

inline constexpr uint64_t kMultiplier = 0x9E3779B97F4A7C15, kMixer = 0xBF58476D1CE4E5B9;

// The state of a context's hash after one more token, which stands before those that it has.
NEAP_BOTH inline uint64_t extend_hash(uint64_t state, int32_t token) {
  state = (state + (uint64_t)token + 1) * kMultiplier;
  return (state ^ (state >> 29)) * kMixer;
}

}  // namespace neap::draft
