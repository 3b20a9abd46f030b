// One decoding step of Mamba-3, states in place: a block takes one head of one batch entry. The lanes of a warp lie along the
// states and keep their entries of q, k and the k before in registers, for kRanks rows at a time; the state goes through once.
#pragma once

#include "common/alignment.h"
#include "mamba3/cuda/chunks.cuh"
#include "state_update/cuda/rows.cuh"

namespace mamba {

constexpr int kMamba3StepThreads = 128;

// What the kernel adds to q or k before it turns it.
struct Mamba3StepMatrix {
    const void* from;
    const float* bias;
    int64_t offset, rank_stride;  // of from
};

// This lane's entries of a row of q or k with its bias, turned. cos_sin: by angle.
template <class Rows>
__device__ __forceinline__ void turn_step_row(float (&entries)[Rows::kStates], const MambaMamba3& p,
                                              const Mamba3StepMatrix& matrix, const Rows& rows, int rank,
                                              const float2* cos_sin) {
    const int dstate = static_cast<int>(p.dstate), half = dstate / 2;
    const float* const bias = matrix.bias + rank * p.dstate;
    const int64_t from = matrix.offset + rank * matrix.rank_stride;
#pragma unroll
    for (int v = 0; v < Rows::kVectors; ++v) {
#pragma unroll
        for (int i = 0; i < Rows::kVector; ++i) {
            const int n = rows.state_of(v) + i;
            float value = 0.0f;
            if (n < dstate) {
                const int angle = p.pairwise != 0 ? n / 2 : n < half ? n : n - half;
                value = load_as_float(matrix.from, from + n, p.dtype) + bias[n];
                if (angle < p.nangles) {
                    const bool second = p.pairwise != 0 ? n % 2 != 0 : n >= half;
                    const int partner = p.pairwise != 0 ? n ^ 1 : second ? n - half : n + half;
                    const float other = load_as_float(matrix.from, from + partner, p.dtype) + bias[partner];
                    const float2 turn = cos_sin[angle];
                    value = second ? fmaf(value, turn.x, other * turn.y) : fmaf(value, turn.x, -(other * turn.y));
                }
            }
            entries[v * Rows::kVector + i] = value;
        }
    }
}

// This lane's entries of the k before.
template <class Rows>
__device__ __forceinline__ void load_step_row(float (&entries)[Rows::kStates], const void* from, int64_t offset, int32_t dtype,
                                              const Rows& rows, int dstate) {
#pragma unroll
    for (int v = 0; v < Rows::kVectors; ++v) {
#pragma unroll
        for (int i = 0; i < Rows::kVector; ++i) {
            const int n = rows.state_of(v) + i;
            entries[v * Rows::kVector + i] = n < dstate ? load_as_float(from, offset + n, dtype) : 0.0f;
        }
    }
}

template <class Rows, int kRanks>
__global__ void __launch_bounds__(kMamba3StepThreads, kRanks == 1 ? 6 : 3)
    mamba3_step_kernel(const MambaMamba3Step q, int lanes_log2) {
    using State = typename Rows::State;
    constexpr int kVector = Rows::kVector, kRows = Rows::kRows, kVectors = Rows::kVectors, kStates = Rows::kStates;
    constexpr int kWarps = kMamba3StepThreads / 32;
    __shared__ float2 cos_sin[MAMBA_MAX_DSTATE / 2];
    __shared__ float v_of[MAMBA_MAX_HEADDIM], v_before[MAMBA_MAX_HEADDIM];
    MAMBA_DYNAMIC_SHARED(16, float, y_of);  // (R, P), then 1 / rms of the rows
    const MambaMamba3& p = q.scan;
    const int thread = static_cast<int>(threadIdx.x);
    const int warp = thread / 32;
    const int rank = static_cast<int>(p.rank), headdim = static_cast<int>(p.headdim), dstate = static_cast<int>(p.dstate);
    const int64_t index = blockIdx.x;
    const int64_t batch = index / p.nheads, head = index % p.nheads;
    const int64_t group = head / (p.nheads / p.ngroups);
    const Rows rows(lanes_log2);
    const int tile_rows = rows.tile_rows();
    const auto place_of = [&](int tile) {
        StatePlace<State> place;
        place.first = static_cast<State*>(q.state_ssm) + (index * headdim + tile * tile_rows + rows.row_of(0)) * p.dstate;
        place.step = p.dstate << (5 - lanes_log2);
        place.dstate_stride = 1;
        place.rows_left = headdim - tile * tile_rows;
        place.dstate = dstate;
        return place;
    };
    const int tiles = (headdim + tile_rows - 1) / tile_rows;
    let_next_kernel_start();
    for (int tile = warp; tile < tiles; tile += kWarps) {  // the kernel before may still change them
        place_of(tile).prefetch(rows);
    }
    wait_for_previous_kernel();
    typename Rows::Tile packed;
    if (warp < tiles) {
        place_of(warp).load(rows, packed);
    }

    const float adt = load_as_float(p.adt, batch * p.adt_batch_stride + head * p.adt_head_stride, p.adt_dtype);
    const float dt = load_as_float(p.dt, batch * p.dt_batch_stride + head * p.dt_head_stride, p.dt_dtype);
    const float trap = load_as_float(p.trap, batch * p.trap_batch_stride + head * p.trap_head_stride, p.trap_dtype);
    const float decay = expf(adt), gamma = sigmoid(trap) * dt, nu = sigmoid(-trap) * dt;
    for (int i = thread; i < p.nangles; i += kMamba3StepThreads) {
        const int64_t at = batch * p.angle_batch_stride + (p.angles_of_heads != 0 ? head * p.angle_head_stride : 0) + i;
        const float turn = turn_of_step(0.5f * tanhf(load_as_float(p.angles, at, p.angle_dtype)), dt);
        float& state = q.state_angle[index * p.nangles + i];
        const uint32_t count = count_of_radians(state) + count_of_turns(turn);
        // A count is never NaN.
        const float lost = turn == turn && state == state ? 0.0f : __int_as_float(0x7fffffff);
        const float2 found = cos_sin_of_turns(turns_of_count(count));
        cos_sin[i] = make_float2(found.x + lost, found.y + lost);
        state = radians_of_count(count) + lost;
    }
    for (int i = thread; i < headdim; i += kMamba3StepThreads) {
        const int64_t at = batch * p.v_batch_stride + head * p.v_head_stride + i;
        v_of[i] = load_as_float(p.v, at, p.dtype);
        v_before[i] = load_as_float(q.state_v, index * headdim + i, q.v_dtype);
        store_from_float(q.state_v, index * headdim + i, q.v_dtype, v_of[i]);
    }
    __syncthreads();

    const Mamba3StepMatrix q_matrix = {p.q, p.q_bias + head * p.rank * p.dstate,
                                       batch * p.q_batch_stride + group * p.q_group_stride, p.q_rank_stride};
    const Mamba3StepMatrix k_matrix = {p.k, p.k_bias + head * p.rank * p.dstate,
                                       batch * p.k_batch_stride + group * p.k_group_stride, p.k_rank_stride};
    const auto k_index = [&](int r) { return ((batch * p.rank + r) * p.nheads + head) * p.dstate; };
    const float* const weights = p.mimo_v != nullptr ? p.mimo_v + head * p.rank * p.headdim : nullptr;
    float q_of[kRanks][kStates], k_of[kRanks][kStates], before[kRanks][kStates];
    const auto load_k = [&](int first) {
#pragma unroll
        for (int r = 0; r < kRanks; ++r) {
            if (first + r < rank) {
                turn_step_row(k_of[r], p, k_matrix, rows, first + r, cos_sin);
                load_step_row(before[r], q.state_k, k_index(first + r), q.k_dtype, rows, dstate);
            }
        }
    };
    const auto load_q = [&](int first) {
#pragma unroll
        for (int r = 0; r < kRanks; ++r) {
            if (first + r < rank) {
                turn_step_row(q_of[r], p, q_matrix, rows, first + r, cos_sin);
            }
        }
    };
    const bool at_once = rank <= kRanks;
    if (at_once) {
        load_k(0);
        load_q(0);
    }
    for (int tile = warp; tile < tiles; tile += kWarps) {
        float h[kRows][kStates];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                unpack<State, kVector>(packed[r][v], &h[r][v * kVector]);
            }
        }
        const StatePlace<State> place = place_of(tile);
        if (tile + kWarps < tiles) {
            place_of(tile + kWarps).load(rows, packed);
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int n = 0; n < kStates; ++n) {
                h[r][n] *= decay;
            }
        }
        for (int first = 0; first < rank; first += kRanks) {
            if (!at_once) {
                load_k(first);
            }
#pragma unroll
            for (int j = 0; j < kRanks; ++j) {
                if (first + j < rank) {
#pragma unroll
                    for (int r = 0; r < kRows; ++r) {
                        const int row = tile * tile_rows + rows.row_of(r);
                        const int own = row < headdim ? row : 0;
                        const float weight = weights != nullptr ? weights[(first + j) * headdim + own] : 1.0f;
                        const float x = gamma * (weight * v_of[own]), x_before = decay * (nu * (weight * v_before[own]));
#pragma unroll
                        for (int n = 0; n < kStates; ++n) {
                            h[r][n] = fmaf(x, k_of[j][n], fmaf(x_before, before[j][n], h[r][n]));
                        }
                    }
                }
            }
        }
        for (int first = 0; first < rank; first += kRanks) {
            if (!at_once) {
                load_q(first);
            }
#pragma unroll
            for (int j = 0; j < kRanks; ++j) {
                if (first + j < rank) {
                    float sums[kRows];
#pragma unroll
                    for (int r = 0; r < kRows; ++r) {
                        sums[r] = 0.0f;
#pragma unroll
                        for (int n = 0; n < kStates; ++n) {
                            sums[r] = fmaf(q_of[j][n], h[r][n], sums[r]);
                        }
                    }
                    const float sum = rows.sum_to_owners(sums);
                    const int row = tile * tile_rows + rows.row_of(rows.part % kRows);
                    if (rows.part < kRows && row < headdim) {
                        y_of[(first + j) * headdim + row] = sum;
                    }
                }
            }
        }
        store_rows(rows, place, h);
    }
    __syncthreads();

    // All have read the k before.
    for (int r = warp; r < rank; r += kWarps) {
        float entries[kStates];
        turn_step_row(entries, p, k_matrix, rows, r, cos_sin);
        if (rows.lane >> lanes_log2 == 0) {
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
#pragma unroll
                for (int i = 0; i < kVector; ++i) {
                    const int n = rows.state_of(v) + i;
                    if (n < dstate) {
                        store_from_float(q.state_k, k_index(r) + n, q.k_dtype, entries[v * kVector + i]);
                    }
                }
            }
        }
    }
    const float D = p.D != nullptr ? p.D[head] : 0.0f;
    const auto row_of_y = [&](int r, int i) {
        return fmaf(D, (weights != nullptr ? weights[r * headdim + i] : 1.0f) * v_of[i], y_of[r * headdim + i]);
    };
    float* const rstd = y_of + rank * headdim;
    if (p.norm_weight != nullptr) {
        for (int r = warp; r < rank; r += kWarps) {
            float squares = 0.0f;
            for (int i = rows.lane; i < headdim; i += 32) {
                const float y = row_of_y(r, i);
                squares = fmaf(y, y, squares);
            }
#pragma unroll
            for (int distance = 16; distance > 0; distance /= 2) {
                squares += __shfl_xor_sync(0xffffffffu, squares, distance);
            }
            if (rows.lane == 0) {
                rstd[r] = rsqrtf(squares / static_cast<float>(headdim) + p.norm_eps);
            }
        }
        __syncthreads();
    }
    for (int i = thread; i < headdim; i += kMamba3StepThreads) {
        const float z =
            p.z != nullptr ? load_as_float(p.z, batch * p.z_batch_stride + head * p.z_head_stride + i, p.dtype) : 0.0f;
        const int64_t to = batch * p.out_batch_stride + head * p.out_head_stride + i;
        float out = 0.0f;
        for (int r = 0; r < rank; ++r) {
            const int64_t weight = (head * p.rank + r) * p.headdim + i;
            float y = row_of_y(r, i);
            if (p.norm_weight != nullptr) {
                y *= rstd[r] * p.norm_weight[head * p.headdim + i];
            }
            if (p.z != nullptr) {
                y *= silu(p.mimo_z != nullptr ? z * p.mimo_z[weight] : z);
            }
            if (p.mimo_out == nullptr) {
                store_from_float(p.out, to + r * p.out_rank_stride, p.dtype, y);
            } else {
                out = fmaf(y, p.mimo_out[weight], out);
            }
        }
        if (p.mimo_out != nullptr) {
            store_from_float(p.out, to, p.dtype, out);
        }
    }
}

template <class Rows, int kRanks>
cudaError_t launch_mamba3_step_rows(const MambaMamba3Step& q) {
    const MambaMamba3& p = q.scan;
    const int lanes_log2 = ceil_log2(ceil_div(p.dstate, Rows::kStates), ceil_log2(Rows::kRows, 0, 5), 5);
    const int64_t shared = p.rank * (p.headdim + 1) * 4;
    const auto kernel = mamba3_step_kernel<Rows, kRanks>;
    const cudaError_t error = shared <= 40 * 1024
                                  ? cudaSuccess
                                  : cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                         cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
    if (error != cudaSuccess) {
        return error;
    }
    return launch_overlapping(kernel, static_cast<unsigned>(p.batch * p.nheads), kMamba3StepThreads,
                              static_cast<size_t>(shared), p.run.stream, q, lanes_log2);
}

// State: the dtype of the state.
template <typename State>
cudaError_t launch_mamba3_step(const MambaMamba3Step& q) {
    constexpr int kVector = 16 / static_cast<int>(sizeof(State));
    const MambaMamba3& p = q.scan;
    const bool one = p.rank == 1;
    if (p.dstate % kVector != 0 || !pointer_is_aligned(q.state_ssm, 16)) {
        return one ? launch_mamba3_step_rows<StateRows<State, 1, 1, 8>, 1>(q)
                   : launch_mamba3_step_rows<StateRows<State, 1, 1, 8>, 4>(q);
    }
    if constexpr (32 * kVector < MAMBA_MAX_DSTATE) {
        if (p.dstate > 32 * kVector) {
            return one ? launch_mamba3_step_rows<StateRows<State, kVector, 2, 2>, 1>(q)
                       : launch_mamba3_step_rows<StateRows<State, kVector, 2, 2>, 4>(q);
        }
    }
    return one ? launch_mamba3_step_rows<StateRows<State, kVector, 4, 1>, 1>(q)
               : launch_mamba3_step_rows<StateRows<State, kVector, 4, 1>, 4>(q);
}

}  // namespace mamba
