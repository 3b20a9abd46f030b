// One decoding step of Mamba-3, states in place: a block takes one head of one batch entry. Its states are on their way to
// shared memory while q and k become the head's own. The lanes of a warp lie along the states and keep their entries of q, k
// and the k before in registers, for kRanks rows at a time; the state goes through once.
#pragma once

#include "common/alignment.h"
#include "mamba3/cuda/step_output.cuh"
#include "mamba3/cuda/step_products.cuh"

namespace mamba {

// A lane's entries of kRanks rows of shared memory, zero beyond dstate.
template <class Rows, int kRanks>
__device__ __forceinline__ void read_step_rows(float (&entries)[kRanks][Rows::kStates], const float* from, int pitch, int count,
                                               const Rows& rows, int dstate) {
#pragma unroll
    for (int j = 0; j < kRanks; ++j) {
#pragma unroll
        for (int v = 0; v < Rows::kVectors; ++v) {
            const int n = rows.state_of(v);
            const bool inside = j < count && n < dstate;
            constexpr int kWidth = Rows::kVector < 4 ? Rows::kVector : 4;
#pragma unroll
            for (int i = 0; i < Rows::kVector; i += kWidth) {
                const auto packed =
                    inside ? packed_load<float, kWidth>(from + j * pitch + n + i) : packed_zero<float, kWidth>();
                unpack<float, kWidth>(packed, entries[j] + v * Rows::kVector + i);
            }
        }
    }
}

constexpr int32_t kNoDtype = -1;

// Tiles of states that a warp has on their way.
template <class Rows>
constexpr int kMamba3StepDepth = kMamba3Products<Rows> ? 1 : 3;

// Blocks of a multiprocessor: few enough that registers suffice.
template <class Rows, int kRanks, bool kAtOnce>
constexpr int kMamba3StepBlocks = !kAtOnce                ? 2
                                  : kMamba3Products<Rows> ? 4
                                  : Rows::kStates > 4     ? 3
                                  : kRanks > 1            ? 4
                                                          : 5;

// kUsual: the dtype of the usual dtypes, whose ranks are kRanks, or kNoDtype. kAtOnce: the rows of all ranks fit shared memory
// together. Else they take turns, for each tile of the state again.
template <class Rows, int kRanks, bool kAtOnce, int32_t kUsual>
__global__ void __launch_bounds__(kMamba3StepThreads, (kMamba3StepBlocks<Rows, kRanks, kAtOnce>))
    mamba3_step_kernel(const MambaMamba3Step q, const Mamba3StepLayout layout) {
    using State = typename Rows::State;
    using Ring = StateRing<Rows, kMamba3StepDepth<Rows>>;
    constexpr bool kProducts = kMamba3Products<Rows>;
    constexpr int kVector = Rows::kVector, kRows = Rows::kRows, kVectors = Rows::kVectors, kStates = Rows::kStates;
    constexpr int kRowPairs = kProducts ? kMamba3ProductStates / 64 : kStates / 2;  // of q or k, in a lane
    constexpr int kRowsAtOnce = kRanks > 1 && kRowPairs <= 2 ? 2 : 1;               // in a warp
    constexpr bool kKeepsQ = kRanks == 1 || kStates <= 4;                           // in registers
    MAMBA_DYNAMIC_SHARED(16, unsigned char, memory);
    __shared__ float2 cos_sin[MAMBA_MAX_DSTATE / 2];
    __shared__ float v_of[MAMBA_MAX_HEADDIM], v_before[MAMBA_MAX_HEADDIM];
    const MambaMamba3& p = q.scan;
    const int thread = static_cast<int>(threadIdx.x);
    const int warp = thread / 32;
    const Mamba3StepDtypes dtypes = kUsual != kNoDtype ? Mamba3StepDtypes::usual(kUsual) : Mamba3StepDtypes::of(q);
    const int rank = kRanks == 1 || kUsual != kNoDtype ? kRanks : static_cast<int>(p.rank);
    const int headdim = static_cast<int>(p.headdim), dstate = static_cast<int>(p.dstate);
    const uint32_t nheads = static_cast<uint32_t>(p.nheads), group_heads = nheads / static_cast<uint32_t>(p.ngroups);
    const int64_t index = blockIdx.x;
    const int64_t batch = blockIdx.x / nheads, head = blockIdx.x % nheads;
    const int64_t group = static_cast<uint32_t>(head) / group_heads;
    const Rows rows(layout.lanes_log2);
    const Mamba3StepParts parts(memory + kMamba3StepWarps * Ring::kWarpBytes);
    const Mamba3StepShared shared(memory + kMamba3StepWarps * Ring::kWarpBytes + (kProducts ? Mamba3StepParts::kBytes : 0),
                                  layout, rank, headdim);
    [[maybe_unused]] const Ring ring(memory + warp * Ring::kWarpBytes);
    const int tile_rows = rows.tile_rows(), tiles = (headdim + tile_rows - 1) / tile_rows;
    const auto place_of = [&](int tile) {
        StatePlace<State> place;
        place.first = static_cast<State*>(q.state_ssm) + (index * headdim + tile * tile_rows + rows.row_of(0)) * p.dstate;
        place.step = p.dstate << (5 - layout.lanes_log2);
        place.dstate_stride = 1;
        place.rows_left = headdim - tile * tile_rows;
        place.dstate = dstate;
        return place;
    };
    if (layout.ahead) {  // the kernel before may still change them
        for (int tile = warp; tile < tiles; tile += kMamba3StepWarps) {
            place_of(tile).prefetch(rows);
        }
    }
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();

    // All loads first, so that one memory latency covers them: those that all else waits for, then the states.
    const Mamba3StepMatrix matrix(q, dtypes, warp % 2 == 0, batch, head, group);  // even warps have k, odd ones q
    Mamba3StepRow<kRowPairs> row[kRowsAtOnce];
    const auto load_rows = [&](int first, int end) {
#pragma unroll
        for (int j = 0; j < kRowsAtOnce; ++j) {
            if (first + 2 * j < end) {
                row[j].load(p, matrix, first + 2 * j, rows.lane);
            }
        }
    };
    const auto end_of_chunk = [&](int first) { return kAtOnce || first + layout.held > rank ? rank : first + layout.held; };
    if constexpr (kAtOnce) {
        load_rows(warp / 2, rank);
    }
    const Mamba3StepRateBits rate_bits(q, dtypes, batch, head);
    uint32_t angle = 0;
    float turned = 0.0f;
    if (thread < p.nangles) {
        const int64_t at = batch * p.angle_batch_stride + (p.angles_of_heads != 0 ? head * p.angle_head_stride : 0) + thread;
        angle = load_bits(p.angles, at, dtypes.angle);
        turned = q.state_angle[index * p.nangles + thread];
    }
    constexpr int kOwn = MAMBA_MAX_HEADDIM / kMamba3StepThreads;  // channels of a thread
    uint32_t v_bits[kOwn], v_before_bits[kOwn], z_bits[kOwn];
#pragma unroll
    for (int slot = 0; slot < kOwn; ++slot) {
        const int i = slot * kMamba3StepThreads + thread;
        v_bits[slot] = v_before_bits[slot] = z_bits[slot] = 0;
        if (i < headdim) {
            v_bits[slot] = load_bits(p.v, batch * p.v_batch_stride + head * p.v_head_stride + i, dtypes.x);
            v_before_bits[slot] = load_bits(q.state_v, index * headdim + i, dtypes.v);
            if (p.z != nullptr) {
                z_bits[slot] = load_bits(p.z, batch * p.z_batch_stride + head * p.z_head_stride + i, dtypes.x);
            }
        }
    }
    [[maybe_unused]] int slot_to = 0, slot_from = 0;
    const auto copy_tile = [&](int tile) {
        if constexpr (kVector > 1) {
            if (tile < tiles) {
                const StatePlace<State> place = place_of(tile);
#pragma unroll
                for (int r = 0; r < kRows; ++r) {
#pragma unroll
                    for (int v = 0; v < kVectors; ++v) {
                        if (place.holds(rows, r, v)) {
                            ring.load(slot_to, r, v, place.at(rows, r, v));
                        }
                    }
                }
                slot_to = ring.after(slot_to);
            }
            cp_async_commit_group();
        }
    };
#pragma unroll 1
    for (int i = 0; i < kMamba3StepDepth<Rows>; ++i) {
        copy_tile(warp + i * kMamba3StepWarps);
    }

    const Mamba3StepRates rates = rate_bits.rates(q, dtypes);
    if (thread < p.nangles) {
        const float turn = turn_of_step(0.5f * tanhf(float_from_bits(angle, dtypes.angle)), rates.dt);
        const uint32_t count = count_of_radians(turned) + count_of_turns(turn);
        // A count is never NaN.
        const float lost = turn == turn && turned == turned ? 0.0f : __int_as_float(0x7fffffff);
        const float2 found = cos_sin_of_turns(turns_of_count(count));
        cos_sin[thread] = make_float2(found.x + lost, found.y + lost);
        q.state_angle[index * p.nangles + thread] = radians_of_count(count) + lost;
    }
#pragma unroll
    for (int slot = 0; slot < kOwn; ++slot) {
        const int i = slot * kMamba3StepThreads + thread;
        if (i < headdim) {
            v_of[i] = float_from_bits(v_bits[slot], dtypes.x);
            v_before[i] = float_from_bits(v_before_bits[slot], dtypes.v);
            store_from_float(q.state_v, index * headdim + i, dtypes.v, v_of[i]);
        }
    }
    // The rows of the ranks from `first` on, whose loads are on their way, and what they are multiplied by.
    const auto hold = [&](int first, bool writes) {
        const int end = end_of_chunk(first);
        __syncthreads();  // cos_sin is there, and nobody needs the rows before
        for (int r = first + warp / 2; r < end; r += 2 * kRowsAtOnce) {
#pragma unroll
            for (int j = 0; j < kRowsAtOnce; ++j) {
                const int own = r + 2 * j;
                if (own < end) {
                    row[j].finish(p, matrix, own, rows.lane, cos_sin, writes, [&](int n, float value, float before) {
                        if constexpr (kProducts) {
                            parts.put(warp % 2 == 0, own, n, value, before);
                        } else {
                            const int at = (own - first) * layout.pitch + n;
                            if (warp % 2 == 0) {
                                shared.k[at] = value;
                                shared.before[at] = before;
                            } else {
                                shared.q[at] = value;
                            }
                        }
                    });
                }
            }
            load_rows(r + 2 * kRowsAtOnce, end);
        }
        for (int i = thread; i < headdim; i += kMamba3StepThreads) {
#pragma unroll 4
            for (int r = first; r < end; ++r) {
                const float weight = step_projection(p, dtypes.parameter, p.mimo_v, head, r, i);
                shared.x[(r - first) * headdim + i] =
                    make_float2(rates.gamma * (weight * v_of[i]), rates.decay * (rates.nu * (weight * v_before[i])));
            }
        }
        __syncthreads();
    };
    if constexpr (kAtOnce) {
        hold(0, true);
    }

    float q_of[kRanks][kStates], k_of[kRanks][kStates], before[kRanks][kStates];
    const auto read = [&](float(&entries)[kRanks][kStates], const float* held, int first, int end) {
        read_step_rows(entries, held + first * layout.pitch, layout.pitch, end - first, rows, dstate);
    };
    const bool in_registers = kAtOnce && rank <= kRanks;
    if (in_registers && !kProducts) {
        read(k_of, shared.k, 0, rank);
        read(before, shared.before, 0, rank);
        if (kKeepsQ) {
            read(q_of, shared.q, 0, rank);
        }
    }
#pragma unroll 1
    for (int round = 0; round * kMamba3StepWarps < tiles; ++round) {
        const int tile = round * kMamba3StepWarps + warp;
        if (kAtOnce && tile >= tiles) {
            break;
        }
        const StatePlace<State> place = place_of(tile);
        if constexpr (kProducts) {
            cp_async_wait_group<kMamba3StepDepth<Rows> - 1>();
            advance_by_products(rows, place, ring, slot_from, shared, parts, headdim, tile * tile_rows, rates.decay);
            slot_from = ring.after(slot_from);
            copy_tile(tile + kMamba3StepDepth<Rows> * kMamba3StepWarps);
            continue;
        }
        float h[kRows][kStates];
        if constexpr (kVector > 1) {
            cp_async_wait_group<kMamba3StepDepth<Rows> - 1>();
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                float* const values = h[r] + v * kVector;
#pragma unroll
                for (int i = 0; i < kVector; ++i) {
                    values[i] = 0.0f;
                }
                if (place.holds(rows, r, v)) {
                    if constexpr (kVector > 1) {
                        ring.read(slot_from, r, v, values);
                    } else {
                        *values = to_float(*place.at(rows, r, v));
                    }
                }
#pragma unroll
                for (int i = 0; i < kVector; ++i) {
                    values[i] *= rates.decay;
                }
            }
        }
        if constexpr (kVector > 1) {
            slot_from = ring.after(slot_from);
        }
        // Calls use(first rank of kRanks, end) with their rows in shared memory, the chunk from `begin` on.
        const auto each_rank = [&](bool writes, const auto& use) {
            for (int begin = 0; begin < rank; begin += kAtOnce ? rank : layout.held) {
                const int end = end_of_chunk(begin);
                if constexpr (!kAtOnce) {
                    load_rows(begin + warp / 2, end);
                    hold(begin, writes);
                }
                for (int first = begin; first < end; first += kRanks) {
                    use(begin, first, end);
                }
            }
        };
        each_rank(false, [&](int begin, int first, int end) {
            if (!in_registers) {
                read(k_of, shared.k, first - begin, end - begin);
                read(before, shared.before, first - begin, end - begin);
            }
#pragma unroll
            for (int j = 0; j < kRanks; ++j) {
                if (first + j < end) {
#pragma unroll
                    for (int r = 0; r < kRows; ++r) {
                        const int of = tile * tile_rows + rows.row_of(r);
                        const float2 x = shared.x[(first + j - begin) * headdim + (of < headdim ? of : 0)];
#pragma unroll
                        for (int n = 0; n < kStates; ++n) {
                            h[r][n] = fmaf(x.x, k_of[j][n], fmaf(x.y, before[j][n], h[r][n]));
                        }
                    }
                }
            }
        });
        // In the last round all have read the k before.
        each_rank((round + 1) * kMamba3StepWarps >= tiles, [&](int begin, int first, int end) {
            if (!(in_registers && kKeepsQ)) {
                read(q_of, shared.q, first - begin, end - begin);
            }
#pragma unroll
            for (int j = 0; j < kRanks; ++j) {
                if (first + j < end) {
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
                    const int of = tile * tile_rows + rows.row_of(rows.part % kRows);
                    if (rows.part < kRows && of < headdim) {
                        shared.y[(first + j) * headdim + of] = sum;
                    }
                }
            }
        });
        store_rows(rows, place, h);
        copy_tile(tile + kMamba3StepDepth<Rows> * kMamba3StepWarps);
    }
    __syncthreads();
    finish_step(p, dtypes, rank, shared, batch, head, v_of, z_bits);
}

template <class Rows, int kRanks, bool kAtOnce, int32_t kUsual>
cudaError_t launch_mamba3_step_rows(const MambaMamba3Step& q, int processors, int64_t held) {
    const MambaMamba3& p = q.scan;
    Mamba3StepLayout layout;
    constexpr bool kProducts = kMamba3Products<Rows>;
    layout.lanes_log2 = kProducts ? 2 : ceil_log2(ceil_div(p.dstate, Rows::kStates), ceil_log2(Rows::kRows, 0, 5), 5);
    layout.held = static_cast<int32_t>(held);
    layout.pitch = kProducts ? 0 : static_cast<int32_t>(mamba3_step_pitch(p));  // products have parts instead
    layout.ahead = p.batch * p.nheads <= int64_t{kMamba3StepBlocks<Rows, kRanks, kAtOnce>} * processors;
    const int64_t states = kMamba3StepWarps * StateRing<Rows, kMamba3StepDepth<Rows>>::kWarpBytes;
    const int64_t of_rows = kProducts ? Mamba3StepParts::kBytes + held * p.headdim * 8 : held * mamba3_step_rank_bytes(p);
    const int64_t shared = states + of_rows + mamba3_step_output_bytes(p);
    const auto kernel = mamba3_step_kernel<Rows, kRanks, kAtOnce, kUsual>;
    const cudaError_t error = allow_shared(kernel, shared);
    if (error != cudaSuccess) {
        return error;
    }
    return launch_programmatic_dependent(kernel, p.batch * p.nheads, kMamba3StepThreads, static_cast<size_t>(shared),
                                         p.run.stream, q, layout);
}

// Dtypes that are compiled in, which those of the call are. A float32 state's bytes take as long as its sums by ordinary cores:
// products were no faster.
template <typename State, class Rows, int32_t kUsual>
cudaError_t launch_mamba3_step_usual(const MambaMamba3Step& q, int processors) {
    if (q.scan.rank == 1) {
        return launch_mamba3_step_rows<Rows, 1, true, kUsual>(q, processors, 1);
    }
    if constexpr (sizeof(State) == 2) {
        return launch_mamba3_step_rows<Mamba3ProductRows<State>, 4, true, kUsual>(q, processors, 4);
    } else {
        return launch_mamba3_step_rows<Rows, 4, true, kUsual>(q, processors, 4);
    }
}

template <class Rows>
cudaError_t launch_mamba3_step_vectors(const MambaMamba3Step& q, int processors) {
    return q.scan.rank == 1 ? launch_mamba3_step_rows<Rows, 1, true, kNoDtype>(q, processors, 1)
                            : launch_mamba3_step_rows<Rows, 4, true, kNoDtype>(q, processors, q.scan.rank);
}

// State: the dtype of the state.
template <typename State>
cudaError_t launch_mamba3_step(const MambaMamba3Step& q, const DeviceLimits& limits) {
    const int processors = limits.processors;
    constexpr int kVector = 16 / static_cast<int>(sizeof(State));
    const MambaMamba3& p = q.scan;
    const int64_t rank_bytes = mamba3_step_rank_bytes(p), all = p.rank * rank_bytes;
    if (p.dstate % kVector != 0 || !pointer_is_aligned(q.state_ssm, 16) || all > kMamba3StepMostRows) {
        const int64_t held = all > kMamba3StepMostRows ? kMamba3StepMostRows / rank_bytes : p.rank;
        return launch_mamba3_step_rows<StateRows<State, 1, 1, 8>, 4, false, kNoDtype>(q, processors, held);
    }
    if constexpr (32 * kVector < MAMBA_MAX_DSTATE) {
        if (p.dstate > 32 * kVector) {
            return launch_mamba3_step_vectors<StateRows<State, kVector, 2, 2>>(q, processors);
        }
    }
    using Rows = StateRows<State, kVector, 4, 1>;
    // Before 8.0 there are no tensor cores for bfloat16.
    const bool multiplies = sizeof(State) > 2 || (p.dstate <= kMamba3ProductStates && limits.major >= 8);
    const bool ranks = p.rank == 1 || (p.rank == 4 && multiplies);
    if (ranks && Mamba3StepDtypes::of(q) == Mamba3StepDtypes::usual(kDtype<State>)) {
        return launch_mamba3_step_usual<State, Rows, kDtype<State>>(q, processors);
    }
    if constexpr (kDtype<State> == MAMBA_FLOAT32) {  // the state is wide and all else narrow, as the cache is allocated
        if (ranks && Mamba3StepDtypes::of(q) == Mamba3StepDtypes::usual(MAMBA_BFLOAT16)) {
            return launch_mamba3_step_usual<State, Rows, MAMBA_BFLOAT16>(q, processors);
        }
    }
    return launch_mamba3_step_vectors<Rows>(q, processors);
}

}  // namespace mamba
