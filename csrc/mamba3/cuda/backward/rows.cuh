// From the gradient of the output to that of the scan's rows: the rows again, from the states before chunks, then D, norm, gate
// and output projection backwards, with the gradients of z and of these parameters.
#pragma once

#include "mamba3/cuda/backward/pairs.cuh"
#include "ssd/cuda/warpgroup.cuh"

namespace mamba {

template <typename T, class Tiles>
struct Mamba3RowsShared {
    T q[Tiles::kRows * (Tiles::kStates + kTilePad)];
    T k[Tiles::kRows * (Tiles::kStates + kTilePad)];
    T x[Tiles::kRows * (Tiles::kInner + kTilePad)];
    T state[Tiles::kInner * (Tiles::kStates + kTilePad)];
    T weights[Tiles::kRows * (Tiles::kRows + kTilePad)];
    ChunkSteps<Tiles::kRows> steps;
    PartSumsOfTurns<Tiles::kThreads> turns;
    float rstd[Tiles::kRows];
    float dD[Tiles::kWarps];
    // The rows lie behind: (kRows, mamba3_row_pitch).
};

// Floats from one of a chunk's rows to the next in shared memory.
MAMBA_HOST_DEVICE inline int mamba3_row_pitch(int64_t headdim, int inner) {
    return static_cast<int>(round_up(headdim, inner)) + 4;
}

// Whether the gradients need the scan's rows.
__device__ __forceinline__ bool needs_rows(const MambaMamba3& p) {
    return p.z != nullptr || p.norm_weight != nullptr || p.mimo_out != nullptr;
}

// What one element of the output projection and gate is made of.
struct Mamba3Gate {
    float before, weight;  // z and mimo_z
    float gate, slope;     // silu(weight z) and its derivative
    float out;             // mimo_out
};
template <typename T>
__device__ __forceinline__ Mamba3Gate load_gate(const MambaMamba3& p, const T* z, int64_t parameter) {
    Mamba3Gate g = {0.0f, 1.0f, 1.0f, 0.0f, 1.0f};
    if (z != nullptr) {
        g.before = to_float(*z);
        g.weight = p.mimo_z != nullptr ? p.mimo_z[parameter] : 1.0f;
        const float argument = g.before * g.weight, part = sigmoid(argument);
        g.gate = argument * part;
        g.slope = part * (1.0f + argument * (1.0f - part));
    }
    g.out = p.mimo_out != nullptr ? p.mimo_out[parameter] : 1.0f;
    return g;
}

// Starts to copy 64 rows of a state as kMamba3Before leaves it.
template <typename T, class Tiles>
__device__ __forceinline__ void load_kept_state(T* to, const T* tile) {
    if constexpr (sizeof(T) == 2) {
#pragma unroll 4
        for (int i = threadIdx.x; i < Tiles::kInner * Tiles::kStates / 8; i += Tiles::kThreads) {
            const int row = i / (Tiles::kStates / 8), column = i % (Tiles::kStates / 8) * 8;
            cp_async<16>(to + row * (Tiles::kStates + kTilePad) + column,
                         tile + SwizzledTile<kMamba3StateRows>::at(row, column), true);
        }
    }
}

__device__ __forceinline__ float add_over_warp(float value) {
    return add_over_column(add_over_row(value));
}

// Without a norm, where rows lie at multiples of 16 bytes: a thread takes eight columns of a step. Adds D x to the rows, and
// returns the thread's part of dD. Pointers are the chunk's, of its first step.
template <typename T, int kThreads>
__device__ __forceinline__ float gate_vectors(const MambaMamba3Backward& q, const Mamba3Chunk& chunk, const T* v, const T* z,
                                              const T* dout, float* rows, int pitch, int64_t projection, float D, T* dy,
                                              int64_t dy_stride, T* dz) {
    const MambaMamba3& p = q.forward;
    const int headdim = static_cast<int>(p.headdim), rank = static_cast<int>(p.rank), pieces = headdim / 8;
    const float inverse_pieces = 1.0f / static_cast<float>(pieces);
    float dD = 0.0f;
#pragma unroll 1
    for (int i = threadIdx.x; i < chunk.steps * pieces; i += kThreads) {
        const int step = divide_small(i, inverse_pieces), column = 8 * (i - step * pieces);
        float value[8], own_z[8] = {}, dz_sum[8] = {}, gradient[8];
        load_eight(value, v + step * p.v_len_stride + column);
        load_eight(gradient, dout + step * q.dout_len_stride + column);
        if (z != nullptr) {
            load_eight(own_z, z + step * p.z_len_stride + column);
        }
#pragma unroll 1
        for (int r = 0; r < rank; ++r) {
            const int64_t parameter = projection + r * headdim + column;
            float x[8], d[8], weight[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                x[j] = value[j];
                d[j] = gradient[j];
            }
            if (p.mimo_v != nullptr) {
                load_eight(weight, p.mimo_v + parameter);
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    x[j] *= weight[j];
                }
            }
            if (p.mimo_out != nullptr) {
                load_eight(weight, p.mimo_out + parameter);
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    d[j] *= weight[j];
                }
            } else if (r > 0) {
                load_eight(d, dout + step * q.dout_len_stride + r * q.dout_rank_stride + column);
            }
            if (needs_rows(p)) {
                float* const row = rows + (step * rank + r) * pitch + column;
                float y[8];
                load_eight(y, row);
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    y[j] = fmaf(D, x[j], y[j]);
                }
                reinterpret_cast<float4*>(row)[0] = make_float4(y[0], y[1], y[2], y[3]);
                reinterpret_cast<float4*>(row)[1] = make_float4(y[4], y[5], y[6], y[7]);
                if (z != nullptr) {
                    if (p.mimo_z != nullptr) {
                        load_eight(weight, p.mimo_z + parameter);
                    }
#pragma unroll
                    for (int j = 0; j < 8; ++j) {
                        const float factor = p.mimo_z != nullptr ? weight[j] : 1.0f;
                        const float argument = own_z[j] * factor, part = sigmoid(argument);
                        dz_sum[j] = fmaf(d[j] * y[j] * factor, part * (1.0f + argument * (1.0f - part)), dz_sum[j]);
                        d[j] *= argument * part;
                    }
                }
            }
            store_eight(dy + (step * rank + r) * dy_stride + column, d);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                dD = fmaf(d[j], x[j], dD);
            }
        }
        if (z != nullptr) {
            store_eight(dz + step * q.dz_step_stride + column, dz_sum);
        }
    }
    return dD;
}

// A block takes a head through a range of slots.
template <typename T, class Tiles>
__global__ void __launch_bounds__(Tiles::kThreads, kMamba3BlocksTogether<Tiles>)
    mamba3_rows_kernel(const MambaMamba3Backward q, const Mamba3BackwardLaunch launch) {
    if (!runs_here<Tiles>()) {
        __trap();
        return;
    }
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    constexpr int kRows = Tiles::kRows;
    constexpr int kStates = Tiles::kStates;
    constexpr int kInner = Tiles::kInner;
    constexpr int kThreads = Tiles::kThreads;
    constexpr int kPitch = kStates + kTilePad;
    constexpr int kInnerPitch = kInner + kTilePad;
    constexpr int kRowsPitch = kRows + kTilePad;
    constexpr int kEach = MAMBA_MAX_HEADDIM / 32;  // columns of a lane
    using Inputs = WarpTile<Tiles, kInner>;
    MAMBA_DYNAMIC_SHARED(16, unsigned char, memory);
    Mamba3RowsShared<T, Tiles>& shared = *reinterpret_cast<Mamba3RowsShared<T, Tiles>*>(memory);
    float* const rows_y = reinterpret_cast<float*>(memory + round_up(sizeof(Mamba3RowsShared<T, Tiles>), 16));
    const MambaMamba3& p = q.forward;
    const Mamba3BackwardWorkspace& w = launch.plan.workspace;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int step0 = 16 * (warp % Inputs::kAbove);
    const int input0 = 16 * Inputs::kWide * (warp / Inputs::kAbove);
    const int headdim = static_cast<int>(p.headdim), dstate = static_cast<int>(p.dstate), rank = static_cast<int>(p.rank);
    const int pitch = mamba3_row_pitch(p.headdim, kInner);
    const int64_t heads = launch.group_heads * p.ngroups;
    const int64_t launch_head = blockIdx.x % heads, range = blockIdx.x / heads;
    const int64_t head = head_of_launch(p, launch, launch_head), group = launch_head / launch.group_heads;
    const float D = p.D != nullptr ? p.D[head] : 0.0f;
    const float* const norm_weight = p.norm_weight != nullptr ? p.norm_weight + head * headdim : nullptr;
    const int64_t projection = head * rank * headdim;  // of the head's parameters

    float* const mimo_z = launch.at<float>(w.mimo_z) + range * p.nheads * rank * headdim + projection;
    float* const mimo_out = launch.at<float>(w.mimo_out) + range * p.nheads * rank * headdim + projection;
    float* const norm = launch.at<float>(w.norm) + (range * rank * p.nheads + head) * headdim;  // (R, H, P)
    for (int i = threadIdx.x; i < rank * headdim; i += kThreads) {
        if (p.mimo_z != nullptr) {
            mimo_z[i] = 0.0f;
        }
        if (p.mimo_out != nullptr) {
            mimo_out[i] = 0.0f;
        }
        if (norm_weight != nullptr) {
            norm[i / headdim * p.nheads * headdim + i % headdim] = 0.0f;
        }
    }

    float dD = 0.0f;
    const int64_t end = (range + 1) * launch.plan.slots_a_range;
    for (int64_t slot = range * launch.plan.slots_a_range; slot < end && slot < launch.chunks.slots; ++slot) {
        const Mamba3Chunk chunk = find_chunk(p, launch.chunks, slot);
        if (chunk.steps == 0) {
            continue;
        }
        const T* const state = launch.at<const T>(w.states) + (slot * heads + launch_head) * mamba3_state_size(p, launch.plan);
        if (needs_rows(p)) {
            for (int row0 = 0; row0 < headdim; row0 += kInner) {
                load_x<T, kRows, kInner, kThreads>(p, launch, chunk, head, row0, shared.x);
                if (launch.plan.warpgroups) {
                    load_kept_state<T, Tiles>(shared.state, state + row0 * kStates);
                } else {
                    load_tile<T, kInner, kStates, kThreads>(shared.state, state + row0 * dstate, dstate, headdim - row0, dstate,
                                                            launch.state_vectors);
                }
                cp_async_commit_group();
                if (row0 == 0) {
                    load_chunk_steps<kRows>(shared.steps, p, launch.chunks, slot, head);
                    const TurnSource<T> sources[2] = {q_source<T>(p, launch, chunk, head, group, shared.q),
                                                      k_source<T>(p, launch, chunk, head, group, shared.k)};
                    turn_tiles<T, Tiles, 2>(p, launch, chunk, slot, head, shared.steps, sources,
                                            speeds_of(p, launch, chunk, head), nullptr, shared.turns);
                }
                cp_async_wait_group<0>();
                __syncthreads();
                if (row0 == 0) {
                    find_weights<T, Tiles>(shared.q, shared.k, shared.steps, rank, shared.weights, warp, lane);
                }
                float entered[2 * Inputs::kWide][4], y[2 * Inputs::kWide][4];
                set_to_zero(entered);
                set_to_zero(y);
                if (input0 < kInner) {
                    multiply<T, Inputs::kWide, kStates / 16, false, true>(entered, shared.q + step0 * kPitch, kPitch,
                                                                          shared.state + input0 * kPitch, kPitch, lane);
                }
                __syncthreads();  // the weights are complete
                if (input0 < kInner) {
                    multiply<T, Inputs::kWide, kRows / 16, false, false>(y, shared.weights + step0 * kRowsPitch, kRowsPitch,
                                                                         shared.x + input0, kInnerPitch, lane);
#pragma unroll
                    for (int j = 0; j < 2 * Inputs::kWide; ++j) {
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            const int row = step0 + lane / 4 + 8 * half;
                            const float entering = shared.steps.entering[row];
                            float* const to = rows_y + row * pitch + row0 + input0 + 8 * j + lane % 4 * 2;
                            to[0] = fmaf(entering, entered[j][2 * half], y[j][2 * half]);
                            to[1] = fmaf(entering, entered[j][2 * half + 1], y[j][2 * half + 1]);
                        }
                    }
                }
                __syncthreads();
            }
        }

        const T* const v =
            static_cast<const T*>(p.v) + chunk.row * p.v_batch_stride + chunk.first * p.v_len_stride + head * p.v_head_stride;
        const T* const z = p.z == nullptr ? nullptr
                                          : static_cast<const T*>(p.z) + chunk.row * p.z_batch_stride +
                                                chunk.first * p.z_len_stride + head * p.z_head_stride;
        const T* const dout = static_cast<const T*>(q.dout) + chunk.row * q.dout_batch_stride +
                              chunk.first * q.dout_len_stride + head * q.dout_head_stride;
        int64_t dy_stride;
        T* const dy = dy_rows<T>(p, launch, chunk, launch_head, &dy_stride);
        bool in_vectors = false;
        if constexpr (sizeof(T) == 2) {
            in_vectors = norm_weight == nullptr && launch.row_vectors != 0;
            if (in_vectors) {
                T* const dz = static_cast<T*>(q.dz) + (chunk.row * p.seqlen + chunk.first) * q.dz_step_stride + head * headdim;
                dD += gate_vectors<T, kThreads>(q, chunk, v, z, dout, rows_y, pitch, projection, D, dy, dy_stride, dz);
            }
        }
        if (norm_weight == nullptr && !in_vectors) {  // a thread takes an element of a step
            const float inverse_columns = 1.0f / static_cast<float>(headdim);
            T* const dz = static_cast<T*>(q.dz) + (chunk.row * p.seqlen + chunk.first) * q.dz_step_stride + head * headdim;
#pragma unroll 4
            for (int i = threadIdx.x; i < chunk.steps * headdim; i += kThreads) {
                const int step = divide_small(i, inverse_columns), column = i - step * headdim;
                const float value = to_float(v[step * p.v_len_stride + column]);
                const T* const own_z = z != nullptr ? z + step * p.z_len_stride + column : nullptr;
                const T* const gradient = dout + step * q.dout_len_stride + column;
                float dz_sum = 0.0f;
                for (int r = 0; r < rank; ++r) {
                    const int row = step * rank + r, parameter = r * headdim + column;
                    const float x = p.mimo_v != nullptr ? value * p.mimo_v[projection + parameter] : value;
                    const Mamba3Gate g = load_gate<T>(p, own_z, projection + parameter);
                    float d = to_float(gradient[p.mimo_out != nullptr ? 0 : r * q.dout_rank_stride]) * g.out;
                    if (needs_rows(p)) {
                        float& y = rows_y[row * pitch + column];
                        y = fmaf(D, x, y);
                        dz_sum = fmaf(d * y * g.slope, g.weight, dz_sum);
                        d *= g.gate;
                    }
                    dy[row * dy_stride + column] = from_float<T>(d);
                    dD = fmaf(d, x, dD);
                }
                if (z != nullptr) {
                    dz[step * q.dz_step_stride + column] = from_float<T>(dz_sum);
                }
            }
        } else if (norm_weight != nullptr) {  // a warp takes a step, its lanes columns
            for (int step = warp; step < chunk.steps; step += Tiles::kWarps) {
                float dz[kEach];
                for (int r = 0; r < rank; ++r) {
                    const int row = step * rank + r;
                    float* const y = rows_y + row * pitch;
                    const T* const gradient =
                        dout + step * q.dout_len_stride + (p.mimo_out != nullptr ? 0 : r * q.dout_rank_stride);
                    float x[kEach], d[kEach];
                    float squares = 0.0f, projected = 0.0f;
#pragma unroll
                    for (int i = 0; i < kEach; ++i) {
                        const int column = 32 * i + lane;
                        if (column < headdim) {
                            x[i] = to_float(v[step * p.v_len_stride + column]);
                            d[i] = to_float(gradient[column]);
                            x[i] = p.mimo_v != nullptr ? x[i] * p.mimo_v[projection + r * headdim + column] : x[i];
                            if (needs_rows(p)) {
                                y[column] = fmaf(D, x[i], y[column]);
                                squares = fmaf(y[column], y[column], squares);
                            }
                        }
                    }
                    float rstd = 1.0f;
                    if (norm_weight != nullptr) {
                        rstd = rsqrtf(add_over_warp(squares) / static_cast<float>(headdim) + p.norm_eps);
                        if (lane == 0) {
                            shared.rstd[row] = rstd;
                        }
                    }
                    if (needs_rows(p)) {
#pragma unroll
                        for (int i = 0; i < kEach; ++i) {
                            const int column = 32 * i + lane;
                            if (column < headdim) {
                                const Mamba3Gate g =
                                    load_gate<T>(p, z != nullptr ? z + step * p.z_len_stride + column : nullptr,
                                                 projection + r * headdim + column);
                                const float normed =
                                    norm_weight != nullptr ? y[column] * rstd * norm_weight[column] : y[column];
                                d[i] *= g.out;
                                const float dgate = d[i] * normed * g.slope * g.weight;
                                dz[i] = r > 0 ? dz[i] + dgate : dgate;
                                d[i] *= g.gate;
                                if (norm_weight != nullptr) {
                                    d[i] *= norm_weight[column];
                                    projected = fmaf(d[i], y[column], projected);
                                }
                            }
                        }
                    }
                    const float share =
                        norm_weight != nullptr ? rstd * rstd * (add_over_warp(projected) / static_cast<float>(headdim)) : 0.0f;
#pragma unroll
                    for (int i = 0; i < kEach; ++i) {
                        const int column = 32 * i + lane;
                        if (column < headdim) {
                            const float value = norm_weight != nullptr ? rstd * (d[i] - y[column] * share) : d[i];
                            dy[row * dy_stride + column] = from_float<T>(value);
                            dD = fmaf(value, x[i], dD);
                        }
                    }
                }
                if (z != nullptr) {
                    T* const to =
                        static_cast<T*>(q.dz) + (chunk.row * p.seqlen + chunk.first + step) * q.dz_step_stride + head * headdim;
#pragma unroll
                    for (int i = 0; i < kEach; ++i) {
                        if (32 * i + lane < headdim) {
                            to[32 * i + lane] = from_float<T>(dz[i]);
                        }
                    }
                }
            }
        }

        // A thread takes an element of the parameters through the steps.
        if (p.mimo_z != nullptr || p.mimo_out != nullptr || norm_weight != nullptr) {
            __syncthreads();
            for (int i = threadIdx.x; i < rank * headdim; i += kThreads) {
                const int r = i / headdim, column = i % headdim;
                float sum_z = 0.0f, sum_out = 0.0f, sum_norm = 0.0f;
                for (int step = 0; step < chunk.steps; ++step) {
                    const int row = step * rank + r;
                    const Mamba3Gate g =
                        load_gate<T>(p, z != nullptr ? z + step * p.z_len_stride + column : nullptr, projection + i);
                    const float gradient = to_float(
                        dout[step * q.dout_len_stride + (p.mimo_out != nullptr ? 0 : r * q.dout_rank_stride) + column]);
                    const float y = rows_y[row * pitch + column];
                    const float root = norm_weight != nullptr ? shared.rstd[row] : 1.0f;
                    const float normed = norm_weight != nullptr ? y * root * norm_weight[column] : y;
                    const float d = gradient * g.out;
                    sum_out = fmaf(gradient, normed * g.gate, sum_out);
                    sum_z = fmaf(d * normed * g.slope, g.before, sum_z);
                    sum_norm = fmaf(d * g.gate, y * root, sum_norm);
                }
                if (p.mimo_z != nullptr) {
                    mimo_z[i] += sum_z;
                }
                if (p.mimo_out != nullptr) {
                    mimo_out[i] += sum_out;
                }
                if (norm_weight != nullptr) {
                    norm[r * p.nheads * headdim + column] += sum_norm;
                }
            }
        }
        __syncthreads();  // the next chunk's rows take this one's place
    }
    dD = add_over_warp(dD);
    if (lane == 0) {
        shared.dD[warp] = dD;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        float sum = 0.0f;
        for (int i = 0; i < Tiles::kWarps; ++i) {
            sum += shared.dD[i];
        }
        launch.at<float>(w.D)[range * p.nheads + head] = sum;
    }
}

}  // namespace mamba
