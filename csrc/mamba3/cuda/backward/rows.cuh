// From the gradient of the output to that of the scan's rows: the rows again, from the states before chunks, then D, norm, gate
// and output projection backwards, with the gradients of z and of these parameters.
#pragma once

#include "mamba3/cuda/backward/gate.cuh"
#include "mamba3/cuda/backward/pairs.cuh"

namespace mamba {

template <typename T, class Tiles>
struct Mamba3RowsShared {
    T q[Tiles::kRows * (Tiles::kStates + kTilePad)];
    T k[Tiles::kRows * (Tiles::kStates + kTilePad)];
    T x[Tiles::kRows * (Tiles::kInner + kTilePad)];
    T state[Tiles::kInner * (Tiles::kStates + kTilePad)];
    T weights[Tiles::kRows * (Tiles::kRows + kTilePad)];
    ChunkSteps<Tiles::kRows> steps;
    float rstd[Tiles::kRows];
    float dD[Tiles::kWarps];
    // The rows lie behind: (kRows, mamba3_row_pitch).
};

// Floats from one of a chunk's rows to the next in shared memory.
MAMBA_HOST_DEVICE constexpr int mamba3_row_pitch(int64_t headdim, int inner) {
    return static_cast<int>(round_up(headdim, inner)) + 4;
}

// Whether the gradients need the scan's rows.
__device__ __forceinline__ bool needs_rows(const MambaMamba3& p) {
    return p.z != nullptr || p.norm_weight != nullptr || p.mimo_out != nullptr;
}

// A chunk of a head: the tensors' rows of its first step, and the head's parameters.
template <typename T>
struct Mamba3HeadRows {
    Mamba3Chunk chunk;
    const T *v, *z, *dout;
    T *dz, *dy;
    int64_t dy_stride, dout_rank_stride;
    const float *mimo_v, *mimo_z, *mimo_out, *norm_weight;  // (R, P), norm_weight (P); NULL without them

    __device__ __forceinline__ Mamba3HeadRows(const MambaMamba3Backward& q, const Mamba3BackwardLaunch& launch, int64_t slot,
                                              int64_t launch_head, int64_t head)
        : chunk(find_chunk(q.forward, launch.chunks, slot)) {
        const MambaMamba3& p = q.forward;
        const int64_t projection = head * p.rank * p.headdim;
        v = static_cast<const T*>(p.v) + chunk.row * p.v_batch_stride + chunk.first * p.v_len_stride + head * p.v_head_stride;
        z = p.z == nullptr ? nullptr
                           : static_cast<const T*>(p.z) + chunk.row * p.z_batch_stride + chunk.first * p.z_len_stride +
                                 head * p.z_head_stride;
        dout = static_cast<const T*>(q.dout) + chunk.row * q.dout_batch_stride + chunk.first * q.dout_len_stride +
               head * q.dout_head_stride;
        dout_rank_stride = p.mimo_out != nullptr ? 0 : q.dout_rank_stride;
        dz = static_cast<T*>(q.dz) + (chunk.row * p.seqlen + chunk.first) * q.dz_step_stride + head * p.headdim;
        dy = dy_rows<T>(p, launch, chunk, launch_head, &dy_stride);
        mimo_v = p.mimo_v != nullptr ? p.mimo_v + projection : nullptr;
        mimo_z = p.mimo_z != nullptr ? p.mimo_z + projection : nullptr;
        mimo_out = p.mimo_out != nullptr ? p.mimo_out + projection : nullptr;
        norm_weight = p.norm_weight != nullptr ? p.norm_weight + head * p.headdim : nullptr;
    }
    static __device__ __forceinline__ float weight(const float* of, int parameter) {
        return of != nullptr ? of[parameter] : 1.0f;
    }
};

// The scan's rows without D x, into rows_y.
template <typename T, class Tiles>
__device__ __forceinline__ void find_rows(const MambaMamba3Backward& q, const Mamba3BackwardLaunch& launch,
                                          const Mamba3Chunk& chunk, int64_t slot, int64_t launch_head, int64_t head,
                                          Mamba3RowsShared<T, Tiles>& shared, float* rows_y, int pitch) {
    constexpr int kStates = Tiles::kStates, kInner = Tiles::kInner, kRows = Tiles::kRows, kThreads = Tiles::kThreads;
    constexpr int kPitch = kStates + kTilePad, kInnerPitch = kInner + kTilePad, kRowsPitch = kRows + kTilePad;
    using Inputs = WarpTile<Tiles, kInner>;
    const MambaMamba3& p = q.forward;
    const Mamba3BackwardWorkspace& w = launch.plan.workspace;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int step0 = 16 * (warp % Inputs::kAbove), input0 = 16 * Inputs::kWide * (warp / Inputs::kAbove);
    const int headdim = static_cast<int>(p.headdim), dstate = static_cast<int>(p.dstate), rank = static_cast<int>(p.rank);
    const T* const state =
        launch.at<const T>(w.states) + (slot * launch.group_heads * p.ngroups + launch_head) * p.headdim * p.dstate;
#pragma unroll 1
    for (int row0 = 0; row0 < headdim; row0 += kInner) {
        load_x<T, kRows, kInner, kThreads>(p, launch, chunk, head, row0, shared.x);
        load_tile<T, kInner, kStates, kThreads>(shared.state, state + row0 * dstate, dstate, headdim - row0, dstate,
                                                launch.state_vectors);
        if (row0 == 0) {
            load_rotated<T, kRows, kStates, kThreads>(p, launch, w.q, chunk, slot, launch_head, shared.q);
            load_rotated<T, kRows, kStates, kThreads>(p, launch, w.k, chunk, slot, launch_head, shared.k);
            load_chunk_steps<kRows>(shared.steps, p, launch.chunks, slot, head);
        }
        cp_async_commit_group();
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

// Back through output projection, gate and norm to the gradient of the scan's rows, and dz. A warp takes a step, a lane every
// 32nd column. Adds D x to the rows, and returns the lane's part of dD.
template <typename T, class Tiles>
__device__ __forceinline__ float gate_rows(const MambaMamba3Backward& q, const Mamba3HeadRows<T>& of, float* rows_y, int pitch,
                                           float* rstds, float D) {
    constexpr int kEach = MAMBA_MAX_HEADDIM / 32;  // columns of a lane
    const MambaMamba3& p = q.forward;
    const int lane = threadIdx.x % 32, headdim = static_cast<int>(p.headdim), rank = static_cast<int>(p.rank);
    const float inverse = 1.0f / static_cast<float>(headdim);
    float dD = 0.0f;
    const auto for_each = [&](const auto& function) {  // of the lane's columns
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            if (32 * i + lane < headdim) {
                function(i, 32 * i + lane);
            }
        }
    };
#pragma unroll 1
    for (int step = threadIdx.x / 32; step < of.chunk.steps; step += Tiles::kWarps) {
        float dz[kEach] = {};
#pragma unroll 1
        for (int r = 0; r < rank; ++r) {
            float* const y = rows_y + (step * rank + r) * pitch;
            const T* const dout = of.dout + step * q.dout_len_stride + r * of.dout_rank_stride;
            float x[kEach], d[kEach], squares = 0.0f, projected = 0.0f, rstd = 1.0f;
            for_each([&](int i, int column) {
                x[i] = to_float(of.v[step * p.v_len_stride + column]) * of.weight(of.mimo_v, r * headdim + column);
                d[i] = to_float(dout[column]) * of.weight(of.mimo_out, r * headdim + column);
                if (needs_rows(p)) {
                    y[column] = fmaf(D, x[i], y[column]);
                    squares = fmaf(y[column], y[column], squares);
                }
            });
            if (of.norm_weight != nullptr) {
                rstd = rsqrtf(add_over_warp(squares) * inverse + p.norm_eps);
                if (lane == 0) {
                    rstds[step * rank + r] = rstd;
                }
            }
            for_each([&](int i, int column) {
                const float norm = of.norm_weight != nullptr ? of.norm_weight[column] : 1.0f;
                if (of.z != nullptr) {
                    const float weight = of.weight(of.mimo_z, r * headdim + column);
                    const float argument = to_float(of.z[step * p.z_len_stride + column]) * weight;
                    const GateGradients gate = gate_backward(d[i], y[column] * rstd * norm, argument);
                    dz[i] = fmaf(gate.dargument, weight, dz[i]);
                    d[i] = gate.dy;
                }
                d[i] *= norm;
                if (of.norm_weight != nullptr) {
                    projected = fmaf(d[i], y[column], projected);
                }
            });
            const float share = of.norm_weight != nullptr ? rstd * rstd * (add_over_warp(projected) * inverse) : 0.0f;
            for_each([&](int i, int column) {
                const float value = of.norm_weight != nullptr ? rstd * (d[i] - y[column] * share) : d[i];
                of.dy[(step * rank + r) * of.dy_stride + column] = from_float<T>(value);
                dD = fmaf(value, x[i], dD);
            });
        }
        if (of.z != nullptr) {
            for_each([&](int i, int column) { of.dz[step * q.dz_step_stride + column] = from_float<T>(dz[i]); });
        }
    }
    return dD;
}

// A range's gradients of a head's parameters, (R, P) each; norm's rows lie norm_stride apart.
struct Mamba3ParameterSums {
    float *mimo_z, *mimo_out, *norm;
    int64_t norm_stride;
};

// Adds a chunk's. A thread takes an element of the parameters through the steps, and begins with zero if `first`.
template <typename T>
__device__ __forceinline__ void add_parameters(const MambaMamba3Backward& q, const Mamba3HeadRows<T>& of, const float* rows_y,
                                               int pitch, const float* rstds, const Mamba3ParameterSums& to, bool first,
                                               int threads) {
    const MambaMamba3& p = q.forward;
    const int headdim = static_cast<int>(p.headdim), rank = static_cast<int>(p.rank);
#pragma unroll 1
    for (int i = threadIdx.x; i < rank * headdim; i += threads) {
        const int r = i / headdim, column = i % headdim;
        const float of_z = of.weight(of.mimo_z, i), of_out = of.weight(of.mimo_out, i);
        const float norm = of.norm_weight != nullptr ? of.norm_weight[column] : 1.0f;
        float sum_z = 0.0f, sum_out = 0.0f, sum_norm = 0.0f;
        for (int step = 0; step < of.chunk.steps; ++step) {
            const int row = step * rank + r;
            const float z = of.z != nullptr ? to_float(of.z[step * p.z_len_stride + column]) : 0.0f;
            const float dout = to_float(of.dout[step * q.dout_len_stride + r * of.dout_rank_stride + column]);
            const float scaled = rows_y[row * pitch + column] * (of.norm_weight != nullptr ? rstds[row] : 1.0f);
            const GateGradients gate = gate_backward(dout * of_out, scaled * norm, z * of_z);
            const float opened = of.z != nullptr ? gate.value : 1.0f;
            sum_z = fmaf(gate.dargument, z, sum_z);
            sum_out = fmaf(dout, scaled * norm * opened, sum_out);
            sum_norm = fmaf(dout * of_out * opened, scaled, sum_norm);
        }
        const auto add = [&](float* sum, float value) { *sum = first ? value : *sum + value; };
        if (of.mimo_z != nullptr) {
            add(to.mimo_z + i, sum_z);
        }
        if (of.mimo_out != nullptr) {
            add(to.mimo_out + i, sum_out);
        }
        if (of.norm_weight != nullptr) {
            add(to.norm + r * to.norm_stride + column, sum_norm);
        }
    }
}

// A block takes a head through a range of slots.
template <typename T, class Tiles>
__global__ void __launch_bounds__(Tiles::kThreads, Tiles::kStates > 128 ? 1 : 2)
    mamba3_rows_kernel(const MambaMamba3Backward q, const Mamba3BackwardLaunch launch) {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    MAMBA_DYNAMIC_SHARED(16, unsigned char, memory);
    Mamba3RowsShared<T, Tiles>& shared = *reinterpret_cast<Mamba3RowsShared<T, Tiles>*>(memory);
    float* const rows_y = reinterpret_cast<float*>(memory + round_up(sizeof(Mamba3RowsShared<T, Tiles>), 16));
    const MambaMamba3& p = q.forward;
    const Mamba3BackwardWorkspace& w = launch.plan.workspace;
    const int pitch = mamba3_row_pitch(p.headdim, Tiles::kInner);
    const int64_t heads = launch.group_heads * p.ngroups, launch_head = blockIdx.x % heads, range = blockIdx.x / heads;
    const int64_t head = head_of_launch(p, launch, launch_head), projection = p.rank * p.headdim;
    const float D = p.D != nullptr ? p.D[head] : 0.0f;
    const Mamba3ParameterSums sums = {launch.at<float>(w.mimo_z) + (range * p.nheads + head) * projection,
                                      launch.at<float>(w.mimo_out) + (range * p.nheads + head) * projection,
                                      launch.at<float>(w.norm) + (range * p.rank * p.nheads + head) * p.headdim,
                                      p.nheads * p.headdim};
    float dD = 0.0f;
    const int64_t begin = range * launch.plan.slots_a_range, end = begin + launch.plan.slots_a_range;
    for (int64_t slot = begin; slot < end && slot < launch.chunks.slots; ++slot) {
        const Mamba3HeadRows<T> of(q, launch, slot, launch_head, head);
        if (needs_rows(p) && of.chunk.steps > 0) {
            find_rows<T, Tiles>(q, launch, of.chunk, slot, launch_head, head, shared, rows_y, pitch);
        }
        dD += gate_rows<T, Tiles>(q, of, rows_y, pitch, shared.rstd, D);
        if (p.mimo_z != nullptr || p.mimo_out != nullptr || p.norm_weight != nullptr) {
            __syncthreads();
            add_parameters(q, of, rows_y, pitch, shared.rstd, sums, slot == begin, Tiles::kThreads);
        }
        __syncthreads();  // the next chunk's rows take this one's place
    }
    dD = add_over_warp(dD);
    if (threadIdx.x % 32 == 0) {
        shared.dD[threadIdx.x / 32] = dD;
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
