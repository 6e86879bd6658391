// Paged attention: see PagedArgs and PagedPlan. Two launches: the first writes keys and values, the second reads them.
//
// A thread block processes one token, one key head and a tile of its query heads, so that a key is read once for all of
// these heads. Its warps process tiles of 32 keys independently. The warps' results are joined at the end of each
// piece, and the pieces' results after that.
#pragma once
#include "device.cuh"
#include "paged.h"

namespace neap::gpu {

constexpr int kKeyLanes = 4;                    // lanes that share the dot products of a key
constexpr int kKeysAtOnce = kWarp / kKeyLanes;  // keys that a warp processes at once; each lane processes two such sets
static_assert(kPieceKeys == kThreads && kPieces == kWarp, "a tile of keys per warp, a piece per lane");

// Index of the slot of a position in a pool of slots [block, kv head, slot], or -1 if the pool has no such block.
__device__ __forceinline__ int64_t slot_of(const PagedArgs& args, int64_t table, int position, int64_t head) {
  const int tokens = (int)args.block_tokens;
  const int64_t block = args.block_tables[table * args.table_blocks + position / tokens];
  return block >= 0 && block < args.num_blocks ? (block * args.kv_heads + head) * tokens + position % tokens : -1;
}

// Whether there is a block table of this index, with an entry for this position.
__device__ __forceinline__ bool has_slot(const PagedArgs& args, int64_t table, int64_t position) {
  return table >= 0 && table < args.num_tables && position >= 0 && position < args.table_blocks * args.block_tokens;
}

// Writes the new keys and values to their slots, and clears the tickets. One thread block per token and pool
// (blockIdx.y: keys, values). `Unit`: the type that is copied; its size must divide all sizes and addresses.
template <class Unit>
__global__ void __launch_bounds__(kThreads) paged_write_kernel(PagedArgs args, int64_t num_tickets) {
  const int64_t token = blockIdx.x, table = args.table_indices[token], position = args.positions[token];
  if (blockIdx.y == 0)
    for (int64_t i = token * kThreads + threadIdx.x; i < num_tickets; i += (int64_t)gridDim.x * kThreads)
      args.tickets[i] = 0;
  if (!has_slot(args, table, position)) return;
  const bool is_key = blockIdx.y == 0;
  const int64_t bytes = element_bytes(args.dtype), width = (is_key ? args.width : args.value_width) * bytes,
                units = width / (int64_t)sizeof(Unit);
  const char* from =
      static_cast<const char*>(is_key ? args.k : args.v) + token * (is_key ? args.k_token : args.v_token) * bytes;
  char* to = static_cast<char*>(is_key ? args.keys : args.values);
  const int64_t first = slot_of(args, table, (int)position, 0), step = (is_key ? args.k_head : args.v_head) * bytes;
  if (first < 0) return;
  for (int64_t i = threadIdx.x; i < args.kv_heads * units; i += kThreads) {
    const int64_t head = i / units, unit = i % units;
    reinterpret_cast<Unit*>(to + (first + head * args.block_tokens) * width)[unit] =
        reinterpret_cast<const Unit*>(from + head * step)[unit];
  }
}

// exp(value - largest), and 1 if both are equal, also if both are -infinity.
__device__ __forceinline__ float share_of(float value, float largest) {
  return value == largest ? 1.f : expf(value - largest);
}

// before * keep + part * add: joins a piece to the ones before it. The rounding is explicit because the compiler may
// fuse a * b + c * d in either order, and all uses must give the same bits.
__device__ __forceinline__ float joined(float before, float keep, float part, float add) {
  return fmaf(part, add, __fmul_rn(before, keep));
}

// Starts to fetch `bytes` of memory into the L2 cache, ahead of their use.
__device__ __forceinline__ void prefetch(const void* p, int64_t bytes) {
#if !defined(NEAP_EMULATED)
  for (int64_t at = 0; at < bytes; at += 128) asm("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(p) + at));
#endif
}

// The running softmax of a warp over its keys so far. `values`: weighted sums of the lane's columns over the keys that
// the lane has read. `sums`: the lane's part of the sum of weights.
template <int kHeads, int kSize>
struct WarpState {
  float largest[kHeads], sums[kHeads], values[kHeads][kSize];
};

// A lane's view of the warp's current tile of 32 keys. `keys` and `values` point into the pools.
template <class E>
struct KeyTile {
  const E *keys, *values;    // `values` begins at the thread block's first column
  int64_t slot;              // slot of the lane's key, or -1 if there is none
  bool seen;                 // whether the lane has a key; if so, a slot of -1 means an invalid block
  int chunks, value_chunks;  // chunks of kSize per key, and of the thread block's value columns
  int value_lanes;           // value_chunks, rounded up to a power of two
};

// The dot products of a tile of keys with the queries: `weights` [kHeads, 32].
template <class E, int kHeads, int kSize>
__device__ __forceinline__ void add_scores(const PagedArgs& args, const KeyTile<E>& tile, const float* query,
                                           float* weights) {
  const int lane = threadIdx.x % kWarp, group = lane / kKeyLanes, part = lane % kKeyLanes;
#pragma unroll 1
  for (int pass = 0; pass < kWarp; pass += 2 * kKeysAtOnce) {
    float dots[2][kHeads] = {};
    const int64_t slots[2] = {__shfl_sync(kAll, tile.slot, pass + group),
                              __shfl_sync(kAll, tile.slot, pass + kKeysAtOnce + group)};
#pragma unroll 2
    for (int chunk = part; chunk < tile.chunks; chunk += kKeyLanes) {
      float key[2][kSize] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (slots[i] >= 0) load_chunk<kSize>(tile.keys + slots[i] * args.width + chunk * kSize, key[i]);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float* head_query = query + h * (int)args.width + chunk * kSize;
#pragma unroll
        for (int e = 0; e < kSize; e += 4) {
          float q[4];
          if constexpr (kSize == 1) {
            q[0] = head_query[0];
          } else {
            const Four four = load_four(head_query + e);
            for (int n = 0; n < 4; ++n) q[n] = four.v[n];
          }
#pragma unroll
          for (int n = 0; n < (kSize == 1 ? 1 : 4); ++n) {
            dots[0][h] += q[n] * key[0][e + n];
            dots[1][h] += q[n] * key[1][e + n];
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        for (int step = 1; step < kKeyLanes; step *= 2) dots[i][h] += __shfl_xor_sync(kAll, dots[i][h], step);
        if (h % kKeyLanes == part) weights[h * kWarp + pass + i * kKeysAtOnce + group] = dots[i][h];
      }
  }
}

// One step of the online softmax: turns `weights` from dot products into weights relative to the largest score so far.
template <class E, int kHeads, int kSize>
__device__ __forceinline__ void weigh(const PagedArgs& args, const KeyTile<E>& tile, float* weights,
                                      WarpState<kHeads, kSize>& state) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    float score = weights[h * kWarp + lane] * args.scaling;
    if (args.softcap > 0.f) score = args.softcap * tanhf(score / args.softcap);
    if (!tile.seen) score = -INFINITY;
    else if (tile.slot < 0) score = NAN;
    const float largest = fmaxf(state.largest[h], warp_max(score)), keep = share_of(state.largest[h], largest);
    const float weight = score == -INFINITY ? 0.f : expf(score - largest);
    state.largest[h] = largest;
    state.sums[h] = state.sums[h] * keep + weight;
#pragma unroll
    for (int e = 0; e < kSize; ++e) state.values[h][e] *= keep;
    weights[h * kWarp + lane] = weight;
  }
}

// Adds the weighted values of a tile of keys.
template <class E, int kHeads, int kSize>
__device__ __forceinline__ void add_values(const PagedArgs& args, const KeyTile<E>& tile, const float* weights,
                                           WarpState<kHeads, kSize>& state) {
  const int lane = threadIdx.x % kWarp, column = lane % tile.value_lanes, keys = kWarp / tile.value_lanes;
#pragma unroll 4
  for (int key = lane / tile.value_lanes; key < kWarp; key += keys) {
    const int64_t slot = __shfl_sync(kAll, tile.slot, key);
    if (slot < 0 || column >= tile.value_chunks) continue;
    float value[kSize];
    load_chunk<kSize>(tile.values + slot * args.value_width + column * kSize, value);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float weight = weights[h * kWarp + key];
#pragma unroll
      for (int e = 0; e < kSize; ++e) state.values[h][e] += weight * value[e];
    }
  }
}

// Attention of a warp over its tiles of the keys at positions [begin, end) of a sequence.
template <class E, int kHeads, int kSize>
__device__ __forceinline__ void attend(const PagedArgs& args, KeyTile<E> tile, int64_t table, int64_t head, int begin,
                                       int end, const float* query, float* weights, WarpState<kHeads, kSize>& state) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    state.largest[h] = -INFINITY;
    state.sums[h] = 0.f;
    for (int e = 0; e < kSize; ++e) state.values[h][e] = 0.f;
  }
  const auto slot_at = [&](int position) {
    return position < end ? slot_of(args, table, position, head) : (int64_t)-1;
  };
  // Each lane fetches its key's row and its value's, because the reads below wait for one another several times.
  const auto fetch = [&](int64_t slot) {
    if (slot < 0) return;
    prefetch(tile.keys + slot * args.width, args.width * (int64_t)sizeof(E));
    prefetch(tile.values + slot * args.value_width, tile.value_chunks * kSize * (int64_t)sizeof(E));
  };
  int first = begin + (int)(threadIdx.x / kWarp) * kWarp;
  int64_t next = slot_at(first + lane);
  fetch(next);
#pragma unroll 1
  for (; first < end; first += kThreads) {
    tile.slot = next;
    tile.seen = first + lane < end;
    next = slot_at(first + kThreads + lane);  // reads the next tile's block numbers early, to hide the latency
    add_scores<E, kHeads, kSize>(args, tile, query, weights);
    fetch(next);
    __syncwarp();
    weigh(args, tile, weights, state);
    __syncwarp();
    add_values(args, tile, weights, state);
    __syncwarp();
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    state.sums[h] = warp_sum(state.sums[h]);
    for (int step = tile.value_lanes; step < kWarp; step *= 2)
#pragma unroll
      for (int e = 0; e < kSize; ++e) state.values[h][e] += __shfl_xor_sync(kAll, state.values[h][e], step);
  }
}

// Joins the results of the thread block's warps in their order into `part` [kHeads, 32 * kSize], and `largest` and
// `sums` [kHeads]. All threads of the thread block must call it.
template <int kHeads, int kSize>
__device__ __forceinline__ void join_warps(const WarpState<kHeads, kSize>& state, int value_lanes, float* warp_largest,
                                           float* warp_sums, float* part, float* largest, float* sums) {
  constexpr int kColumns = kWarp * kSize;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (lane == 0)
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      warp_largest[warp * kHeads + h] = state.largest[h];
      warp_sums[warp * kHeads + h] = state.sums[h];
    }
  __syncthreads();
  if (threadIdx.x < kHeads) {
    float most = -INFINITY, sum = 0.f;
    for (int w = 0; w < kWarps; ++w) most = fmaxf(most, warp_largest[w * kHeads + threadIdx.x]);
    for (int w = 0; w < kWarps; ++w)
      sum += warp_sums[w * kHeads + threadIdx.x] * share_of(warp_largest[w * kHeads + threadIdx.x], most);
    largest[threadIdx.x] = most;
    sums[threadIdx.x] = sum;
  }
  __syncthreads();
  for (int turn = 0; turn < kWarps; ++turn) {
    if (warp == turn && lane < value_lanes)
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float share = share_of(state.largest[h], largest[h]);
#pragma unroll
        for (int e = 0; e < kSize; ++e) {
          float& at = part[h * kColumns + lane * kSize + e];
          at = turn ? fmaf(state.values[h][e], share, at) : state.values[h][e] * share;
        }
      }
    __syncthreads();
  }
}

// One thread block per token (x), tile of its output (y) and share of its pieces (z): see PagedPlan.
template <class E, int kHeads, int kSize>
__global__ void __launch_bounds__(kThreads, 1) paged_attention_kernel(PagedArgs args) {
  constexpr int kColumns = kWarp * kSize, kItems = kHeads * kColumns;
  NEAP_SHARED(Sixteen, query_memory, kQueryFloats / 4);
  NEAP_SHARED(float, weights, kWarps * kHeads * kWarp);
  NEAP_SHARED(float, part, kItems);
  NEAP_SHARED(float, total, kItems);
  NEAP_SHARED(float, warp_largest, kWarps* kHeads);
  NEAP_SHARED(float, warp_sums, kWarps* kHeads);
  NEAP_SHARED(float, largest, kHeads);
  NEAP_SHARED(float, sums, kHeads);
  NEAP_SHARED(float, all_sums, kHeads* kWarp);
  NEAP_SHARED(float, keeps, kHeads* kWarp);
  NEAP_SHARED(float, adds, kHeads* kWarp);
  NEAP_SHARED(unsigned, arrived, 1);
  float* query = reinterpret_cast<float*>(query_memory);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, group = (int)(args.heads / args.kv_heads),
            width = (int)args.width;
  const int column_tiles = ((int)args.value_width + kColumns - 1) / kColumns,
            head_tiles = (group + kHeads - 1) / kHeads;
  const int column = (int)blockIdx.y % column_tiles * kColumns, columns = min(kColumns, (int)args.value_width - column);
  const int first_head = (int)blockIdx.y / column_tiles % head_tiles * kHeads, heads = min(kHeads, group - first_head);
  const int64_t kv_head = (int)blockIdx.y / column_tiles / head_tiles, token = blockIdx.x,
                table = args.table_indices[token], position = args.positions[token];
  const int64_t first_row = token * args.heads + kv_head * group + first_head;  // of the output
  E* out = static_cast<E*>(args.out) + first_row * args.value_width + column;
  if (!has_slot(args, table, position)) {
    for (int i = threadIdx.x; blockIdx.z == 0 && i < heads * columns; i += kThreads)
      out[i / columns * args.value_width + i % columns] = from_float<E>(position < 0 ? 0.f : NAN);
    return;
  }
  const int begin = (int)first_seen(args, position), count = (int)position - begin + 1;
  const int piece_keys =
      ((count + (int)kPieces - 1) / (int)kPieces + (int)kPieceKeys - 1) / (int)kPieceKeys * (int)kPieceKeys;
  const int pieces = (count + piece_keys - 1) / piece_keys, shares = min((int)gridDim.z, pieces);
  if ((int)blockIdx.z >= shares) return;

  const E* q = static_cast<const E*>(args.q) + token * args.q_token + (kv_head * group + first_head) * args.q_head;
  for (int i = threadIdx.x; i < kHeads * width; i += kThreads)
    query[i] = i / width < heads ? to_float(q[i / width * args.q_head + i % width]) : 0.f;
  for (int i = threadIdx.x; i < kItems; i += kThreads) total[i] = 0.f;
  KeyTile<E> tile{};
  tile.keys = static_cast<const E*>(args.keys);
  tile.values = static_cast<const E*>(args.values) + column;
  tile.chunks = width / kSize;
  tile.value_chunks = columns / kSize;
  tile.value_lanes = 1;
  while (tile.value_lanes < tile.value_chunks) tile.value_lanes *= 2;
  __syncthreads();

  // Partial results of this token and tile: values [piece, head, columns], then marks [piece, head, 2]: the largest
  // score and the sum. The last tile may have fewer columns than the others, but takes as much room.
  float* partials =
      args.partials + (token * gridDim.y + blockIdx.y) * kPieces * kHeads * (min(kColumns, (int)args.value_width) + 2);
  float* marks = partials + kPieces * kHeads * columns;
  float running = -INFINITY, sum = 0.f;  // thread h < kHeads: largest score and sum of head h so far
  for (int piece = blockIdx.z; piece < pieces; piece += shares) {
    WarpState<kHeads, kSize> state;
    const int from = begin + piece * piece_keys;
    attend<E, kHeads, kSize>(args, tile, table, kv_head, from, min(from + piece_keys, begin + count), query,
                             weights + warp * kHeads * kWarp, state);
    join_warps(state, tile.value_lanes, warp_largest, warp_sums, part, largest, sums);
    if (shares > 1) {
      for (int i = threadIdx.x; i < kHeads * columns; i += kThreads)
        publish(partials + piece * kHeads * columns + i, part[i / columns * kColumns + i % columns]);
      if (threadIdx.x < kHeads) {
        publish(marks + (piece * kHeads + threadIdx.x) * 2, largest[threadIdx.x]);
        publish(marks + (piece * kHeads + threadIdx.x) * 2 + 1, sums[threadIdx.x]);
      }
    } else {
      if (threadIdx.x < kHeads) {
        const float most = fmaxf(running, largest[threadIdx.x]);
        keeps[threadIdx.x] = share_of(running, most);
        adds[threadIdx.x] = share_of(largest[threadIdx.x], most);
        sum = joined(sum, keeps[threadIdx.x], sums[threadIdx.x], adds[threadIdx.x]);
        running = most;
        all_sums[threadIdx.x] = sum;
      }
      __syncthreads();
      for (int i = threadIdx.x; i < kItems; i += kThreads)
        total[i] = joined(total[i], keeps[i / kColumns], part[i], adds[i / kColumns]);
    }
    __syncthreads();
  }
  if (shares > 1) {
    if (!is_last_block(args.tickets + token * gridDim.y + blockIdx.y, shares, arrived)) return;
    // One warp per head and one lane per piece: a prefix maximum gives each piece the running maximum of the loop
    // above.
    for (int h = warp; h < kHeads; h += kWarps) {
      const float piece_largest = lane < pieces ? __ldcg(marks + (lane * kHeads + h) * 2) : -INFINITY;
      float most = piece_largest;
#pragma unroll
      for (int step = 1; step < kWarp; step *= 2) {
        const float earlier = __shfl_up_sync(kAll, most, step);
        if (lane >= step) most = fmaxf(most, earlier);
      }
      const float left = __shfl_up_sync(kAll, most, 1), before = lane ? left : -INFINITY;
      keeps[h * kWarp + lane] = share_of(before, most);
      adds[h * kWarp + lane] = share_of(piece_largest, most);
      all_sums[h * kWarp + lane] = lane < pieces ? __ldcg(marks + (lane * kHeads + h) * 2 + 1) : 0.f;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < heads * columns; i += kThreads) {
      const int h = i / columns;
      float value = 0.f, weight = 0.f;
#pragma unroll 4
      for (int piece = 0; piece < pieces; ++piece) {
        const float keep = keeps[h * kWarp + piece], add = adds[h * kWarp + piece];
        value = joined(value, keep, __ldcg(partials + piece * kHeads * columns + i), add);
        weight = joined(weight, keep, all_sums[h * kWarp + piece], add);
      }
      out[h * args.value_width + i % columns] = from_float<E>(value / weight);
    }
    return;
  }
  for (int i = threadIdx.x; i < heads * columns; i += kThreads) {
    const int h = i / columns;
    out[h * args.value_width + i % columns] = from_float<E>(total[h * kColumns + i % columns] / all_sums[h]);
  }
}

}  // namespace neap::gpu
