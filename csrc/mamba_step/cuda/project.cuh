// A Mamba layer's decode step, first kernel: the convolution, and x_proj on tensor cores, cut into slices of channels whose
// sums update.cuh adds up.
#pragma once

#include "common/alignment.h"
#include "common/cuda_int8.cuh"
#include "mamba_step/cuda/params.cuh"
#include "mamba_step/plan.h"
#include "ssd/cuda/tensor_core.cuh"

namespace mamba {

constexpr int kProjectThreads = 256;
constexpr int kProjectWarps = kProjectThreads / 32;
constexpr int kProjectItems = kTileBatch * kTileChannels / kProjectThreads;  // of the convolution in a thread
constexpr int kLaneChannels = kTileChannels / 4;                             // of a tile: four lanes share a row of a fragment
constexpr int kPitch = kTileChannels + 4;
static_assert(kLaneChannels == kInt8Vector, "a lane's channels of an int8 weight are one access");

// Four lanes hold a row's channels of a tile, kLaneChannels neighbours each: the order in which a product sums is free, if it
// is the same for both sides. Pair i of these: channels 2 i and 2 i + 1.
template <typename T>
struct RowOfWeight {
    Packed<T, kLaneChannels> packed;

    __device__ __forceinline__ void load(const T* row, int64_t left, bool vectors) {
        if (left > 0) {
            packed = packed_load_padded<T, kLaneChannels>(row, left, vectors);
        } else {
            packed = packed_zero<T, kLaneChannels>();
        }
    }
    // Of an int8 weight: the bits until dequantize() turns them into elements of T, and their scale behind them.
    __device__ __forceinline__ void load_int8(const int8_t* row, const __half* scale, int64_t left, bool vectors) {
        Int8Bits bits = {};
        float own_scale = 0.0f;
        if (left > 0) {
            bits = mamba::load_int8(row, left, vectors);
            own_scale = __half2float(*scale);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            packed.word[i] = bits.word[i];
        }
        packed.word[4] = __float_as_uint(own_scale);
    }
    __device__ __forceinline__ void dequantize() {
        float values[kLaneChannels];
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter) {
            float four[4];
            unpack_int8(packed.word[quarter], four);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                values[4 * quarter + i] = four[i] * __uint_as_float(packed.word[4]);
            }
        }
        packed = pack<T, kLaneChannels>(values);
    }
    // Two neighbouring fragments: 16 channels each, of which the lane has four.
    __device__ __forceinline__ void operand(int i, Operand<T>& b) const {
        if constexpr (kIs16Bit<T>) {
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                b.r[0][pair] = packed.word[4 * i + pair];
            }
        } else {
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                const uint32_t* word = packed.word + 8 * i + 2 * pair;
                set_pair<T>(b, pair, __uint_as_float(word[0]), __uint_as_float(word[1]));
            }
        }
    }
};

// x (16 batch entries by 16 channels) in float32: of 16 bits it takes two parts to be as good as that.
template <typename T>
struct FragmentOfX {
    Operand<T> a, rest;

    __device__ __forceinline__ void set(int i, float low, float high) {
        set_pair<T>(a, i, low, high);
        if constexpr (kIs16Bit<T>) {
            const float2 taken = unpack2<T>(a.r[0][i]);
            set_pair<T>(rest, i, low - taken.x, high - taken.y);
        }
    }
    __device__ __forceinline__ void load(const float (&x)[kTileBatch][kPitch], int step) {
        const int g = static_cast<int>(threadIdx.x) % 32 / 4,
                  channel = static_cast<int>(threadIdx.x) % 4 * kLaneChannels + 4 * step;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float4 values = *reinterpret_cast<const float4*>(x[g + 8 * half] + channel);
            set(half, values.x, values.y);
            set(half + 2, values.z, values.w);
        }
    }
    __device__ __forceinline__ void multiply(float (&c)[4], const Operand<T>& pair, int fragment) const {
        if constexpr (kIs16Bit<T>) {
            multiply_add<T>(c, rest, pair, fragment);
        }
        multiply_add<T>(c, a, pair, fragment);
    }
};

// A block takes some tiles of channels, one after the other, of kTileBatch batch entries.
template <typename T, class Params>
__global__ void __launch_bounds__(kProjectThreads) step_project_kernel(const Params p, int64_t tiles, bool vectors) {
    static_assert(kTileBatch == 16, "the rows of a fragment");
    static_assert(kProjectThreads % kTileChannels == 0, "a thread's items are of one channel");
    __shared__ __align__(16) float x_of[kTileBatch][kPitch];
    const int thread = static_cast<int>(threadIdx.x);
    const int warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
    const int64_t outputs = step_outputs(p), pitch = step_pitch(p), slices = gridDim.x;
    const int64_t first_batch = grid_batch() * kTileBatch;
    if (first_batch >= p.batch) {
        return;
    }
    const int batches = p.batch - first_batch < kTileBatch ? static_cast<int>(p.batch - first_batch) : kTileBatch;
    float* const x_out = static_cast<float*>(p.workspace) + p.batch * slices * pitch;
    // Those of the lane's batch entries g and g + 8; the places for a row of the weight belong to one lane.
    float* const sums_out = static_cast<float*>(p.workspace) + ((first_batch + g) * slices + blockIdx.x) * pitch;

    const bool is_int8 = p.x_proj_scales != nullptr;
    // The kernel before may still run: the weight comes closer, but is not read, since that kernel may write it.
    for (int64_t row = thread; row < outputs; row += kProjectThreads) {
        const int64_t first = row * p.dim + blockIdx.x * tiles * kTileChannels;
        prefetch_to_L2(static_cast<const char*>(p.x_proj_weight) + first * static_cast<int64_t>(is_int8 ? 1 : sizeof(T)));
    }
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();

    for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t first_channel = (blockIdx.x * tiles + tile) * kTileChannels;
        const int64_t channel = first_channel + thread % kTileChannels;
        const int first_item = thread / kTileChannels;
        constexpr int kItemStep = kProjectThreads / kTileChannels;
        ConvStepBits bits[kProjectItems];
        if (channel < p.dim) {
            load_conv_taps(p, channel, bits[0]);
        }
#pragma unroll
        for (int i = 0; i < kProjectItems; ++i) {
            const int64_t batch = first_batch + first_item + i * kItemStep;
            if (batch < p.batch && channel < p.dim) {
                load_conv_window(p, batch, channel, p.xz, batch * p.xz_batch_stride + channel, bits[i]);
            }
        }
        const int64_t lane_channel = first_channel + t * kLaneChannels;
        const T* const weight = static_cast<const T*>(p.x_proj_weight) + lane_channel;
        const auto load_weight = [&](int64_t row) {
            RowOfWeight<T> loaded;
            const int64_t left = row < outputs ? p.dim - lane_channel : 0;
            if (is_int8) {
                const __half* const scales = static_cast<const __half*>(p.x_proj_scales) + row * scales_of_row(p.dim);
                loaded.load_int8(static_cast<const int8_t*>(p.x_proj_weight) + row * p.dim + lane_channel,
                                 scales + lane_channel / MAMBA_INT8_BLOCK, left, vectors);
            } else {
                loaded.load(weight + row * p.dim, left, vectors);
            }
            return loaded;
        };
        RowOfWeight<T> next = load_weight(warp * 8 + g);

        if (tile > 0) {
            __syncthreads();  // others may still read the last tile's x
        }
#pragma unroll
        for (int i = 0; i < kProjectItems; ++i) {
            const int b = first_item + i * kItemStep;
            float value = 0.0f;
            if (b < batches && channel < p.dim) {
                if (i > 0) {
                    bits[i].bias = bits[0].bias;
#pragma unroll
                    for (int lag = 0; lag < kConvMaxWidth; ++lag) {
                        bits[i].weight[lag] = bits[0].weight[lag];
                    }
                }
                value = conv_step(p, bits[i]);
                x_out[(first_batch + b) * p.dim + channel] = value;
                store_conv_state(p, first_batch + b, channel, bits[i]);
            }
            x_of[b][thread % kTileChannels] = value;
        }
        __syncthreads();

        // A warp takes eight rows of the weight at a time.
        for (int64_t first_row = warp * 8; first_row < outputs; first_row += kProjectWarps * 8) {
            RowOfWeight<T> rows = next;
            next = load_weight(first_row + kProjectWarps * 8 + g);
            if (is_int8) {
                rows.dequantize();
            }
            float sums[4] = {};
#pragma unroll
            for (int i = 0; i < kTileChannels / 32; ++i) {
                Operand<T> pair;
                rows.operand(i, pair);
#pragma unroll
                for (int fragment = 0; fragment < 2; ++fragment) {
                    FragmentOfX<T> x;
                    x.load(x_of, 2 * i + fragment);
                    x.multiply(sums, pair, fragment);
                }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int64_t row = first_row + 2 * t + i % 2;
                if (row < outputs && g + i / 2 * 8 < batches) {
                    float* const out = sums_out + i / 2 * 8 * slices * pitch + row;
                    *out = tile > 0 ? *out + sums[i] : sums[i];
                }
            }
        }
    }
}

// ---- host ------------------------------------------------------------------------------------------------------------

template <typename T, class Params>
cudaError_t launch_step_project(const Params& p) {
    const int64_t size = p.x_proj_scales != nullptr ? 1 : static_cast<int64_t>(sizeof(T));
    const bool vectors = rows_aligned(p.x_proj_weight, size, 16, p.dim);
    const Grid grid = batch_grid(step_slices(p), ceil_div(p.batch, static_cast<int64_t>(kTileBatch)));
    return launch_programmatic_dependent(step_project_kernel<T, Params>, grid, kProjectThreads, 0, p.run.stream, p,
                                         slice_tiles(p), vectors);
}

}  // namespace mamba
