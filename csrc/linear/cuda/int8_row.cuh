// A linear layer of one row whose weight is int8, with an RMSNorm before it if there is one.
//
//     before the wait    a warp's first weights -> registers, as floats: no kernel of this library writes int8
//     after it           the row, its sum with the residual and its norm -> shared memory, in each block again
//     then               row by row of the weight; the next weights are on their way meanwhile
//
// Where all rows of the weight are begun before the wait and there is no norm, x goes to registers instead.
#pragma once

#include "common/cuda_int8.cuh"
#include "linear/cuda/sums.cuh"
#include "linear/kernels.h"

namespace mamba {

constexpr int kInt8RowSteps = 3;     // loads of a lane that are under way together: of 768 or 1536 features all
constexpr int kInt8RowResident = 3;  // blocks in a multiprocessor
constexpr int kNormQuads = MAMBA_MAX_LINEAR_NORM / (4 * kLinearThreads);  // of the row in a thread

// Lanes that share a row of the weight: so few that each has kInt8RowSteps loads, if they can.
inline int int8_row_lanes_log2(int64_t features) {
    return features <= 16 * kInt8RowSteps * kInt8Vector ? 4 : 5;
}

// A float of shared memory for each feature, so that neighbouring lanes read neighbouring vectors of four: a lane's chunks of
// kInt8Vector features are `lanes` apart.
struct Int8RowPlaces {
    int lanes_log2;

    __device__ __forceinline__ int of_chunk(int chunk, int quarter) const {
        const int step = chunk >> lanes_log2, part = chunk - (step << lanes_log2);
        return (((step * 4 + quarter) << lanes_log2) + part) * 4;
    }
    __device__ __forceinline__ int of_load(int chunk, int step, int quarter, int part) const {
        return of_chunk(chunk + (step << lanes_log2), quarter) + 4 * part;
    }
    __device__ __forceinline__ int of_feature(int feature) const {
        return of_chunk(feature / kInt8Vector, feature % kInt8Vector / 4);
    }
};

__device__ __forceinline__ void store_quad(float* to, const float (&values)[4]) {
    *reinterpret_cast<float4*>(to) = make_float4(values[0], values[1], values[2], values[3]);
}

// x, as floats in shared memory.
template <typename T>
__device__ __forceinline__ void stage_row(const MambaLinear& p, const Int8RowPlaces& places, float* row) {
#pragma unroll 2
    for (int feature = static_cast<int>(threadIdx.x) * 4; feature < p.in_features; feature += kLinearThreads * 4) {
        float values[4];
        unpack<T, 4>(packed_load<T, 4>(static_cast<const T*>(p.x) + feature), values);
        store_quad(row + places.of_feature(feature), values);
    }
    __syncthreads();
}

// RMSNorm of x + residual, rounded as the norm alone rounds: the sum to the residual's dtype, the result to T. The first block
// writes the sum.
template <typename T>
__device__ __forceinline__ void stage_normed_row(const MambaLinear& p, const Int8RowPlaces& places, float* row) {
    __shared__ float squares_of[kLinearWarps];
    const int first = static_cast<int>(threadIdx.x) * 4;
    Packed<T, 4> x_bits[kNormQuads];
    NeighbourBits<4> residual[kNormQuads], weight[kNormQuads];
#pragma unroll
    for (int i = 0; i < kNormQuads; ++i) {
        const int feature = first + i * kLinearThreads * 4;
        if (feature < p.in_features) {
            x_bits[i] = packed_load<T, 4>(static_cast<const T*>(p.x) + feature);
            residual[i].load(p.residual, feature, p.residual_dtype, p.residual != nullptr);
            weight[i].load(p.norm_weight, feature, p.norm_weight_dtype, true);
        }
    }
    float s[kNormQuads][4], squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kNormQuads; ++i) {
        const int feature = first + i * kLinearThreads * 4;
        if (feature < p.in_features) {
            float other[4];
            unpack<T, 4>(x_bits[i], s[i]);
            residual[i].to_floats(p.residual_dtype, other);
            with_dtype(p.residual_dtype, [&](auto of) {
                using Residual = typename decltype(of)::Type;
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    s[i][k] = to_float(from_float<Residual>(s[i][k] + other[k]));
                    squares = fmaf(s[i][k], s[i][k], squares);
                }
                if (blockIdx.x == 0) {
                    packed_store<Residual, 4>(static_cast<Residual*>(p.residual_out) + feature, pack<Residual, 4>(s[i]));
                }
            });
        }
    }
    squares = sum_over_warp(squares);
    if (threadIdx.x % 32 == 0) {
        squares_of[threadIdx.x / 32] = squares;
    }
    __syncthreads();
    squares = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kLinearWarps; ++warp) {
        squares += squares_of[warp];
    }
    const float rstd = rsqrtf(fmaf(squares, 1.0f / static_cast<float>(p.in_features), p.norm_eps));
#pragma unroll
    for (int i = 0; i < kNormQuads; ++i) {
        const int feature = first + i * kLinearThreads * 4;
        if (feature < p.in_features) {
            float parameter[4];
            weight[i].to_floats(p.norm_weight_dtype, parameter);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                s[i][k] = to_float(from_float<T>(s[i][k] * rstd * parameter[k]));
            }
            store_quad(row + places.of_feature(feature), s[i]);
        }
    }
    __syncthreads();
}

// Where a lane is: a row of the weight, and of its chunks the first that it loads. Warps walk alike, their rows past the last
// one are none.
struct Int8RowWalk {
    const MambaLinear& p;
    int lanes_log2, chunks, lanes, part, output, chunk = 0;

    __device__ __forceinline__ Int8RowWalk(const MambaLinear& p, int lanes_log2) : p(p), lanes_log2(lanes_log2) {
        const int lane = static_cast<int>(threadIdx.x) % 32, rows = 32 >> lanes_log2;
        chunks = static_cast<int>(p.in_features / kInt8Vector);
        lanes = 1 << lanes_log2;
        part = lane & (lanes - 1);
        output = static_cast<int>(blockIdx.x * kLinearWarps + threadIdx.x / 32) * rows + (lane >> lanes_log2);
    }
    __device__ __forceinline__ bool ended() const {
        return output - (static_cast<int>(threadIdx.x) % 32 >> lanes_log2) >= p.out_features;
    }
    __device__ __forceinline__ bool has(int step) const {
        return chunk + step * lanes + part < chunks && output < p.out_features;
    }
    __device__ __forceinline__ int feature(int step) const { return (chunk + step * lanes + part) * kInt8Vector; }
    // Whether these loads are the last of a row of the weight.
    __device__ __forceinline__ bool ends_row() const { return chunk + kInt8RowSteps * lanes >= chunks; }
    __device__ __forceinline__ void advance() {
        chunk += kInt8RowSteps * lanes;
        if (chunk >= chunks) {
            chunk = 0;
            output += static_cast<int>(gridDim.x) * (kLinearThreads >> lanes_log2);
        }
    }
    __device__ __forceinline__ void load_weights(Int8Bits (&bits)[kInt8RowSteps]) const {
        const int8_t* const row = static_cast<const int8_t*>(p.weight) + static_cast<int64_t>(output) * p.in_features;
#pragma unroll
        for (int step = 0; step < kInt8RowSteps; ++step) {
            bits[step] = {};
            if (has(step)) {
                bits[step] = packed_load<int8_t, kInt8Vector>(row + feature(step));
            }
        }
    }
    __device__ __forceinline__ const __half* scale_of(int step) const {
        return static_cast<const __half*>(p.scales) + static_cast<int64_t>(output) * scales_of_row(p.in_features) +
               feature(step) / MAMBA_INT8_BLOCK;
    }
    __device__ __forceinline__ void load_scales(__half (&scales)[kInt8RowSteps]) const {
#pragma unroll
        for (int step = 0; step < kInt8RowSteps; ++step) {
            scales[step] = has(step) ? *scale_of(step) : __float2half_rn(0.0f);
        }
    }
    __device__ __forceinline__ void prefetch_scales() const {
#pragma unroll
        for (int step = 0; step < kInt8RowSteps; ++step) {
            if (has(step)) {
                prefetch_to_L2(scale_of(step));
            }
        }
    }
    // The lane's weights times x, of which x_of(step, values) gives what belongs to one of its loads.
    template <class XOf>
    __device__ __forceinline__ float multiply(const float (&weights)[kInt8RowSteps][kInt8Vector],
                                              const __half (&scales)[kInt8RowSteps], const XOf& x_of) const {
        float sum = 0.0f;
#pragma unroll
        for (int step = 0; step < kInt8RowSteps; ++step) {
            if (has(step)) {
                float x[kInt8Vector], partial = 0.0f;
                x_of(step, x);
#pragma unroll
                for (int i = 0; i < kInt8Vector; ++i) {
                    partial = fmaf(weights[step][i], x[i], partial);
                }
                sum = fmaf(__half2float(scales[step]), partial, sum);
            }
        }
        return sum;
    }
    // Adds up the lanes' sums of a row and writes it.
    template <typename T>
    __device__ __forceinline__ void store(float sum) const {
        for (int distance = lanes / 2; distance > 0; distance /= 2) {
            sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        }
        if (part == 0 && output < p.out_features) {
            if (p.bias != nullptr) {
                sum += load_as_float(p.bias, output, p.bias_dtype);
            }
            static_cast<T*>(p.out)[output] = from_float<T>(sum);
        }
    }
};

__device__ __forceinline__ void dequantize(const Int8Bits (&bits)[kInt8RowSteps],
                                           float (&weights)[kInt8RowSteps][kInt8Vector]) {
#pragma unroll
    for (int step = 0; step < kInt8RowSteps; ++step) {
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter) {
            float four[4];
            unpack_int8(bits[step].word[quarter], four);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                weights[step][4 * quarter + i] = four[i];
            }
        }
    }
}

// Each warp takes one row of the weight, or two, by one load of each lane's steps.
template <typename T>
__global__ void __launch_bounds__(kLinearThreads, 2) linear_int8_short_row_kernel(const MambaLinear p, int lanes_log2) {
    const Int8RowWalk walk(p, lanes_log2);
    Int8Bits bits[kInt8RowSteps];
    float weights[kInt8RowSteps][kInt8Vector];
    __half scales[kInt8RowSteps];
    walk.load_weights(bits);
    walk.prefetch_scales();
    dequantize(bits, weights);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    Packed<T, kInt8Vector> x_bits[kInt8RowSteps];
#pragma unroll
    for (int step = 0; step < kInt8RowSteps; ++step) {
        if (walk.has(step)) {
            x_bits[step] = packed_load<T, kInt8Vector>(static_cast<const T*>(p.x) + walk.feature(step));
        }
    }
    walk.load_scales(scales);
    walk.store<T>(walk.multiply(weights, scales, [&](int step, float* x) { unpack<T, kInt8Vector>(x_bits[step], x); }));
}

// Warps walk over rows of the weight of any length; x, or its norm, is in shared memory.
template <typename T>
__global__ void __launch_bounds__(kLinearThreads, kInt8RowResident)
    linear_int8_row_kernel(const MambaLinear p, int lanes_log2) {
    MAMBA_DYNAMIC_SHARED(16, float, row);
    const Int8RowPlaces places = {lanes_log2};
    Int8RowWalk walk(p, lanes_log2);
    Int8Bits bits[kInt8RowSteps];
    float weights[kInt8RowSteps][kInt8Vector];
    __half scales[kInt8RowSteps];
    walk.load_weights(bits);
    walk.prefetch_scales();
    dequantize(bits, weights);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    walk.load_scales(scales);
    if (p.norm_weight != nullptr) {
        stage_normed_row<T>(p, places, row);
    } else {
        stage_row<T>(p, places, row);
    }
    float sum = 0.0f;
    while (true) {
        Int8RowWalk next = walk;
        __half next_scales[kInt8RowSteps];
        next.advance();
        next.load_weights(bits);
        next.load_scales(next_scales);
        sum += walk.multiply(weights, scales, [&](int step, float* x) {
#pragma unroll
            for (int quarter = 0; quarter < 4; ++quarter) {
                const float4 four =
                    *reinterpret_cast<const float4*>(row + places.of_load(walk.chunk, step, quarter, walk.part));
                x[4 * quarter] = four.x;
                x[4 * quarter + 1] = four.y;
                x[4 * quarter + 2] = four.z;
                x[4 * quarter + 3] = four.w;
            }
        });
        if (walk.ends_row()) {
            walk.store<T>(sum);
            sum = 0.0f;
        }
        if (next.ended()) {
            break;
        }
        dequantize(bits, weights);
#pragma unroll
        for (int step = 0; step < kInt8RowSteps; ++step) {
            scales[step] = next_scales[step];
        }
        walk.advance();
    }
}

}  // namespace mamba
