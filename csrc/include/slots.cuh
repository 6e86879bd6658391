// A step of the requests that live on a GPU: see draft/slots.h.
#pragma once
#include "../draft/slots.h"
#include "device.cuh"

namespace neap::gpu {

using draft::kMostRows;

// The threads of a block.
struct BlockTeam {
  int rank, size;
  int* scratch;  // [warps]
  bool* flags;

  __device__ void wait() const { __syncthreads(); }
  __device__ int sum(int number) const { return block_sum(number, scratch); }
  __device__ int most(int number) const {
    for (int step = kWarp / 2; step > 0; step /= 2) {
      const int other = __shfl_xor_sync(kAll, number, step);
      number = other > number ? other : number;
    }
    if (rank % kWarp == 0) scratch[rank / kWarp] = number;
    __syncthreads();
    for (int warp = 0; warp < size / kWarp; ++warp) number = scratch[warp] > number ? scratch[warp] : number;
    __syncthreads();
    return number;
  }
};

// One thread per row, in one block.
__global__ void __launch_bounds__(kMostRows, 1) begin_rows_kernel(draft::SlotArgs args, int drafter) {
  draft::begin_row(args, (int)threadIdx.x, drafter);
}

// One block per row.
__global__ void __launch_bounds__(kThreads, 1)
    draft_place_kernel(draft::SlotArgs args, draft::Proposers proposers, int place) {
  NEAP_SHARED(int, scratch, kWarps);
  NEAP_SHARED(bool, flags, kThreads);
  draft_place(BlockTeam{(int)threadIdx.x, kThreads, scratch, flags}, args, proposers, (int)blockIdx.x, place);
}

// One block.
__global__ void __launch_bounds__(kMostRows, 1) plan_pass_kernel(draft::SlotArgs args) {
  NEAP_SHARED(int, scratch, kMostRows / kWarp);
  NEAP_SHARED(int16_t, above, kMostRows);
  NEAP_SHARED(int16_t, equal, kMostRows);
  plan_pass(BlockTeam{(int)threadIdx.x, kMostRows, scratch, nullptr}, args, above, equal);
}

// One thread per row, in one block.
__global__ void __launch_bounds__(kMostRows, 1) accept_rows_kernel(draft::SlotArgs args) {
  draft::accept_row(args, (int)threadIdx.x);
}

}  // namespace neap::gpu
