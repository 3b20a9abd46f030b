// One decoding step of Mamba-3, states in place: a block takes one head of one batch entry. The lanes of a warp lie along the
// states and keep their entries of q, k and the k before in registers, for kRanks rows at a time; the state goes through once.
//
//      all loads begin: rows of q and k (even warps k, odd ones q), dt and the like, angles, v, z; up to three tiles of states
//      a warp, to shared memory cosines and sines of the angles, v                    -> shared memory
//      ---- barrier
//      the rows, normed and rotated, and x = weight v        -> shared memory, the k before -> the cache
//      ---- barrier
//      each warp, tile by tile: h' = decay h + x k^T + x' k'^T -> the cache; y = h' q -> shared memory
//      ---- barrier
//      D, norm, gate, projection                             -> out
//
// Where the rows of all ranks do not fit shared memory (kAtOnce = false), the two phases between barriers take turns with the
// tiles, once for k and once for q.
#pragma once

#include "common/alignment.h"
#include "common/kernel_launch.cuh"
#include "mamba3/cuda/step/inputs.cuh"

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

// A warp's tiles of the state: on their way to shared memory, or where they are vectors of one element, in memory.
template <class Rows>
struct Mamba3StepTiles {
    using State = typename Rows::State;
    using Ring = StateRing<Rows, kMamba3StepDepth<Rows>>;
    const Rows& rows;
    const Ring ring;
    State* states;  // the head's
    int headdim, dstate, tile_rows, tiles;
    int slot_to, slot_from;

    __device__ __forceinline__ Mamba3StepTiles(const Rows& own_rows, unsigned char* memory, State* of_head, int rows_of_head,
                                               int columns)
        : rows(own_rows),
          ring(memory),
          states(of_head),
          headdim(rows_of_head),
          dstate(columns),
          tile_rows(own_rows.tile_rows()),
          tiles((rows_of_head + tile_rows - 1) / tile_rows),
          slot_to(0),
          slot_from(0) {}
    __device__ __forceinline__ StatePlace<State> place(int tile) const {
        StatePlace<State> place;
        place.first = states + static_cast<int64_t>(tile * tile_rows + rows.row_of(0)) * dstate;
        place.step = static_cast<int64_t>(dstate) << (5 - rows.lanes_log2);
        place.dstate_stride = 1;
        place.rows_left = headdim - tile * tile_rows;
        place.dstate = dstate;
        return place;
    }
    __device__ __forceinline__ void begin_copy(int tile) {
        if constexpr (Rows::kVector > 1) {
            if (tile < tiles) {
                const StatePlace<State> from = place(tile);
#pragma unroll
                for (int r = 0; r < Rows::kRows; ++r) {
#pragma unroll
                    for (int v = 0; v < Rows::kVectors; ++v) {
                        if (from.holds(rows, r, v)) {
                            ring.load(slot_to, r, v, from.at(rows, r, v));
                        }
                    }
                }
                slot_to = ring.after(slot_to);
            }
            cp_async_commit_group();
        }
    }
    // h of the next tile, times decay.
    __device__ __forceinline__ void read(float (&h)[Rows::kRows][Rows::kStates], const StatePlace<State>& from, float decay) {
        if constexpr (Rows::kVector > 1) {
            cp_async_wait_group<kMamba3StepDepth<Rows> - 1>();
        }
#pragma unroll
        for (int r = 0; r < Rows::kRows; ++r) {
#pragma unroll
            for (int v = 0; v < Rows::kVectors; ++v) {
                float* const values = h[r] + v * Rows::kVector;
#pragma unroll
                for (int i = 0; i < Rows::kVector; ++i) {
                    values[i] = 0.0f;
                }
                if (from.holds(rows, r, v)) {
                    if constexpr (Rows::kVector > 1) {
                        ring.read(slot_from, r, v, values);
                    } else {
                        *values = to_float(*from.at(rows, r, v));
                    }
                }
#pragma unroll
                for (int i = 0; i < Rows::kVector; ++i) {
                    values[i] *= decay;
                }
            }
        }
        if constexpr (Rows::kVector > 1) {
            slot_from = ring.after(slot_from);
        }
    }
};

// h += x k^T + x' k'^T of up to kRanks ranks, of `count` that exist. x: of the tile's first row in the first rank.
template <class Rows, int kRanks>
__device__ __forceinline__ void add_step_ranks(float (&h)[Rows::kRows][Rows::kStates], const float (&k)[kRanks][Rows::kStates],
                                               const float (&before)[kRanks][Rows::kStates], int count, const float2* x,
                                               int first_row, int headdim, const Rows& rows) {
#pragma unroll
    for (int j = 0; j < kRanks; ++j) {
        if (j < count) {
#pragma unroll
            for (int r = 0; r < Rows::kRows; ++r) {
                const int of = first_row + rows.row_of(r);
                const float2 by = x[j * headdim + (of < headdim ? of : 0)];
#pragma unroll
                for (int n = 0; n < Rows::kStates; ++n) {
                    h[r][n] = fmaf(by.x, k[j][n], fmaf(by.y, before[j][n], h[r][n]));
                }
            }
        }
    }
}

// y = h q of the same. y: of the head's first row.
template <class Rows, int kRanks>
__device__ __forceinline__ void find_step_rows(float* y, const float (&h)[Rows::kRows][Rows::kStates],
                                               const float (&q)[kRanks][Rows::kStates], int count, int first_row, int headdim,
                                               const Rows& rows) {
#pragma unroll
    for (int j = 0; j < kRanks; ++j) {
        if (j < count) {
            float sums[Rows::kRows];
#pragma unroll
            for (int r = 0; r < Rows::kRows; ++r) {
                sums[r] = 0.0f;
#pragma unroll
                for (int n = 0; n < Rows::kStates; ++n) {
                    sums[r] = fmaf(q[j][n], h[r][n], sums[r]);
                }
            }
            const float sum = rows.sum_to_owners(sums);
            const int of = first_row + rows.row_of(rows.part % Rows::kRows);
            if (rows.part < Rows::kRows && of < headdim) {
                y[j * headdim + of] = sum;
            }
        }
    }
}

// kInputs: the dtype of all that is not the state, whose ranks are kRanks, or kNoDtype: the call says. kAtOnce: the rows of all
// ranks fit shared memory together. Else they take turns, for each tile of the state again.
template <class Rows, int kRanks, bool kAtOnce, int32_t kInputs>
__global__ void __launch_bounds__(kMamba3StepThreads, (kMamba3StepBlocks<Rows, kRanks, kAtOnce>))
    mamba3_step_kernel(const MambaMamba3Step q, const Mamba3StepLayout layout) {
    using State = typename Rows::State;
    using Tiles = Mamba3StepTiles<Rows>;
    constexpr bool kProducts = kMamba3Products<Rows>;
    constexpr int kStates = Rows::kStates, kDepth = kMamba3StepDepth<Rows>;
    constexpr bool kKeepsQ = kRanks == 1 || kStates <= 4;  // in registers
    MAMBA_DYNAMIC_SHARED(16, unsigned char, memory);
    __shared__ float2 cos_sin[MAMBA_MAX_DSTATE / 2];
    __shared__ float v_of[MAMBA_MAX_HEADDIM], v_before[MAMBA_MAX_HEADDIM];
    const MambaMamba3& p = q.scan;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const Mamba3StepDtypes dtypes = kInputs != kNoDtype ? Mamba3StepDtypes::usual(kInputs) : Mamba3StepDtypes::of(q);
    const int rank = kRanks == 1 || kInputs != kNoDtype ? kRanks : static_cast<int>(p.rank);
    const int headdim = static_cast<int>(p.headdim), dstate = static_cast<int>(p.dstate);
    const uint32_t nheads = static_cast<uint32_t>(p.nheads), group_heads = nheads / static_cast<uint32_t>(p.ngroups);
    const int64_t index = blockIdx.x, batch = blockIdx.x / nheads, head = blockIdx.x % nheads;
    const int64_t group = static_cast<uint32_t>(head) / group_heads;
    const Rows rows(layout.lanes_log2);
    constexpr int kRingBytes = kMamba3StepWarps * Tiles::Ring::kWarpBytes;
    const Mamba3StepParts parts(memory + kRingBytes);
    const Mamba3StepShared shared(memory + kRingBytes + (kProducts ? Mamba3StepParts::kBytes : 0), layout, rank, headdim);
    Tiles tiles(rows, memory + warp * Tiles::Ring::kWarpBytes, static_cast<State*>(q.state_ssm) + index * headdim * p.dstate,
                headdim, dstate);
    if (layout.ahead) {  // the kernel before may still change them
        for (int tile = warp; tile < tiles.tiles; tile += kMamba3StepWarps) {
            tiles.place(tile).prefetch(rows);
        }
    }
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();

    // All loads first, so that one memory latency covers them: those that all else waits for, then the states.
    Mamba3StepRanks<Rows, kRanks, kAtOnce> ranks(q, dtypes, shared, parts, layout, batch, head, group, rank, rows.lane);
    if constexpr (kAtOnce) {
        ranks.begin(0);
    }
    const Mamba3StepRateBits rate_bits(q, dtypes, batch, head);
    const Mamba3StepAngle angle(q, dtypes, index, batch, head);
    const Mamba3StepChannels channels(q, dtypes, index, batch, head);
#pragma unroll 1
    for (int i = 0; i < kDepth; ++i) {
        tiles.begin_copy(warp + i * kMamba3StepWarps);
    }
    const Mamba3StepRates rates = rate_bits.rates(q, dtypes);
    angle.rotate(q, dtypes, index, rates.dt, cos_sin);
    channels.share(q, dtypes, index, v_of, v_before);
    if constexpr (kAtOnce) {
        ranks.hold(0, true, rates, cos_sin, v_of, v_before);
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
    for (int round = 0; round * kMamba3StepWarps < tiles.tiles; ++round) {
        const int tile = round * kMamba3StepWarps + warp, first_row = tile * tiles.tile_rows;
        if (kAtOnce && tile >= tiles.tiles) {
            break;
        }
        const StatePlace<State> place = tiles.place(tile);
        if constexpr (kProducts) {
            cp_async_wait_group<kDepth - 1>();
            advance_by_products(rows, place, tiles.ring, tiles.slot_from, shared, parts, headdim, first_row, rates.decay);
            tiles.slot_from = tiles.ring.after(tiles.slot_from);
        } else {
            float h[Rows::kRows][kStates];
            tiles.read(h, place, rates.decay);
            // Calls use(first rank of kRanks, end) with their rows in shared memory, the chunk from `begin` on.
            const auto each_rank = [&](bool writes, const auto& use) {
                for (int begin = 0; begin < rank; begin += kAtOnce ? rank : layout.held) {
                    const int end = ranks.end(begin);
                    if constexpr (!kAtOnce) {
                        ranks.begin(begin);
                        ranks.hold(begin, writes, rates, cos_sin, v_of, v_before);
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
                add_step_ranks<Rows, kRanks>(h, k_of, before, end - first, shared.x + (first - begin) * headdim, first_row,
                                             headdim, rows);
            });
            // In the last round all have read the k before.
            each_rank((round + 1) * kMamba3StepWarps >= tiles.tiles, [&](int begin, int first, int end) {
                if (!(in_registers && kKeepsQ)) {
                    read(q_of, shared.q, first - begin, end - begin);
                }
                find_step_rows<Rows, kRanks>(shared.y + first * headdim, h, q_of, end - first, first_row, headdim, rows);
            });
            store_rows(rows, place, h);
        }
        tiles.begin_copy(tile + kDepth * kMamba3StepWarps);
    }
    __syncthreads();
    finish_step(p, dtypes, rank, shared, batch, head, v_of, channels.z);
}

template <class Rows, int kRanks, bool kAtOnce, int32_t kInputs>
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
    const auto kernel = mamba3_step_kernel<Rows, kRanks, kAtOnce, kInputs>;
    const cudaError_t error = allow_shared(kernel, shared);
    if (error != cudaSuccess) {
        return error;
    }
    return launch_programmatic_dependent(kernel, p.batch * p.nheads, kMamba3StepThreads, static_cast<size_t>(shared),
                                         p.run.stream, q, layout);
}

// State: the dtype of the state.
template <typename State>
cudaError_t launch_mamba3_step(const MambaMamba3Step& q, int kernel, const DeviceLimits& device) {
    return launch_row<State, kMamba3StepKernels>(mamba3_step_table, kernel, [&](auto number) {
        constexpr const Mamba3StepKernel& row = kMamba3StepKernels[decltype(number)::kRow];
        constexpr int32_t kInputs = row.any_dtypes ? kNoDtype : mamba3_step_inputs(kDtype<State>);
        if constexpr (row.products) {
            return launch_mamba3_step_rows<Mamba3ProductRows<State>, row.ranks, true, kInputs>(q, device.processors, row.ranks);
        } else if constexpr (row.vectors > 0) {
            using Rows = StateRows<State, 16 / static_cast<int>(sizeof(State)), 4 / row.vectors, row.vectors>;
            return launch_mamba3_step_rows<Rows, row.ranks, true, kInputs>(q, device.processors, q.scan.rank);
        } else {
            const int64_t fit = kMamba3StepMostRows / mamba3_step_rank_bytes(q.scan);
            return launch_mamba3_step_rows<StateRows<State, 1, 1, 8>, row.ranks, false, kInputs>(
                q, device.processors, fit < q.scan.rank ? fit : q.scan.rank);
        }
    });
}

}  // namespace mamba
