// The usual forward scan of four ranks on Hopper: 128 states, with gate and output projection, without norm, pairs half of
// dstate apart of which angles turn 32 at most. Two warpgroups share a block as in forward/warpgroup.cuh, but a tile's rows are
// all steps of the first rank, then of the next ones, and all products are transposed: y^T = H q^T + x^T M^T. So a lane has all
// ranks of its steps and columns of headdim, and adds them up by itself; all pairs of ranks share the decays between steps; and
// x and H are never in shared memory: they are v times a rank's weights, and the rounded state, in registers. Backward's first
// walk is the same: instead of the output it finds the gradients of the scan's rows, of z, D and projections, and keeps the
// states.
//
//      warpgroup 0, multiplies (mimo_multiply.cuh)     warpgroup 1, rotates (rotate_steps.cuh)
//      -------------------------------------------     -------------------------------------------------
//                                                      chunk 0: q, k -> stage 0; v, z, values
//   A  ------------------------- __syncthreads: chunk 0 is there ----------------------------------------
//      k q^T -> M^T; H q^T                             chunk 1 -> stage 1; asks for rows of chunk 2
//   B  M^T is there (backward: and q has been read, whose place the state before the chunk takes)
//      M x; x^T k
//   C  backward only: the state before the chunk is there, a bulk copy takes it
//      y: D, gate, ranks added up -> memory
//   A  ------------------------- __syncthreads: chunk 1 is there, stage 0 is free -----------------------
//
// A: all 256 threads, 1 + chunks times. B and C: the named barrier of warpgroup 0, once a chunk each.
#pragma once

#include "mamba3/cuda/forward/mimo_multiply.cuh"

namespace mamba {

// Registers of a thread of each warpgroup; two blocks a multiprocessor have 128 a thread. With eight less for rotation
// backward's walk takes 6 % longer.
constexpr int kMamba3RanksTurnRegisters = 96;
constexpr int kMamba3RanksMultiplyRegisters = 256 - kMamba3RanksTurnRegisters;
constexpr int kMamba3RanksThreads = 2 * kMamba3Threads;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// All of a block's chunks, one ahead of the other warpgroup.
template <typename T, bool kBack>
__device__ __forceinline__ void make_mamba3_ranks(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launch,
                                                  const Mamba3Block& block, unsigned char* shared, int thread) {
    using Tiles = Mamba3RanksTiles<kBack>;
    Mamba3StepRotator<T, true> rotator(p, launch, block, shared + Tiles::kTurnerAt, thread);
    const int64_t first = block.first_step(launch.chunks);
    int left = static_cast<int>(block.range.begin + block.range.seqlen - first);
    const T* v = static_cast<const T*>(p.v) + block.range.row * p.v_batch_stride + first * p.v_len_stride +
                 block.head * p.v_head_stride + block.row0;
    const T* z = static_cast<const T*>(p.z) + block.range.row * p.z_batch_stride + first * p.z_len_stride +
                 block.head * p.z_head_stride + block.row0;
    [[maybe_unused]] const T* dout = nullptr;
    if constexpr (kBack) {
        const Mamba3WarpgroupBackward& from = launch.backward;
        dout = static_cast<const T*>(from.dout) + block.range.row * from.dout_batch_stride + first * from.dout_len_stride +
               block.head * from.dout_head_stride + block.row0;
    }
    // A thread of the first warp copies three values of its step: the first ones, or the others.
    constexpr int kHalf = kMamba3RowValues / 2;
    static_assert(2 * kMamba3RankSteps == 32, "a warp's");
    const float* values = mamba3_values(launch.chunks, p.nheads, block.slot, block.head, kMamba3High);
    if (block.chunks > 0) {
        rotator.begin();
    }
    for (int i = 0; i < block.chunks; ++i) {
        const int stage = i % 2;
        rotator.turn_chunk(reinterpret_cast<T*>(shared + stage * 2 * Tiles::kTile), i + 1 < block.chunks, [&] {
            const unsigned own = static_cast<unsigned>(opaque(thread));
            const int step = own / 8, piece = own % 8;
            const bool exists = 8 * piece < block.columns && step < left;
            unsigned char* const to =
                shared + (Tiles::kVAt + stage * Tiles::kSteps) + place_of_rank_piece(step, piece) * static_cast<int>(sizeof(T));
            const T* const v_from = v + (step * static_cast<int>(p.v_len_stride) + 8 * piece);
            const T* const z_from = z + (step * static_cast<int>(p.z_len_stride) + 8 * piece);
            cp_async<16>(to, exists ? v_from : v, exists);
            cp_async<16>(to + (Tiles::kZAt - Tiles::kVAt), exists ? z_from : z, exists);
            if constexpr (kBack) {
                const T* const dout_from = dout + (step * static_cast<int>(launch.backward.dout_len_stride) + 8 * piece);
                cp_async<16>(to + (Tiles::kDoutAt - Tiles::kVAt), exists ? dout_from : dout, exists);
            }
            if (own < 32) {
                const int at = own / kMamba3RankSteps * kHalf * kMamba3RankSteps + own % kMamba3RankSteps;
                float* const own_values = (reinterpret_cast<Mamba3RanksValues*>(shared + Tiles::kValuesAt) + stage)->of[0] + at;
                const float* const from = values + at;
#pragma unroll
                for (int j = 0; j < kHalf; ++j) {
                    cp_async_4(own_values + j * kMamba3RankSteps, from + j * kMamba3RankSteps);
                }
            }
        });
        v += kMamba3RankSteps * p.v_len_stride;
        z += kMamba3RankSteps * p.z_len_stride;
        if constexpr (kBack) {
            dout += kMamba3RankSteps * launch.backward.dout_len_stride;
        }
        values += launch.values_step;
        left -= kMamba3RankSteps;
        if (thread < 32 && thread >= kMamba3RankSteps) {
            static_assert(kMamba3Entering == 4 && kMamba3Leaving == 5, "a thread has them and the scale");
            float* const own = (reinterpret_cast<Mamba3RanksValues*>(shared + Tiles::kValuesAt) + stage)->of[kMamba3Scale] +
                               (thread - kMamba3RankSteps);
            const float scale = own[0], leaving = own[2 * kMamba3RankSteps];
            own[2 * kMamba3RankSteps] = leaving != 0.0f ? leaving * scale : 0.0f;  // a NaN stays there
        }
        fence_proxy_async();
        __syncthreads();  // the chunk's tiles are there, those of the one before are free
    }
}

#endif

// kBack: the states before the chunks and back through the gate, instead of the output.
template <typename T, bool kBack>
__global__ void __launch_bounds__(kMamba3RanksThreads, 2)
    mamba3_ranks_kernel(const MambaMamba3 p, const Mamba3WarpgroupLaunch launch) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using Tiles = Mamba3RanksTiles<kBack>;
    MAMBA_DYNAMIC_SHARED(1024, unsigned char, mamba3_ranks_shared);
    const int thread = threadIdx.x;
    const Mamba3Block block(p, launch);
    float* const weights = reinterpret_cast<float*>(mamba3_ranks_shared + Tiles::kWeightsAt);
    for (int i = thread; i < 4 * kMamba3StateRows; i += kMamba3RanksThreads) {
        const int column = i / 4;
        const int64_t at = (block.head * 4 + i % 4) * p.headdim + block.row0 + column;
        const bool exists = column < block.columns;
        const auto weight = [&](const float* from) { return !exists ? 0.0f : from != nullptr ? from[at] : 1.0f; };
        const float gate = weight(p.mimo_z);
        weights[kMamba3RankV * 4 * kMamba3StateRows + i] = weight(p.mimo_v);
        weights[kMamba3RankZ * 4 * kMamba3StateRows + i] = kBack ? gate : gate * -kLog2e;
        weights[kMamba3RankOut * 4 * kMamba3StateRows + i] = kBack ? weight(p.mimo_out) : gate * weight(p.mimo_out);
    }
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    __syncthreads();
    if (thread < kMamba3Threads) {
        setmaxnreg_inc<kMamba3RanksMultiplyRegisters>();
        multiply_mamba3_ranks<T, kBack>(p, launch, block, mamba3_ranks_shared);
    } else {
        setmaxnreg_dec<kMamba3RanksTurnRegisters>();
        make_mamba3_ranks<T, kBack>(p, launch, block, mamba3_ranks_shared, thread - kMamba3Threads);
    }
#else
    (void)p;
    (void)launch;
    __trap();
#endif
}

template <typename T, bool kBack>
cudaError_t launch_mamba3_ranks(const MambaMamba3& p, Mamba3WarpgroupLaunch launch, int64_t segments) {
    const auto kernel = mamba3_ranks_kernel<T, kBack>;
    constexpr int64_t kShared = Mamba3RanksTiles<kBack>::kBytes;
    const cudaError_t error = allow_shared(kernel, kShared);
    if (error != cudaSuccess) {
        return error;
    }
    launch.segments = segments;
    return launch_programmatic_dependent(kernel, static_cast<unsigned>(launch.blocks(p)), kMamba3RanksThreads,
                                         static_cast<size_t>(kShared), p.run.stream, p, launch);
}

}  // namespace mamba
