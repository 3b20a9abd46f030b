// The forward scan on Hopper, for 16-bit dtypes and up to 128 states: a block walks the chunks of 64 rows of one head's state,
// as in forward/general.cuh, but with two warpgroups. chunks.cuh has the formulas. Backward walks the same way (Mamba3Pass).
//
//      warpgroup 0 (warpgroup_multiply.cuh)          warpgroup 1, rotates (warpgroup_tiles.cuh)
//      ----------------------------------------      --------------------------------------------------------
//                                                    chunk 0: q, k, x, values -> stage[0]
//   A  ------------------------- __syncthreads: chunk 0 is there ----------------------------------------
//      chunk 0: q k^T -> M; H q^T; M x; x^T k        chunk 1 -> stage[1]; asks for rows of chunk 2
//      y: D, norm, gate -> memory
//   B  the state after chunk 0 -> shared memory
//   A  ------------------------- __syncthreads: chunk 1 is there, stage[0] is free ----------------------
//      chunk 1 ...                                   chunk 2 -> stage[0] ...
//
// A: all 256 threads, once before the first chunk and once a chunk: both warpgroups pass it 1 + chunks times, warpgroup 0 at a
// chunk's start, warpgroup 1 at its end. Of a walk from the end of one rank warpgroup 0 makes x, which is dy.
// B: named barrier of warpgroup 0 alone, once a chunk: its warps have read the state before the chunk, whose place the next one
// takes. It is skipped where no state is read (a segment's end).
#pragma once

#include "mamba3/cuda/forward/warpgroup_multiply.cuh"

namespace mamba {

// Registers of a thread of each warpgroup; two blocks a multiprocessor have 128 a thread. With fewer for products of four ranks
// ptxas waits behind each (C7512), of one rank with more the warpgroup that rotates spills.
template <int kRanks>
constexpr int kMamba3RotateRegisters = kRanks == 1 ? 88 : 96;
template <int kRanks>
constexpr int kMamba3MultiplyRegisters = 256 - kMamba3RotateRegisters<kRanks>;
constexpr int kMamba3WarpgroupThreads = 2 * kMamba3Threads;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Before the first chunk, all threads. What nothing is written to stays zero: columns beyond dstate.
template <typename T, int kStates, int kRanks, bool kRows>
__device__ __forceinline__ void prepare_walk(const MambaMamba3& p, const Mamba3Block& block,
                                             Mamba3WalkShared<T, kStates, kRanks, kRows>& shared) {
    const int thread = static_cast<int>(threadIdx.x);
    constexpr int kZeros = static_cast<int>((sizeof(shared.stage) + sizeof(shared.x)) / 16);
    for (int i = thread; i < kZeros; i += kMamba3WarpgroupThreads) {
        reinterpret_cast<uint4*>(&shared)[i] = make_uint4(0, 0, 0, 0);
    }
    if constexpr (kRanks == 1) {
        for (int i = thread; i < 2 * kStates; i += kMamba3WarpgroupThreads) {
            const float* const bias = i < kStates ? p.q_bias : p.k_bias;
            shared.rotate.biases[i] = i % kStates < p.dstate ? bias[block.head * p.dstate + i % kStates] : 0.0f;
        }
    } else {
        for (int i = thread; i < kRanks * kMamba3StateRows; i += kMamba3WarpgroupThreads) {
            const int column = i % kMamba3StateRows, rank = i / kMamba3StateRows;
            float weight = column < block.columns ? 1.0f : 0.0f;
            if (column < block.columns && p.mimo_v != nullptr) {
                weight = p.mimo_v[(block.head * kRanks + rank) * p.headdim + block.row0 + column];
            }
            shared.rotate.mimo_v[rank * kMamba3WeightPitch + place_of_mimo_v(column)] = weight;
        }
    }
    if constexpr (kRows) {
        if (thread < kMamba3StateRows && p.norm_weight != nullptr) {
            shared.rows.norm_weight[thread] =
                thread < block.columns ? p.norm_weight[block.head * p.headdim + block.row0 + thread] : 0.0f;
        }
    }
}

#endif

// kRanks: 1, neighbouring pairs, or 4, pairs half of dstate apart, whose rows forward/mimo.cuh finds.
template <typename T, int kStates, int kRanks, Mamba3Pass kPass>
__global__ void __launch_bounds__(kMamba3WarpgroupThreads, 2)
    mamba3_warpgroup_kernel(const MambaMamba3 p, const Mamba3WarpgroupLaunch launch) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using Shared = Mamba3WalkShared<T, kStates, kRanks, kPass != kMamba3States>;
    MAMBA_DYNAMIC_SHARED(1024, unsigned char, mamba3_walk_memory);
    Shared& shared = *reinterpret_cast<Shared*>(mamba3_walk_memory);
    const int thread = static_cast<int>(threadIdx.x);
    const Mamba3Block block(p, launch);
    prepare_walk(p, block, shared);
    fence_proxy_async();
    if (launch.beside_last) {
        __threadfence();  // what was written before the kernel ahead
    } else {
        griddepcontrol_wait();
    }
    griddepcontrol_launch_dependents();
    __syncthreads();
    if (thread < kMamba3Threads) {
        setmaxnreg_inc<kMamba3MultiplyRegisters<kRanks>>();
        if constexpr (kPass == kMamba3States) {
            multiply_mamba3_states<T, kStates, kRanks>(p, launch, block, shared);
        } else {
            multiply_mamba3_rows<T, kStates>(p, launch, block, shared);
        }
    } else {
        setmaxnreg_dec<kMamba3RotateRegisters<kRanks>>();
        make_mamba3_tiles(p, launch, block, shared, thread - kMamba3Threads);
    }
    griddepcontrol_wait();  // beside the last one: the next kernel waits for both
#else
    (void)p;
    (void)launch;
    __trap();
#endif
}

template <typename T, int kStates, int kRanks, Mamba3Pass kPass>
cudaError_t launch_mamba3_warpgroups(const MambaMamba3& p, Mamba3WarpgroupLaunch launch, int64_t segments) {
    const auto kernel = mamba3_warpgroup_kernel<T, kStates, kRanks, kPass>;
    constexpr int64_t kShared = sizeof(Mamba3WalkShared < T, kStates, kRanks, kPass != kMamba3States >);
    static_assert(kShared <= 113 * 1024, "two blocks a multiprocessor");
    const cudaError_t error = allow_shared(kernel, kShared);
    if (error != cudaSuccess) {
        return error;
    }
    launch.segments = segments;
    return launch_programmatic_dependent(kernel, static_cast<unsigned>(launch.blocks(p)), kMamba3WarpgroupThreads,
                                         static_cast<size_t>(kShared), p.run.stream, p, launch);
}

}  // namespace mamba
