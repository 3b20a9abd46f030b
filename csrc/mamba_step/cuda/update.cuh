// A Mamba layer's decode step, second kernel: dt_proj, the state, the output and its gate.
#pragma once

#include "mamba_step/cuda/params.cuh"
#include "mamba_step/kernels.h"
#include "mamba_step/plan.h"

namespace mamba {

constexpr int kUpdateThreads = 256;
constexpr int kUpdateLanes = 4;  // that share a channel
constexpr int kUpdateChannels = kUpdateThreads / kUpdateLanes;
constexpr int kUpdateBatch = 4;  // entries in a block, at most: they share the weights
constexpr int kStride = kStepRun * kUpdateLanes;
// Runs of a row of dt_proj that are loaded ahead.
template <class Params>
constexpr int kWeightRuns = 4;
template <>
inline constexpr int kWeightRuns<MambaMambaStep> = 1;
constexpr int64_t kMostShared = 48 * 1024;  // that a block may have without asking

// What the launcher found out about the tensors.
struct StepUpdateLayout {
    int32_t batches;  // entries in a block
    int32_t groups;   // of threads that share out the slices
    bool runs;        // has_aligned_runs
};

// Four neighbours of `size`, as they lie in memory.
using RunBits = NeighbourBits<kStepRun>;

__device__ __forceinline__ RunBits load_run(const void* data, int64_t offset, int64_t stride, int first, int size,
                                            int32_t dtype, bool aligned) {
    RunBits bits;
    if (aligned) {  // size is then a multiple of four
        bits.load(data, offset + first, dtype, first < size);
    } else {
        bits.gather(data, offset + first * stride, stride, dtype, size - first);
    }
    return bits;
}

__device__ __forceinline__ void store_run(void* data, int64_t offset, int64_t stride, int first, int size, int32_t dtype,
                                          bool aligned, const float* values) {
    with_dtype(dtype, [&](auto of) {
        using T = typename decltype(of)::Type;
        T* const to = static_cast<T*>(data) + offset + first * stride;
        if (!aligned) {
            scatter<T, kStepRun>(to, stride, size - first, values);
        } else if (first < size) {
            packed_store<T, kStepRun>(to, pack<T, kStepRun>(values));
        }
    });
}

// Four of a row of sums in shared memory, zeros beyond `left`. kWhole: they are all there, at a multiple of 16 bytes.
template <bool kWhole>
__device__ __forceinline__ void load_projected(const float* row, int left, float (&values)[kStepRun]) {
    if constexpr (kWhole) {
        const float4 run = *reinterpret_cast<const float4*>(row);
        values[0] = run.x;
        values[1] = run.y;
        values[2] = run.z;
        values[3] = run.w;
    } else {
#pragma unroll
        for (int i = 0; i < kStepRun; ++i) {
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

// A lane's place: kUpdateLanes lanes share a channel of up to kUpdateBatch batch entries.
template <class Params>
struct StepUpdatePlace {
    static constexpr bool kWhole = kIsOneDtype<Params>;

    const Params& p;
    int64_t first_batch, channel;
    int batches;
    const int sublane, dstate, rank, pitch;
    bool active, runs;  // active: of a channel; idle lanes stay for the shuffles

    __device__ __forceinline__ StepUpdatePlace(const Params& p, const StepUpdateLayout& layout)
        : p(p),
          first_batch(grid_batch() * layout.batches),
          channel(static_cast<int64_t>(blockIdx.x) * kUpdateChannels + threadIdx.x / kUpdateLanes),
          sublane(static_cast<int>(threadIdx.x) % kUpdateLanes),
          dstate(static_cast<int>(p.dstate)),
          rank(static_cast<int>(p.dt_rank)),
          pitch(static_cast<int>(step_pitch(p))),
          active(channel < p.dim),
          runs(kWhole || layout.runs) {
        const int64_t left = p.batch - first_batch;
        batches = left < layout.batches ? static_cast<int>(left) : layout.batches;
        channel = active ? channel : p.dim - 1;
    }
    // Of one batch entry and any channel.
    __device__ __forceinline__ StepUpdatePlace(const Params& p, int64_t batch, int64_t channel, bool active)
        : p(p),
          first_batch(batch),
          channel(active ? channel : p.dim - 1),
          batches(1),
          sublane(static_cast<int>(threadIdx.x) % kUpdateLanes),
          dstate(static_cast<int>(p.dstate)),
          rank(static_cast<int>(p.dt_rank)),
          pitch(static_cast<int>(step_pitch(p))),
          active(active),
          runs(true) {}
    // The batch entry that this lane finishes.
    __device__ __forceinline__ int own() const { return sublane < batches ? sublane : 0; }
    __device__ __forceinline__ int64_t state_offset(int b) const {
        return (first_batch + b) * p.state_batch_stride + channel * p.state_dim_stride;
    }
    __device__ __forceinline__ void load_states(int first, RunBits (&bits)[kUpdateBatch]) const {
#pragma unroll
        for (int b = 0; b < kUpdateBatch; ++b) {
            if (b < batches) {
                bits[b] = load_run(p.state, state_offset(b), p.state_dstate_stride, first, dstate, p.state_dtype, runs);
            }
        }
    }
    __device__ __forceinline__ RunBits load_A(int first) const {
        return load_run(p.A_log, channel * dstate, 1, first, dstate, p.A_log_dtype, runs);
    }
    __device__ __forceinline__ RunBits load_weight(int first) const {
        return load_run(p.dt_proj_weight, channel * rank, 1, first, rank, p.dtype, runs);
    }
};

// x_proj's sums of the block's batch entries (batches, pitch) in shared memory: the slices' parts in a fixed order, each group
// of threads some of them.
template <class Place>
__device__ __forceinline__ void add_slices(const Place& at, const StepUpdateLayout& layout, int64_t slices, float* projected) {
    const float* const sums = static_cast<const float*>(at.p.workspace) + at.first_batch * slices * at.pitch;
    const int thread = static_cast<int>(threadIdx.x), quads = at.pitch / 4, all_quads = at.batches * quads;
    for (int i = thread; i < layout.groups * all_quads; i += kUpdateThreads) {
        const int group = i / all_quads, b = i / quads - group * at.batches, quad = i % quads;
        const float4* const parts = reinterpret_cast<const float4*>(sums + b * slices * at.pitch) + quad;
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
        const int all = at.batches * at.pitch;
        for (int i = thread; i < all; i += kUpdateThreads) {
            float sum = projected[i];
            for (int group = 1; group < layout.groups; ++group) {
                sum += projected[group * all + i];
            }
            projected[i] = sum;
        }
        __syncthreads();
    }
}

// dt += a run of dt_proj's weight times x_proj's output.
template <class Place>
__device__ __forceinline__ void add_weight_run(const Place& at, const float* projected, int first, const RunBits& weights,
                                               float (&dt)[kUpdateBatch]) {
    if (first >= at.rank) {
        return;
    }
    float weight[kStepRun];
    weights.to_floats(at.p.dtype, weight);
#pragma unroll
    for (int b = 0; b < kUpdateBatch; ++b) {
        if (b < at.batches) {
            float values[kStepRun];
            load_projected<Place::kWhole>(projected + b * at.pitch + first, at.rank - first, values);
#pragma unroll
            for (int i = 0; i < kStepRun; ++i) {
                dt[b] = fmaf(weight[i], values[i], dt[b]);
            }
        }
    }
}

// One step of a run of states from `first` on, of all batch entries: the state in memory, and C . h added to y.
template <class Place>
__device__ __forceinline__ void advance_run(const Place& at, const float* projected, int first, const RunBits& A_bits,
                                            const RunBits (&state_bits)[kUpdateBatch], const float (&dt)[kUpdateBatch],
                                            const float (&x)[kUpdateBatch], float (&y)[kUpdateBatch]) {
    const auto& p = at.p;
    float A[kStepRun];
    A_bits.to_floats(p.A_log_dtype, A);
#pragma unroll
    for (int i = 0; i < kStepRun; ++i) {
        A[i] = -kLog2e * exp2_fast(A[i] * kLog2e);
    }
#pragma unroll
    for (int b = 0; b < kUpdateBatch; ++b) {
        if (b < at.batches) {
            float B[kStepRun], C[kStepRun], h[kStepRun];
            state_bits[b].to_floats(p.state_dtype, h);
            load_projected<Place::kWhole>(projected + b * at.pitch + at.rank + first, at.dstate - first, B);
            load_projected<Place::kWhole>(projected + b * at.pitch + at.rank + at.dstate + first, at.dstate - first, C);
#pragma unroll
            for (int i = 0; i < kStepRun; ++i) {
                if (Place::kWhole || first + i < at.dstate) {
                    h[i] = fmaf(exp2_fast(dt[b] * A[i]), h[i], dt[b] * x[b] * B[i]);
                    y[b] = fmaf(C[i], h[i], y[b]);
                }
            }
            if (at.active) {
                store_run(p.state, at.state_offset(b), p.state_dstate_stride, first, at.dstate, p.state_dtype, at.runs, h);
            }
        }
    }
}

// What does not depend on the kernel before is loaded before that has ended.
template <typename T, class Params>
__global__ void __launch_bounds__(kUpdateThreads, 3)
    step_update_kernel(const Params p, const StepUpdateLayout layout, int64_t slices) {
    static_assert(kUpdateBatch == kUpdateLanes, "a lane finishes one batch entry");
    MAMBA_DYNAMIC_SHARED(16, float, projected);  // (groups, batches, pitch): first each group's sums, then those of all
    const StepUpdatePlace<Params> at(p, layout);
    if (at.batches <= 0) {
        return;
    }
    const int first = at.sublane * kStepRun;
    RunBits state_bits[kUpdateBatch];
    at.load_states(first, state_bits);
    RunBits A_bits = at.load_A(first);
    const T* const z_row = static_cast<const T*>(p.xz) + p.dim + at.channel;
    const float z = to_float(z_row[(at.first_batch + at.own()) * p.xz_batch_stride]);
    const float D = load_as_float(p.D, at.channel, p.D_dtype);
    const float bias = p.dt_bias != nullptr ? load_as_float(p.dt_bias, at.channel, p.dt_bias_dtype) : 0.0f;
    RunBits weight_bits[kWeightRuns<Params>];
#pragma unroll
    for (int run = 0; run < kWeightRuns<Params>; ++run) {
        weight_bits[run] = at.load_weight(run * kStride + first);
    }

    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const float* const x_in = static_cast<const float*>(p.workspace) + p.batch * slices * at.pitch;
    float x[kUpdateBatch];
#pragma unroll
    for (int b = 0; b < kUpdateBatch; ++b) {
        x[b] = b < at.batches ? x_in[(at.first_batch + b) * p.dim + at.channel] : 0.0f;
    }
    add_slices(at, layout, slices, projected);

    float dt[kUpdateBatch] = {};
#pragma unroll
    for (int run = 0; run < kWeightRuns<Params>; ++run) {
        add_weight_run(at, projected, run * kStride + first, weight_bits[run], dt);
    }
    for (int n = kWeightRuns<Params> * kStride + first; n < at.rank; n += kStride) {
        add_weight_run(at, projected, n, at.load_weight(n), dt);
    }
#pragma unroll
    for (int b = 0; b < kUpdateBatch; ++b) {
        dt[b] = softplus(sum_over_lanes(dt[b]) + bias);
    }
    float y[kUpdateBatch] = {};
    for (int n = first; n < at.dstate; n += kStride) {
        if (n >= kStride) {
            at.load_states(n, state_bits);
            A_bits = at.load_A(n);
        }
        advance_run(at, projected, n, A_bits, state_bits, dt, x, y);
    }
    float own_y = 0.0f, own_x = 0.0f;
#pragma unroll
    for (int b = 0; b < kUpdateBatch; ++b) {
        const float sum = sum_over_lanes(y[b]);
        own_y = b == at.sublane ? sum : own_y;
        own_x = b == at.sublane ? x[b] : own_x;
    }
    if (at.active && at.sublane < at.batches) {
        const float value = fmaf(D, own_x, own_y) * silu(z);
        static_cast<T*>(p.out)[(at.first_batch + at.own()) * p.out_batch_stride + at.channel] = from_float<T>(value);
    }
}

// ---- host ------------------------------------------------------------------------------------------------------------

inline StepUpdateLayout step_update_layout(const MambaMambaStep& p) {
    StepUpdateLayout layout;
    const int64_t row_bytes = step_pitch(p) * static_cast<int64_t>(sizeof(float));
    static_assert((MAMBA_MAX_DT_RANK + 2 * MAMBA_MAX_DSTATE) * sizeof(float) <= kMostShared, "one batch entry fits");
    const int64_t fit = kMostShared / row_bytes < kUpdateBatch ? kMostShared / row_bytes : kUpdateBatch;
    layout.batches = static_cast<int32_t>(p.batch < fit ? p.batch : fit);
    const int64_t groups = kUpdateThreads / (layout.batches * step_pitch(p) / 4), slices = step_slices(p);
    layout.groups = static_cast<int32_t>(groups < 1 ? 1 : groups < slices ? groups : slices);
    layout.runs = has_aligned_runs(p);
    return layout;
}

template <typename T, class Params>
cudaError_t launch_step_update(const Params& p) {
    const StepUpdateLayout layout = step_update_layout(p);
    const Grid grid = batch_grid(ceil_div(p.dim, static_cast<int64_t>(kUpdateChannels)),
                                 ceil_div(p.batch, static_cast<int64_t>(layout.batches)));
    const size_t shared = static_cast<size_t>(layout.groups * layout.batches * step_pitch(p)) * sizeof(float);
    return launch_programmatic_dependent(step_update_kernel<T, Params>, grid, kUpdateThreads, shared, p.run.stream, p, layout,
                                         step_slices(p));
}

}  // namespace mamba
