// Forward: a block walks the chunks of 64 rows of one head's state, which stays in registers; four warps take 16 rows each.
#pragma once

#include "ssd/launch_states.cuh"

namespace mamba {

struct ForwardLaunch {
    int64_t segments;
    int64_t chunks_a_segment;
    const float* ends;  // (segments - 1, B, H, P, N): the state that the next segment starts from
    int32_t x_vectors, B_vectors, C_vectors, out_vectors;
};

template <typename T, class Layout>
constexpr int forward_shared_bytes() {
    constexpr int kSteps = Layout::kSteps;
    return kSteps * (kForwardRows + 2 * Layout::kStates + kSteps + 4 * kTilePad) * static_cast<int>(sizeof(T)) +
           kDecayChunks * static_cast<int>(sizeof(ChunkDecays<kSteps>));
}

// M_ts = (C_t . B_s) exp(cs_t - cs_s) dt_s for s <= t of one run, in 16 x 16 tiles on and below the diagonal.
template <typename T, class Layout>
__device__ __forceinline__ void mix_steps(T* M_tile, const T* B_tile, const T* C_tile,
                                          const ChunkDecays<Layout::kSteps>& decays, int warp, int lane) {
    constexpr int kTiles = Layout::kSteps / 16;
    constexpr int kStride = Layout::kStates + kTilePad;
    constexpr int kMStride = Layout::kSteps + kTilePad;
    for (int tile = warp; tile < kTiles * (kTiles + 1) / 2; tile += kForwardThreads / 32) {
        int i = 0;  // the tile is (i, j) of those on and below the diagonal, row by row
#pragma unroll
        for (int row = 1; row < kTiles; ++row) {
            i += tile >= row * (row + 1) / 2 ? 1 : 0;
        }
        const int j = tile - i * (i + 1) / 2;
        float sum[4][4];  // two sums of each half, so that products need not wait for each other
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            sum[k][0] = sum[k][1] = sum[k][2] = sum[k][3] = 0.0f;
        }
#pragma unroll
        for (int k = 0; k < Layout::kStates / 16; ++k) {
            Operand<T> a;
            Operand<T> b;
            load_a<T>(a, C_tile + 16 * i * kStride + 16 * k, kStride, lane);
            load_b<T>(b, B_tile + 16 * j * kStride + 16 * k, kStride, lane);
            multiply_add<T>(sum[k % 2], a, b, 0);
            multiply_add<T>(sum[2 + k % 2], a, b, 1);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int t = 16 * i + lane / 4 + 8 * half;
            const float cs = decays.log2_decay[t];
            const float rest = decays.log2_rest[t];
            const int start = decays.run_start[t];
#pragma unroll
            for (int column = 0; column < 2; ++column) {
                const int s = 16 * j + 8 * column + lane % 4 * 2;
                const float2 earlier = *reinterpret_cast<const float2*>(&decays.log2_decay[s]);
                const float2 earlier_rest = *reinterpret_cast<const float2*>(&decays.log2_rest[s]);
                const float2 dt = *reinterpret_cast<const float2*>(&decays.dt[s]);
                const float first = sum[2 * column][2 * half] + sum[2 * column + 1][2 * half];
                const float second = sum[2 * column][2 * half + 1] + sum[2 * column + 1][2 * half + 1];
                store_pair<T>(
                    M_tile + t * kMStride + s,
                    s <= t && s >= start ? exp2_fast((cs - earlier.x) + (rest - earlier_rest.x)) * dt.x * first : 0.0f,
                    s + 1 <= t && s + 1 >= start ? exp2_fast((cs - earlier.y) + (rest - earlier_rest.y)) * dt.y * second
                                                 : 0.0f);
            }
        }
    }
}

template <typename T, class Layout, int kBlocks>
__global__ void __launch_bounds__(kForwardThreads, kBlocks) ssd_forward_kernel(const MambaSsd p, const ForwardLaunch launch) {
    constexpr int kSteps = Layout::kSteps;
    constexpr int kStates = Layout::kStates;
    constexpr int kXStride = kForwardRows + kTilePad;
    constexpr int kStride = kStates + kTilePad;
    constexpr int kMStride = kSteps + kTilePad;
    extern __shared__ __align__(16) unsigned char shared[];
    T* const x_tile = reinterpret_cast<T*>(shared);
    T* const B_tile = x_tile + kSteps * kXStride;
    T* const C_tile = B_tile + kSteps * kStride;
    T* const M_tile = C_tile + kSteps * kStride;
    ChunkDecays<kSteps>* const decays = reinterpret_cast<ChunkDecays<kSteps>*>(M_tile + kSteps * kMStride);

    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int64_t row_tiles = (p.headdim + kForwardRows - 1) / kForwardRows;
    int64_t block = blockIdx.x;
    const int row0 = static_cast<int>(block % row_tiles) * kForwardRows;
    block /= row_tiles;
    const int64_t head = block % p.nheads;
    block /= p.nheads;
    const int64_t segment = block % launch.segments;
    const int64_t batch = block / launch.segments;
    const int64_t group = head / (p.nheads / p.ngroups);

    const SequenceRange range = sequence_range(p, batch);
    const int64_t begin = range.begin;
    const int64_t seqlen = range.seqlen;
    const int64_t row_batch = range.row;
    const int64_t chunks = (seqlen + kSteps - 1) / kSteps;
    const int64_t first_chunk = segment * launch.chunks_a_segment;
    int64_t last_chunk = first_chunk + launch.chunks_a_segment;
    last_chunk = last_chunk < chunks ? last_chunk : chunks;

    const T* const x =
        static_cast<const T*>(p.x) + row_batch * p.x_batch_stride + begin * p.x_len_stride + head * p.x_head_stride + row0;
    const T* const B =
        static_cast<const T*>(p.B) + row_batch * p.B_batch_stride + begin * p.B_len_stride + group * p.B_group_stride;
    const T* const C =
        static_cast<const T*>(p.C) + row_batch * p.C_batch_stride + begin * p.C_len_stride + group * p.C_group_stride;
    const T* const z = p.z == nullptr ? nullptr
                                      : static_cast<const T*>(p.z) + row_batch * p.z_batch_stride + begin * p.z_len_stride +
                                            head * p.z_head_stride + row0;
    T* const out =
        static_cast<T*>(p.out) + row_batch * p.out_batch_stride + begin * p.out_len_stride + head * p.out_head_stride + row0;
    const int32_t* const seq_idx = p.seq_idx == nullptr ? nullptr : p.seq_idx + row_batch * p.seqlen + begin;
    const StepSize size = step_size(p, row_batch, begin, head);
    const float A = p.A[head];
    const int rows = static_cast<int>(p.headdim) - row0;  // may be more than kForwardRows
    const int dstate = static_cast<int>(p.dstate);
    const int row = 16 * warp;
    const int64_t state_size = p.headdim * p.dstate;
    const int64_t state_index = (batch * p.nheads + head) * state_size + static_cast<int64_t>(row0) * dstate;

    float D[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};  // of this lane's columns 8 j + 2 t + i
    if (p.D != nullptr) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int column = row + i / 2 * 8 + lane % 4 * 2 + i % 2;
            if (column < rows) {
                D[i / 2][i % 2] = p.D[head * p.D_head_stride + (row0 + column) * p.D_dim_stride];
            }
        }
    }

    const float* from = segment == 0 ? p.initial_state : launch.ends + (segment - 1) * p.batch * p.nheads * state_size;
    bool state_is_zero = from == nullptr;
    float state[kStates / 8][4];
    if (from != nullptr) {
        load_state<kStates>(state, from + state_index, row, rows, 0, dstate, lane);
    } else {
#pragma unroll
        for (int j = 0; j < kStates / 8; ++j) {
            state[j][0] = state[j][1] = state[j][2] = state[j][3] = 0.0f;
        }
    }

    StepInputs<kSteps> inputs;  // of this warp's chunk of the next kDecayChunks
    if (first_chunk < last_chunk) {
        load_tile<T, kSteps, kStates, kForwardThreads>(C_tile, C + first_chunk * kSteps * p.C_len_stride, p.C_len_stride,
                                                       steps_in<kSteps>(seqlen, first_chunk), dstate, launch.C_vectors);
    }
    if (first_chunk + warp < last_chunk) {
        const int64_t chunk = first_chunk + warp;
        load_steps<kSteps>(inputs, size, seq_idx, chunk * kSteps, steps_in<kSteps>(seqlen, chunk), lane);
    }
    for (int64_t chunk = first_chunk; chunk < last_chunk; ++chunk) {
        const int64_t first = chunk * kSteps;
        const int valid = steps_in<kSteps>(seqlen, chunk);
        const int phase = static_cast<int>((chunk - first_chunk) % kDecayChunks);
        const ChunkDecays<kSteps>& now = decays[phase];
        load_tile<T, kSteps, kForwardRows, kForwardThreads>(x_tile, x + first * p.x_len_stride, p.x_len_stride, valid, rows,
                                                            launch.x_vectors);
        load_tile<T, kSteps, kStates, kForwardThreads>(B_tile, B + first * p.B_len_stride, p.B_len_stride, valid, dstate,
                                                       launch.B_vectors);
        end_copies();
        if (phase == 0) {
            if (chunk + warp < last_chunk) {
                chunk_decays<kSteps>(decays[warp], inputs, size, A, lane);
            }
            const int64_t ahead = chunk + kDecayChunks + warp;
            if (ahead < last_chunk) {
                load_steps<kSteps>(inputs, size, seq_idx, ahead * kSteps, steps_in<kSteps>(seqlen, ahead), lane);
            }
        }
        wait_for_copies<0>();
        __syncthreads();

        mix_steps<T, Layout>(M_tile, B_tile, C_tile, now, warp, lane);

        // exp(cs_t) H C_t, for all steps and this warp's 16 rows.
        float y[kSteps / 16][2][4];
#pragma unroll
        for (int i = 0; i < kSteps / 16; ++i) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                y[i][j][0] = y[i][j][1] = y[i][j][2] = y[i][j][3] = 0.0f;
            }
        }
        if (!state_is_zero) {
#pragma unroll
            for (int k = 0; k < kStates / 16; ++k) {
                Operand<T> b;
                b_from_accumulators<T>(b, state[2 * k], state[2 * k + 1]);
#pragma unroll
                for (int i = 0; i < kSteps / 16; ++i) {
                    Operand<T> a;
                    load_a<T>(a, C_tile + 16 * i * kStride + 16 * k, kStride, lane);
                    multiply_add<T>(y[i][0], a, b, 0);
                    multiply_add<T>(y[i][1], a, b, 1);
                }
            }
#pragma unroll
            for (int i = 0; i < kSteps / 16; ++i) {
                const float above = now.entering[16 * i + lane / 4];
                const float below = now.entering[16 * i + lane / 4 + 8];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    y[i][j][0] *= above;
                    y[i][j][1] *= above;
                    y[i][j][2] *= below;
                    y[i][j][3] *= below;
                }
            }
        }
        state_is_zero = false;
        __syncthreads();

        // C is not needed any more: the next chunk's is on its way from here.
        if (chunk + 1 < last_chunk) {
            load_tile<T, kSteps, kStates, kForwardThreads>(C_tile, C + (first + kSteps) * p.C_len_stride, p.C_len_stride,
                                                           steps_in<kSteps>(seqlen, chunk + 1), dstate, launch.C_vectors);
        }
#pragma unroll
        for (int k = 0; k < kSteps / 16; ++k) {
            Operand<T> b;
            load_b_transposed<T>(b, x_tile + 16 * k * kXStride + row, kXStride, lane);
#pragma unroll
            for (int i = k; i < kSteps / 16; ++i) {
                Operand<T> a;
                load_a<T>(a, M_tile + 16 * i * kMStride + 16 * k, kMStride, lane);
                multiply_add<T>(y[i][0], a, b, 0);
                multiply_add<T>(y[i][1], a, b, 1);
            }
        }

#pragma unroll
        for (int i = 0; i < kSteps / 16; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int t = 16 * i + lane / 4 + 8 * half;
                const bool exists = t < valid && row < rows;
                float2 pairs[2];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int column = row + 8 * j + lane % 4 * 2;
                    const float2 input = load_pair<T>(x_tile + t * kXStride + column);
                    pairs[j].x = fmaf(D[j][0], input.x, y[i][j][2 * half]);
                    pairs[j].y = fmaf(D[j][1], input.y, y[i][j][2 * half + 1]);
                    if (z != nullptr && exists) {
                        const T* const gate = z + (first + t) * p.z_len_stride + column;
                        pairs[j].x *= column < rows ? silu(to_float(gate[0])) : 0.0f;
                        pairs[j].y *= column + 1 < rows ? silu(to_float(gate[1])) : 0.0f;
                    }
                }
                store_row<T>(exists ? out + (first + t) * p.out_len_stride + row : nullptr, rows - row, launch.out_vectors,
                             pairs[0], pairs[1], lane);
            }
        }

        if (chunk + 1 < last_chunk || p.final_state != nullptr) {
            update_state<T, kStates, kStates, kSteps>(state, x_tile + row, B_tile, now.adding, now.carry, lane);
        }
        __syncthreads();
    }

    if (p.final_state != nullptr && segment == launch.segments - 1) {
        store_state<kStates>(p.final_state + state_index, state, row, rows, 0, dstate, lane);
    }
}

template <typename T, class Layout, int kBlocks>
cudaError_t launch_forward_layout(const MambaSsd& p, const SsdPlan& plan, const SsdWorkspace& workspace) {
    const int64_t size = sizeof(T);
    StateWalk walk = forward_walk(p, size);
    const bool C = ssd_rows_aligned(p.C, p.dstate, p.C_batch_stride, p.C_len_stride, p.C_group_stride, size, 16);
    char* const memory = static_cast<char*>(p.workspace);
    float* const ends = reinterpret_cast<float*>(memory + workspace.ends);
    float* const decays = reinterpret_cast<float*>(memory + workspace.decays);
    if (plan.segments > 1 || p.out == nullptr) {
        StatesLaunch states = {};
        walk.last = p.final_state;
        walk.ends = ends;
        walk.decays = decays;
        states.walks[0] = walk;
        states.group_heads = p.nheads / p.ngroups;
        states.segments = plan.segments;
        states.chunks_a_segment = plan.chunks_a_segment;
        if (plan.segments > 1) {
            states.ends_only = 1;
            const cudaError_t error = launch_states<T, Layout>(p, states, 1);
            if (error != cudaSuccess) {
                return error;
            }
            states.ends_only = 0;
        }
        if (p.out == nullptr) {
            return launch_states<T, Layout>(p, states, 1);
        }
    }
    ForwardLaunch launch = {};
    launch.segments = plan.segments;
    launch.chunks_a_segment = plan.chunks_a_segment;
    launch.ends = ends;
    launch.x_vectors = walk.x_vectors;
    launch.B_vectors = walk.B_vectors;
    launch.C_vectors = C;
    launch.out_vectors = ssd_rows_aligned(p.out, p.headdim, p.out_batch_stride, p.out_len_stride, p.out_head_stride, size, 8);
    constexpr int kShared = forward_shared_bytes<T, Layout>();
    static_assert(kShared <= kEveryShared, "every GPU has that");
    const auto kernel = ssd_forward_kernel<T, Layout, kBlocks>;
    const cudaError_t error = allow_shared(reinterpret_cast<const void*>(kernel), kShared);
    if (error != cudaSuccess) {
        return error;
    }
    const int64_t row_tiles = (p.headdim + kForwardRows - 1) / kForwardRows;
    const int64_t blocks = row_tiles * p.nheads * plan.segments * p.batch;
    kernel<<<static_cast<unsigned int>(blocks), kForwardThreads, kShared, static_cast<cudaStream_t>(p.run.stream)>>>(p, launch);
    return cudaGetLastError();
}

template <typename T>
cudaError_t launch_ssd_forward(const MambaSsd& p, const SsdPlan& plan, const SsdWorkspace& workspace) {
    using Layouts = SsdLayouts<T>;
    switch (plan.layout) {
        case kSsdSmall:
            return launch_forward_layout<T, typename Layouts::Small, 3>(p, plan, workspace);
        case kSsdMiddle:
        case kSsdMiddleAhead:
        case kSsdLittle:
            return launch_forward_layout<T, typename Layouts::Middle, 3>(p, plan, workspace);
        default:
            return launch_forward_layout<T, typename Layouts::Large, 2>(p, plan, workspace);
    }
}

}  // namespace mamba
