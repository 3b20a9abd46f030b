// One decode step of a Mamba-2 layer on the GPU: convolution, state, output and gated norm.
#pragma once

#include "common/ptx_cluster.cuh"
#include "mamba2_step/cuda/inputs.cuh"

namespace mamba {

// A block takes some rows of the state of one group's heads, of one batch entry. It computes the convolution of their x and of
// the group's B and C, as do the group's other blocks: so nobody may shift these channels' window before all have read it.
template <class Rows, class Params>
__global__ void __launch_bounds__(kStepThreads, 4) mamba2_step_kernel(const Params p, const Mamba2StepLayout layout) {
    using State = typename Rows::State;
    constexpr int kVector = Rows::kVector, kRows = Rows::kRows, kVectors = Rows::kVectors;
    MAMBA_DYNAMIC_SHARED(16, unsigned char, memory);
    __shared__ uint64_t all_sent;  // the sums of the cluster's blocks
    const Rows rows(layout.lanes_log2);
    using Ring = StateRing<Rows, kStepDepth>;
    const int thread = static_cast<int>(threadIdx.x);
    const int warp = thread / 32;
    const int dstate = static_cast<int>(p.dstate);
    const Mamba2StepShared shared(memory + kStepWarps * Ring::kWarpBytes, layout.rows, dstate);
    const Ring ring(memory + warp * Ring::kWarpBytes);
    const uint32_t batch_group = layout.parts.quotient(blockIdx.x);
    const uint32_t part = blockIdx.x - batch_group * layout.parts.divisor;
    const int64_t batch = layout.groups.quotient(batch_group);
    const int64_t group = batch_group - batch * p.ngroups;
    const uint32_t group_heads = layout.group_heads;
    const uint32_t headdim = layout.headdim.divisor;
    const uint32_t first = part * layout.rows;  // of the group's rows
    const int left = static_cast<int>(group_heads * headdim - first);
    const int count = left < layout.rows ? left : layout.rows;
    const int64_t channels = p.nheads * p.headdim;
    const int64_t first_channel = group * group_heads * headdim + first;
    const int64_t zx = batch * p.zxBCdt_batch_stride;

    // The warp's rows, of this lane first and then each `row_step` of them: they follow each other, in one head or in several.
    const int tile_rows = rows.tile_rows(), row_step = 32 >> layout.lanes_log2;
    const int lane_row = warp * layout.warp_tiles * tile_rows + rows.row_of(0);
    int tiles = ceil_div(count - warp * layout.warp_tiles * tile_rows, tile_rows);
    tiles = tiles < layout.warp_tiles ? tiles : layout.warp_tiles;
    const uint32_t first_head = layout.headdim.quotient(first);
    State* states = static_cast<State*>(p.state) + batch * p.state_batch_stride +
                    (group * group_heads + first_head) * p.state_head_stride +
                    (first - first_head * headdim + lane_row) * p.state_dim_stride +
                    rows.state_of(0) * (kVector == 1 ? p.state_dstate_stride : 1);
    const int64_t lane_step = row_step * p.state_dim_stride;
    const int64_t vector_step = (kVector << layout.lanes_log2) * (kVector == 1 ? p.state_dstate_stride : 1);
    const auto holds = [&](int row, int v) { return Rows::kWhole || (row < count && rows.state_of(v) < dstate); };
    // Vector v of row r of this lane, of a tile at `first_row`.
    const auto place_of = [&](State* first_row, int r, int v) {
        if constexpr (Rows::kWhole) {
            return first_row + (r * kVectors + v) * (32 * kVector);
        } else {
            return first_row + r * lane_step + v * vector_step;
        }
    };

    // The kernel before may still run: the states come closer, but are not read, since that kernel may write them.
    if (kVector > 1 && layout.ahead && rows.part % (kCacheLine / 16) == 0) {
        State* place = states;
#pragma unroll 1
        for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
#pragma unroll
                for (int v = 0; v < kVectors; ++v) {
                    if (holds(lane_row + (tile * kRows + r) * row_step, v)) {
                        prefetch_to_L2(place_of(place, r, v));
                    }
                }
            }
            place += kRows * lane_step;
        }
    }
    const bool shares = layout.together && layout.parts.divisor > 1;
    if (shares && thread == 0) {
        mbarrier_init_cluster(&all_sent);
    }
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();

    // All loads first, so that one memory latency covers them: those that all else waits for, then the states.
    const auto channel_of_BC = [&](int n) {
        return channels + (n < dstate ? group * dstate + n : (p.ngroups + group - 1) * dstate + n);
    };
    State* next = states;
    int next_row = lane_row, next_slot = 0;
    const auto load_tile = [&](bool wanted) {
        if (wanted) {
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
#pragma unroll
                for (int v = 0; v < kVectors; ++v) {
                    if (holds(next_row + r * row_step, v)) {
                        ring.load(next_slot, r, v, place_of(next, r, v));
                    }
                }
            }
            next += kRows * lane_step;
            next_row += tile_rows;
            next_slot = ring.after(next_slot);
        }
        cp_async_commit_group();
    };
    const auto load_BC = [&](int n) {
        const int64_t channel = channel_of_BC(n);
        return load_conv_step(p, batch, channel, p.zxBCdt, zx + channels + channel);
    };
    const auto load_x = [&](int row) {
        return load_conv_step(p, batch, first_channel + row, p.zxBCdt, zx + channels + first_channel + row);
    };
    const auto load_of_row = [&](int row) {
        const uint32_t head = layout.headdim.quotient(first + row);
        return load_row(p, zx, static_cast<uint32_t>(group) * group_heads + head, first + row - head * headdim);
    };
    const auto finish_row = [&](int row, const ConvStepBits& conv, const HeadRowBits& bits) {
        const float x = conv_step(p, conv);
        store_conv_state(p, batch, first_channel + row, conv);
        float dt = softplus(float_from_bits(bits.dt, p.dtype) + float_from_bits(bits.dt_bias, p.dt_bias_dtype));
        dt = dt < p.dt_min ? p.dt_min : dt > p.dt_max ? p.dt_max : dt;  // a NaN stays
        const float A = exp2_fast(float_from_bits(bits.A, p.A_log_dtype) * kLog2e);
        shared.decay_dt_x[row] = make_float2(exp2_fast(-dt * kLog2e * A), dt * x);
        shared.y[row] = float_from_bits(bits.D, p.D_dtype) * x;
        shared.gate[row] = silu(float_from_bits(bits.z, p.dtype));
        shared.weight[row] = float_from_bits(bits.weight, p.norm_weight_dtype);
    };
    ConvStepBits BC_bits, x_bits;
    HeadRowBits row_bits;
    if (thread < 2 * dstate) {
        BC_bits = load_BC(thread);
    }
    if (thread < count) {
        x_bits = load_x(thread);
        row_bits = load_of_row(thread);
    }
    if (kVector > 1) {
#pragma unroll 1
        for (int tile = 0; tile < kStepDepth; ++tile) {
            load_tile(tile < tiles);
        }
    }
    if (thread < 2 * dstate) {
        shared.BC[thread] = conv_step(p, BC_bits);
    }
    if (thread < count) {
        finish_row(thread, x_bits, row_bits);
    }
    for (int n = thread + kStepThreads; n < 2 * dstate; n += kStepThreads) {
        shared.BC[n] = conv_step(p, load_BC(n));
    }
    for (int row = thread + kStepThreads; row < count; row += kStepThreads) {
        finish_row(row, load_x(row), load_of_row(row));
    }
    __syncthreads();
    if (shares) {
        if (thread == 0) {
            mbarrier_arrive_expect_tx_cluster(&all_sent, layout.parts.divisor * static_cast<uint32_t>(sizeof(float)));
        }
        cluster_arrive_relaxed();  // the convolution's state of B and C was read
    }

    float B[Rows::kStates], C[Rows::kStates];
#pragma unroll
    for (int i = 0; i < Rows::kStates; ++i) {
        const int n = rows.state_of(i / kVector) + i % kVector;
        B[i] = Rows::kWhole || n < dstate ? shared.BC[n] : 0.0f;
        C[i] = Rows::kWhole || n < dstate ? shared.BC[dstate + n] : 0.0f;
    }
    [[maybe_unused]] int slot = 0;
    int row = lane_row;  // of the tile's first
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
        float sums[kRows];
        if constexpr (kVector > 1) {
            cp_async_wait_group<kStepDepth - 1>();
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const float2 decay_dt_x =
                Rows::kWhole || row + r * row_step < count ? shared.decay_dt_x[row + r * row_step] : make_float2(0.0f, 0.0f);
            sums[r] = 0.0f;
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                const bool inside = holds(row + r * row_step, v);
                State* const place = place_of(states, r, v);
                float h[kVector];
                if constexpr (kVector > 1) {
                    ring.read(slot, r, v, h);
                } else {
                    h[0] = inside ? to_float(*place) : 0.0f;
                }
                const float sum =
                    advance<kVector, true>(h, decay_dt_x.x, decay_dt_x.y, nullptr, B + v * kVector, C + v * kVector);
                sums[r] += inside ? sum : 0.0f;  // beyond dstate h can be NaN
                if (inside) {
                    if constexpr (kVector > 1) {
                        packed_store_once<State, kVector>(place, pack<State, kVector>(h));
                    } else {
                        *place = from_float<State>(h[0]);
                    }
                }
            }
        }
        states += kRows * lane_step;
        if constexpr (kVector > 1) {
            slot = ring.after(slot);
            load_tile(tile + kStepDepth < tiles);
        }
        const float sum = rows.sum_to_owners(sums);
        const int own = row + rows.part % kRows * row_step;
        if (rows.part < kRows && own < count) {
            shared.y[own] += sum;
        }
        row += tile_rows;
    }
    __syncthreads();

    const int64_t out = batch * p.out_batch_stride + first_channel;
    const bool norm = layout.together && p.norm_weight != nullptr;
    if (!norm) {
        const bool gate = p.gate && p.norm_weight == nullptr;
        for (int row = thread; row < count; row += kStepThreads) {
            store_from_float(p.out, out + row, p.dtype, gate ? shared.y[row] * shared.gate[row] : shared.y[row]);
        }
    }
    if (!layout.together) {
        return;  // finish.cuh does the rest
    }
    // This block's share of the channels of B and C.
    const int share = static_cast<int>(layout.parts.divisor);
    int n = thread * share + static_cast<int>(part);
    ConvStepBits window;
    const auto load_window = [&] {
        if (n < 2 * dstate) {
            load_conv_window(p, batch, channel_of_BC(n), p.zxBCdt, zx + channels + channel_of_BC(n), window);
        }
    };
    load_window();
    if (norm) {
        float sum = 0.0f;
        for (int row = thread; row < count; row += kStepThreads) {
            float value = rounded(shared.y[row], p.dtype);
            value = p.norm_before_gate ? value : value * shared.gate[row];
            shared.y[row] = value;
            sum = fmaf(value, value, sum);
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
            sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        }
        if (thread % 32 == 0) {
            shared.sums[warp] = sum;
        }
        __syncthreads();
    }
    if (shares) {
        cluster_wait();
    }
    while (n < 2 * dstate) {
        store_conv_state(p, batch, channel_of_BC(n), window);
        n += kStepThreads * share;
        load_window();
    }
    if (!norm) {
        return;
    }
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kStepWarps; ++w) {
        sum += shared.sums[w];
    }
    if (shares) {
        if (thread < static_cast<int>(layout.parts.divisor)) {
            st_async_cluster(shared.cluster_sums + part, &all_sent, static_cast<uint32_t>(thread), sum);
        }
        mbarrier_wait_cluster(&all_sent);
        sum = 0.0f;
        for (uint32_t i = 0; i < layout.parts.divisor; ++i) {
            sum += shared.cluster_sums[i];
        }
    }
    const float rstd = rsqrtf(sum / static_cast<float>(group_heads * headdim) + p.norm_eps);
    for (int row = thread; row < count; row += kStepThreads) {
        float value = shared.y[row] * rstd * shared.weight[row];
        value = p.norm_before_gate ? value * shared.gate[row] : value;
        store_from_float(p.out, out + row, p.dtype, value);
    }
}

}  // namespace mamba
