// A Mamba layer's decode step, second kernel: dt_proj, the state, the output and its gate.
#pragma once

#include "causal_conv1d/cuda/step.cuh"
#include "common/alignment.h"
#include "mamba_step/plan.h"

namespace mamba {

constexpr int kUpdateThreads = 256;
constexpr int kUpdateLanes = 4;  // that share a channel
constexpr int kUpdateChannels = kUpdateThreads / kUpdateLanes;
constexpr int kUpdateBatch = 4;  // entries in a block, at most: they share the weights
constexpr int kRun = 4;          // neighbouring states (or of dt's rank) in a lane
constexpr int kStride = kRun * kUpdateLanes;
constexpr int kWeightRuns = 4;              // of a row of dt_proj that are loaded ahead
constexpr int64_t kMostShared = 48 * 1024;  // that a block may have without asking

// What the launcher found out about the tensors.
struct StepUpdateLayout {
    int32_t batches;  // entries in a block
    int32_t groups;   // of threads that share out the slices
    bool state_runs;  // runs of four neighbours are aligned
    bool A_runs;
    bool weight_runs;
};

// With a state of the same dtype, in whole runs.
template <typename T>
struct UsualMambaStep : UsualConvolution<MambaMambaStep, T> {
    static constexpr int32_t state_dtype = kDtype<T>;

    static bool fits(const MambaMambaStep& p, const StepUpdateLayout& layout) {
        return UsualConvolution<MambaMambaStep, T>::fits(p) && p.state_dtype == state_dtype && layout.state_runs &&
               layout.A_runs && layout.weight_runs;
    }
};
template <class Params>
constexpr bool kUsual = true;
template <>
inline constexpr bool kUsual<MambaMambaStep> = false;

// Four neighbours as they lie in memory.
struct RunBits {
    uint32_t word[kRun];
};

__device__ __forceinline__ RunBits load_run(const void* data, int64_t offset, int64_t stride, int first, int size,
                                            int32_t dtype, bool aligned) {
    RunBits bits = {};
    if (aligned) {  // size is then a multiple of four
        if (first < size) {
            if (dtype == MAMBA_FLOAT32) {
                const uint4 words = *reinterpret_cast<const uint4*>(static_cast<const float*>(data) + offset + first);
                bits.word[0] = words.x;
                bits.word[1] = words.y;
                bits.word[2] = words.z;
                bits.word[3] = words.w;
            } else {
                const uint2 words = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(data) + offset + first);
                bits.word[0] = words.x & 0xffffu;
                bits.word[1] = words.x >> 16;
                bits.word[2] = words.y & 0xffffu;
                bits.word[3] = words.y >> 16;
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < kRun; ++i) {
            if (first + i < size) {
                bits.word[i] = load_bits(data, offset + (first + i) * stride, dtype);
            }
        }
    }
    return bits;
}

__device__ __forceinline__ void store_run(void* data, int64_t offset, int64_t stride, int first, int size, int32_t dtype,
                                          bool aligned, const float* values) {
    if (aligned) {
        if (first < size) {
            if (dtype == MAMBA_FLOAT32) {
                packed_store<float, kRun>(static_cast<float*>(data) + offset + first, pack<float, kRun>(values));
            } else if (dtype == MAMBA_FLOAT16) {
                packed_store<__half, kRun>(static_cast<__half*>(data) + offset + first, pack<__half, kRun>(values));
            } else {
                packed_store<__nv_bfloat16, kRun>(static_cast<__nv_bfloat16*>(data) + offset + first,
                                                  pack<__nv_bfloat16, kRun>(values));
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < kRun; ++i) {
            if (first + i < size) {
                store_from_float(data, offset + (first + i) * stride, dtype, values[i]);
            }
        }
    }
}

// Four of a row of sums in shared memory, zeros beyond `left`. kWhole: they are all there, at a multiple of 16 bytes.
template <bool kWhole>
__device__ __forceinline__ void load_projected(const float* row, int left, float (&values)[kRun]) {
    if constexpr (kWhole) {
        const float4 run = *reinterpret_cast<const float4*>(row);
        values[0] = run.x;
        values[1] = run.y;
        values[2] = run.z;
        values[3] = run.w;
    } else {
#pragma unroll
        for (int i = 0; i < kRun; ++i) {
            values[i] = i < left ? row[i] : 0.0f;
        }
    }
}

__device__ __forceinline__ float sum_over_lanes(float value) {
#pragma unroll
    for (int distance = kUpdateLanes / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    }
    return value;
}

// kUpdateLanes lanes share a channel of up to kUpdateBatch batch entries. What does not depend on the kernel before is loaded
// before that has ended.
template <typename T, class Params>
__global__ void __launch_bounds__(kUpdateThreads, 3)
    step_update_kernel(const Params p, const StepUpdateLayout layout, int64_t slices) {
    const bool state_runs = kUsual<Params> || layout.state_runs, A_runs = kUsual<Params> || layout.A_runs,
               weight_runs = kUsual<Params> || layout.weight_runs;
    static_assert(kUpdateBatch == kUpdateLanes, "a lane finishes one batch entry");
    MAMBA_DYNAMIC_SHARED(16, float, projected);  // (groups, batches, pitch): first each group's sums, then those of all
    const int thread = static_cast<int>(threadIdx.x);
    const int sublane = thread % kUpdateLanes;
    const int64_t first_batch = (static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * layout.batches;
    if (first_batch >= p.batch) {
        return;
    }
    const int batches = p.batch - first_batch < layout.batches ? static_cast<int>(p.batch - first_batch) : layout.batches;
    int64_t channel = static_cast<int64_t>(blockIdx.x) * kUpdateChannels + thread / kUpdateLanes;
    const bool active = channel < p.dim;  // idle lanes stay for the shuffles
    channel = active ? channel : p.dim - 1;
    const int dstate = static_cast<int>(p.dstate), rank = static_cast<int>(p.dt_rank);
    const int pitch = static_cast<int>(step_pitch(p));

    RunBits state_bits[kUpdateBatch];
    const auto state_offset = [&](int b) { return (first_batch + b) * p.state_batch_stride + channel * p.state_dim_stride; };
    const auto load_states = [&](int first) {
#pragma unroll
        for (int b = 0; b < kUpdateBatch; ++b) {
            if (b < batches) {
                state_bits[b] =
                    load_run(p.state, state_offset(b), p.state_dstate_stride, first, dstate, p.state_dtype, state_runs);
            }
        }
    };
    load_states(sublane * kRun);
    RunBits A_bits = load_run(p.A_log, channel * dstate, 1, sublane * kRun, dstate, p.A_log_dtype, A_runs);
    const int own = sublane < batches ? sublane : 0;  // the batch entry that this lane finishes
    const int64_t xz = (first_batch + own) * p.xz_batch_stride;
    const float z = to_float(static_cast<const T*>(p.xz)[xz + p.dim + channel]);
    const float D = load_as_float(p.D, channel, p.D_dtype);
    const float bias = p.dt_bias != nullptr ? load_as_float(p.dt_bias, channel, p.dt_bias_dtype) : 0.0f;
    const int32_t dtype = p.dtype;
    const auto load_weight = [&](int first) {
        return load_run(p.dt_proj_weight, channel * rank, 1, first, rank, dtype, weight_runs);
    };
    RunBits weight_bits[kWeightRuns];
#pragma unroll
    for (int run = 0; run < kWeightRuns; ++run) {
        weight_bits[run] = load_weight(run * kStride + sublane * kRun);
    }

    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const float* const sums_in = static_cast<const float*>(p.workspace) + first_batch * slices * pitch;
    const float* const x_in = static_cast<const float*>(p.workspace) + p.batch * slices * pitch;
    float x[kUpdateBatch];
#pragma unroll
    for (int b = 0; b < kUpdateBatch; ++b) {
        x[b] = b < batches ? x_in[(first_batch + b) * p.dim + channel] : 0.0f;
    }
    const int quads = pitch / 4, all_quads = batches * quads;
    for (int i = thread; i < layout.groups * all_quads; i += kUpdateThreads) {
        const int group = i / all_quads, b = i / quads - group * batches, quad = i % quads;
        const float4* const parts = reinterpret_cast<const float4*>(sums_in + b * slices * pitch) + quad;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
        for (int64_t slice = group; slice < slices; slice += layout.groups) {
            const float4 part = parts[slice * quads];
            sum.x += part.x;
            sum.y += part.y;
            sum.z += part.z;
            sum.w += part.w;
        }
        reinterpret_cast<float4*>(projected)[i] = sum;
    }
    __syncthreads();
    if (layout.groups > 1) {
        const int all = batches * pitch;
        for (int i = thread; i < all; i += kUpdateThreads) {
            float sum = projected[i];
            for (int group = 1; group < layout.groups; ++group) {
                sum += projected[group * all + i];
            }
            projected[i] = sum;
        }
        __syncthreads();
    }

    float dt[kUpdateBatch] = {};
    const auto add_run = [&](int first, const RunBits& weights) {
        if (first < rank) {
#pragma unroll
            for (int b = 0; b < kUpdateBatch; ++b) {
                if (b < batches) {
                    float values[kRun];
                    load_projected<kUsual<Params>>(projected + b * pitch + first, rank - first, values);
#pragma unroll
                    for (int i = 0; i < kRun; ++i) {
                        dt[b] = fmaf(float_from_bits(weights.word[i], dtype), values[i], dt[b]);
                    }
                }
            }
        }
    };
#pragma unroll
    for (int run = 0; run < kWeightRuns; ++run) {
        add_run(run * kStride + sublane * kRun, weight_bits[run]);
    }
    for (int first = kWeightRuns * kStride + sublane * kRun; first < rank; first += kStride) {
        add_run(first, load_weight(first));
    }
#pragma unroll
    for (int b = 0; b < kUpdateBatch; ++b) {
        dt[b] = softplus(sum_over_lanes(dt[b]) + bias);
    }
    float y[kUpdateBatch] = {};
    for (int first = sublane * kRun; first < dstate; first += kStride) {
        if (first >= kStride) {
            load_states(first);
            A_bits = load_run(p.A_log, channel * dstate, 1, first, dstate, p.A_log_dtype, A_runs);
        }
        float A[kRun];
#pragma unroll
        for (int i = 0; i < kRun; ++i) {
            A[i] = -kLog2e * exp2_fast(float_from_bits(A_bits.word[i], p.A_log_dtype) * kLog2e);
        }
#pragma unroll
        for (int b = 0; b < kUpdateBatch; ++b) {
            if (b < batches) {
                float B[kRun], C[kRun], h[kRun];
                load_projected<kUsual<Params>>(projected + b * pitch + rank + first, dstate - first, B);
                load_projected<kUsual<Params>>(projected + b * pitch + rank + dstate + first, dstate - first, C);
#pragma unroll
                for (int i = 0; i < kRun; ++i) {
                    h[i] = 0.0f;
                    if (kUsual<Params> || first + i < dstate) {
                        const float old = float_from_bits(state_bits[b].word[i], p.state_dtype);
                        h[i] = fmaf(exp2_fast(dt[b] * A[i]), old, dt[b] * x[b] * B[i]);
                        y[b] = fmaf(C[i], h[i], y[b]);
                    }
                }
                if (active) {
                    store_run(p.state, state_offset(b), p.state_dstate_stride, first, dstate, p.state_dtype, state_runs, h);
                }
            }
        }
    }
    float own_y = 0.0f, own_x = 0.0f;
#pragma unroll
    for (int b = 0; b < kUpdateBatch; ++b) {
        const float sum = sum_over_lanes(y[b]);
        own_y = b == sublane ? sum : own_y;
        own_x = b == sublane ? x[b] : own_x;
    }
    if (active && sublane < batches) {
        const float value = fmaf(D, own_x, own_y) * silu(z);
        static_cast<T*>(p.out)[(first_batch + own) * p.out_batch_stride + channel] = from_float<T>(value);
    }
}

// ---- host ------------------------------------------------------------------------------------------------------------

template <typename T>
StepUpdateLayout step_update_layout(const MambaMambaStep& p) {
    const int64_t size = static_cast<int64_t>(sizeof(T)), state_size = dtype_size(p.state_dtype),
                  A_size = dtype_size(p.A_log_dtype);
    StepUpdateLayout layout;
    const int64_t row_bytes = step_pitch(p) * static_cast<int64_t>(sizeof(float));
    static_assert((MAMBA_MAX_DT_RANK + 2 * MAMBA_MAX_DSTATE) * sizeof(float) <= kMostShared, "one batch entry fits");
    const int64_t fit = kMostShared / row_bytes < kUpdateBatch ? kMostShared / row_bytes : kUpdateBatch;
    layout.batches = static_cast<int32_t>(p.batch < fit ? p.batch : fit);
    const int64_t groups = kUpdateThreads / (layout.batches * step_pitch(p) / 4), slices = step_slices(p);
    layout.groups = static_cast<int32_t>(groups < 1 ? 1 : groups < slices ? groups : slices);
    layout.state_runs = p.dstate % kRun == 0 && p.state_dstate_stride == 1 &&
                        rows_aligned(p.state, state_size, kRun * state_size, used_stride(p.batch, p.state_batch_stride),
                                     used_stride(p.dim, p.state_dim_stride));
    layout.A_runs = p.dstate % kRun == 0 && pointer_is_aligned(p.A_log, kRun * A_size);
    layout.weight_runs = p.dt_rank % kRun == 0 && pointer_is_aligned(p.dt_proj_weight, kRun * size);
    return layout;
}

template <typename T, class Params>
cudaError_t launch_step_update(const Params& p, const StepUpdateLayout& layout) {
    const Grid grid = batch_grid(ceil_div(p.dim, static_cast<int64_t>(kUpdateChannels)),
                                 ceil_div(p.batch, static_cast<int64_t>(layout.batches)));
    const size_t shared = static_cast<size_t>(layout.groups * layout.batches * step_pitch(p)) * sizeof(float);
    return launch_programmatic_dependent(step_update_kernel<T, Params>, grid, kUpdateThreads, shared, p.run.stream, p, layout,
                                         step_slices(p));
}

}  // namespace mamba
