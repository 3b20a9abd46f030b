// The last kernel of the backward scan: adds up what its blocks left in the workspace, in a fixed order. It knows no dtype of
// x.
#pragma once

#include "ssd/cuda/chunk_tile.cuh"
#include "ssd/launch.h"

namespace mamba {
namespace {

constexpr int kFinishThreads = 256;
constexpr int kFinishRows = kFinishThreads / 32;  // of dB and dC, a warp each
constexpr int kFinishTile = 32;                   // steps and heads of ddt, which a block transposes

// Sum over a block; every thread must come here.
__device__ __forceinline__ float add_over_block(float value, float* shared) {
    for (int distance = 16; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        shared[threadIdx.x / 32] = value;
    }
    __syncthreads();
    float sum = 0.0f;
    for (int i = 0; i < kFinishThreads / 32; ++i) {
        sum += shared[i];
    }
    return sum;
}

// dD of a head, of which launch.dD has a row a chunk.
__device__ __forceinline__ void finish_dD(const MambaSsdBackward& q, const BackwardLaunch& launch, int64_t head,
                                          float* shared) {
    const MambaSsd& p = q.forward;
    const int64_t headdim = p.headdim;  // at most kFinishThreads
    const int64_t together = kFinishThreads / headdim;
    const int64_t column = threadIdx.x % headdim;
    const int64_t first = threadIdx.x / headdim;
    float sum = 0.0f;
    if (first < together) {
#pragma unroll 16
        for (int64_t i = first; i < p.batch * launch.chunks; i += together) {
            sum += launch.dD[(i * p.nheads + head) * headdim + column];
        }
    }
    if (p.D_dim_stride == 0) {
        sum = add_over_block(sum, shared);
        if (threadIdx.x == 0) {
            q.dD[head] = sum;
        }
        return;
    }
    __syncthreads();
    shared[threadIdx.x] = sum;
    __syncthreads();
    if (first == 0) {
        for (int64_t i = 1; i < together; ++i) {
            sum += shared[i * headdim + column];
        }
        q.dD[head * headdim + column] = sum;
    }
}

// dA, ddt_bias and dD of a head.
__device__ __forceinline__ void finish_head(const MambaSsdBackward& q, const BackwardLaunch& launch, int64_t head,
                                            float* shared) {
    const MambaSsd& p = q.forward;
    const int64_t parts = launch.parts * p.batch * launch.chunks;
    float dA = 0.0f;
    float ddt_bias = 0.0f;
    for (int64_t i = threadIdx.x; i < parts; i += kFinishThreads) {
        dA += launch.dA[i * p.nheads + head];
        ddt_bias += launch.ddt_bias[i * p.nheads + head];
    }
    dA = add_over_block(dA, shared);
    ddt_bias = add_over_block(ddt_bias, shared);
    if (threadIdx.x == 0) {
        q.dA[head] = p.A_is_log != 0 ? dA * head_A(p, head) : dA;  // -exp is its own derivative
        if (q.ddt_bias != nullptr) {
            q.ddt_bias[head] = ddt_bias;
        }
    }
    if (launch.dD != nullptr) {
        finish_dD(q, launch, head, shared);
    }
}

// A row of dB and dC by a warp.
__device__ __forceinline__ void finish_row(const MambaSsdBackward& q, const BackwardLaunch& launch, int64_t row, int64_t rows,
                                           int lane) {
    const MambaSsd& p = q.forward;
    const int64_t group = row % p.ngroups;
    const int64_t step = row / p.ngroups % p.seqlen;
    const int64_t batch = row / p.ngroups / p.seqlen;
    const int64_t dB = batch * q.dB_batch_stride + step * q.dB_len_stride + group * q.dB_group_stride;
    const int64_t dC = batch * q.dC_batch_stride + step * q.dC_len_stride + group * q.dC_group_stride;
    const int dstate = static_cast<int>(p.dstate);
#pragma unroll 4
    for (int n = lane; n < dstate; n += 32) {
        float B_sum = 0.0f;
        float C_sum = 0.0f;
        for (int64_t split = 0; split < launch.splits; ++split) {
            const int64_t at = (split * rows + row) * dstate + n;
            B_sum += launch.dB[at];
            C_sum += launch.dC[at];
        }
        store_from_float(q.dB, dB + n, p.dtype, B_sum);
        store_from_float(q.dC, dC + n, p.dtype, C_sum);
    }
}

// ddt of a tile of steps x heads, transposed on the way.
__device__ __forceinline__ void finish_steps(const MambaSsdBackward& q, const BackwardLaunch& launch, int64_t block,
                                             float (&tile)[kFinishTile][kFinishTile + 1], int warp, int lane) {
    const MambaSsd& p = q.forward;
    const int64_t step_tiles = ceil_div(p.seqlen, kFinishTile);
    const int64_t head_tiles = ceil_div(p.nheads, kFinishTile);
    const int64_t first_step = block % step_tiles * kFinishTile;
    const int64_t first_head = block / step_tiles % head_tiles * kFinishTile;
    const int64_t batch = block / step_tiles / head_tiles;
    for (int i = warp; i < kFinishTile; i += kFinishThreads / 32) {
        const int64_t head = first_head + i;
        const int64_t step = first_step + lane;
        float sum = 0.0f;
        if (head < p.nheads && step < p.seqlen) {
            for (int64_t part = 0; part < launch.parts; ++part) {
                sum += launch.ddt[((part * p.batch + batch) * p.nheads + head) * p.seqlen + step];
            }
        }
        tile[i][lane] = sum;
    }
    __syncthreads();
    for (int i = warp; i < kFinishTile; i += kFinishThreads / 32) {
        const int64_t head = first_head + lane;
        const int64_t step = first_step + i;
        if (head < p.nheads && step < p.seqlen) {
            store_from_float(q.ddt, batch * q.ddt_batch_stride + step * q.ddt_len_stride + head * q.ddt_head_stride, p.dt_dtype,
                             tile[lane][i]);
        }
    }
}

// Blocks 0 .. H - 1 take a head each; the next ones take rows of dB and dC, the last ones tiles of ddt.
__global__ void __launch_bounds__(kFinishThreads) ssd_finish_kernel(const MambaSsdBackward q, const BackwardLaunch launch) {
    __shared__ float shared[kFinishThreads];
    __shared__ float tile[kFinishTile][kFinishTile + 1];
    const MambaSsd& p = q.forward;
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    griddepcontrol_wait();
    int64_t block = blockIdx.x;
    if (block < p.nheads) {
        finish_head(q, launch, block, shared);
        return;
    }
    block -= p.nheads;
    const int64_t rows = p.batch * p.seqlen * p.ngroups;
    const int64_t row_blocks = ceil_div(rows, kFinishRows);
    if (block >= row_blocks) {
        finish_steps(q, launch, block - row_blocks, tile, warp, lane);
    } else if (block * kFinishRows + warp < rows) {
        finish_row(q, launch, block * kFinishRows + warp, rows, lane);
    }
}

}  // namespace

cudaError_t launch_finish(const MambaSsdBackward& q, const BackwardLaunch& launch) {
    const MambaSsd& p = q.forward;
    const int64_t row_blocks = ceil_div(p.batch * p.seqlen * p.ngroups, kFinishRows);
    const int64_t tiles = p.batch * ceil_div(p.seqlen, kFinishTile) * ceil_div(p.nheads, kFinishTile);
    return launch_programmatic_dependent(ssd_finish_kernel, p.nheads + row_blocks + tiles, kFinishThreads, 0, p.run.stream, q,
                                         launch);
}

}  // namespace mamba
