// What every CUDA kernel and launcher shares: dtypes, fast math and launches.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "common/dtypes.cuh"
#include "common/integers.h"
#include "common/ptx.cuh"

namespace mamba {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

constexpr int kCacheLine = 128;

// ---- math ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float sigmoid(float x) {
    return reciprocal_fast(1.0f + exp2_fast(-x * kLog2e));
}

__device__ __forceinline__ float silu(float x) {
    return x * sigmoid(x);
}

// d silu(x) / dx, of silu(x) and sigmoid(x)
__device__ __forceinline__ float silu_slope(float silu_x, float sigmoid_x) {
    return fmaf(silu_x, 1.0f - sigmoid_x, sigmoid_x);
}
__device__ __forceinline__ float silu_slope(float x) {
    const float s = sigmoid(x);
    return silu_slope(x * s, s);
}

// Every lane gets the sum of all.
__device__ __forceinline__ float sum_over_warp(float value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    }
    return value;
}

// Sums kValues values over the lanes that differ in the bits kBit, kBit / 2, ..., kLow. While a lane holds several values,
// it hands half of them to its partner and keeps the other half, so that n values take n shuffles instead of n a bit.
template <int kValues, int kBit, int kLow, int kCapacity>
__device__ __forceinline__ void transpose_sum(float (&v)[kCapacity], int lane) {
    if constexpr (kBit >= kLow && kValues > 1) {
        constexpr int kHalf = kValues / 2;
        const bool high = (lane & kBit) != 0;
#pragma unroll
        for (int i = 0; i < kHalf; ++i) {
            const float keep = high ? v[i + kHalf] : v[i];
            const float give = high ? v[i] : v[i + kHalf];
            v[i] = keep + __shfl_xor_sync(0xffffffffu, give, kBit);
        }
        transpose_sum<kHalf, kBit / 2, kLow>(v, lane);
    } else if constexpr (kBit >= kLow) {
        v[0] += __shfl_xor_sync(0xffffffffu, v[0], kBit);
        transpose_sum<1, kBit / 2, kLow>(v, lane);
    }
}

// log(1 + e^x) = max(x, 0) + log1p(e) with e = e^-|x|. log1p(e) / e is a polynomial that differs by less than 7e-8 of its value
// on [0, 1] (least maximum), so that the relative error stays at a few ulp for very negative x too. No branch: torch's
// threshold of 20 makes no difference in float32.
__device__ __forceinline__ float softplus(float x) {
    const float e = exp2_fast(-fabsf(x) * kLog2e);
    float series = fmaf(e, 0.005232693627f, -0.02950523980f);
    series = fmaf(e, series, 0.07822596282f);
    series = fmaf(e, series, -0.1366324723f);
    series = fmaf(e, series, 0.1910600811f);
    series = fmaf(e, series, -0.2484298199f);
    series = fmaf(e, series, 0.3331909776f);
    series = fmaf(e, series, -0.4999949336f);
    series = fmaf(e, series, 0.9999999404f);
    return fmaf(e, series, fmaxf(x, 0.0f));
}

// The same by a shorter polynomial, which differs by less than 9e-6 of its value: for what is known to 16 bits.
__device__ __forceinline__ float softplus_short(float x) {
    const float e = exp2_fast(-fabsf(x) * kLog2e);
    float series = fmaf(e, -0.02386915165f, 0.1012222846f);
    series = fmaf(e, series, -0.2100486898f);
    series = fmaf(e, series, 0.3252066802f);
    series = fmaf(e, series, -0.4993613647f);
    series = fmaf(e, series, 0.9999915982f);
    return fmaf(e, series, fmaxf(x, 0.0f));
}

// What a step gives where the cache has no row of states. Padding is zero. A row beyond the cache cannot be reported from a
// kernel: NaN shows it, and nothing is overwritten.
__device__ __forceinline__ float output_without_state(int64_t row) {
    return row < 0 ? 0.0f : __int_as_float(0x7fffffff);
}

// ---- host ----------------------------------------------------------------------------------------------------------

// Whether kernels may start early on the current device: it can do that, and this code was compiled for it. All kernels of the
// library are compiled for the same architectures, so that any of them may be asked, once; that is a good part of a launch's
// time.
template <typename... Parameters>
cudaError_t supports_programmatic_dependent_launch(void (*kernel)(Parameters...), bool* answer) {
    static thread_local int asked_device = -1;
    static thread_local bool asked_answer = false;
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess && device != asked_device) {
        int driver = 0;
        cudaFuncAttributes compiled;
        error = cudaDriverGetVersion(&driver);
        if (error == cudaSuccess) {
            error = cudaFuncGetAttributes(&compiled, kernel);
        }
        if (error == cudaSuccess) {
            // ptxVersion is what __CUDA_ARCH__ was. CUDA graphs capture such a launch from 12.3 on.
            asked_answer = compiled.ptxVersion >= 90 && driver >= 12030;
            asked_device = device;
        }
    }
    *answer = asked_answer;
    return error;
}

// Lets a kernel have so many bytes of dynamic shared memory on the current device. A thread seldom asks the driver again.
cudaError_t allow_shared(const void* kernel, int64_t bytes);
template <typename... Parameters>
cudaError_t allow_shared(void (*kernel)(Parameters...), int64_t bytes) {
    return allow_shared(reinterpret_cast<const void*>(kernel), bytes);
}

// How many blocks a launch has, also more than CUDA allows: that is an error of the launch, not a number cut off.
struct Grid {
    int64_t x, y, z;

    Grid(int64_t blocks, int64_t blocks_y = 1, int64_t blocks_z = 1) : x(blocks), y(blocks_y), z(blocks_z) {}
    Grid(dim3 blocks) : x(blocks.x), y(blocks.y), z(blocks.z) {}
    operator dim3() const { return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z)); }

    bool fits() const { return x <= INT32_MAX && y <= kMostBlocksY && z <= kMostBlocksY; }

    static constexpr int64_t kMostBlocksY = 65535;  // and of z
};

// A grid of `blocks` for each batch entry, whose number is blockIdx.z * gridDim.y + blockIdx.y: it may be beyond the last one.
inline Grid batch_grid(int64_t blocks, int64_t batch) {
    const int64_t y = batch < Grid::kMostBlocksY ? batch : Grid::kMostBlocksY;
    return Grid(blocks, y, ceil_div(batch, y));
}

inline cudaLaunchConfig_t launch_config(const Grid& grid, dim3 block, size_t shared_bytes, void* stream) {
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    return config;
}

// What kernel<<<grid, block, shared_bytes, stream>>>(arguments...) does, in plain C++. Every kernel is launched by this
// function or by one of the next two.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_kernel(void (*kernel)(Parameters...), const Grid& grid, dim3 block, size_t shared_bytes, void* stream,
                          const Arguments&... arguments) {
    if (!grid.fits()) {
        return cudaErrorInvalidConfiguration;
    }
    const cudaLaunchConfig_t config = launch_config(grid, block, shared_bytes, stream);
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// Launches a kernel that calls griddepcontrol_wait before it touches what the kernel ahead of it in the stream writes.
// Its blocks start early on GPUs that can do that; elsewhere, or compiled for older ones, it is an ordinary launch.
// `cluster` neighbouring blocks form a cluster, one of them none; has_clusters says whether more may.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_clusters(void (*kernel)(Parameters...), unsigned cluster, const Grid& grid, dim3 block, size_t shared_bytes,
                            void* stream, const Arguments&... arguments) {
    bool starts_early = false;
    const cudaError_t error =
        grid.fits() ? supports_programmatic_dependent_launch(kernel, &starts_early) : cudaErrorInvalidConfiguration;
    if (error != cudaSuccess) {
        return error;
    }
    cudaLaunchAttribute attributes[2] = {};
    unsigned count = 0;
    if (starts_early) {
        attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[count].val.programmaticStreamSerializationAllowed = 1;
        ++count;
    }
    if (cluster > 1) {
        attributes[count].id = cudaLaunchAttributeClusterDimension;
        attributes[count].val.clusterDim.x = cluster;
        attributes[count].val.clusterDim.y = 1;
        attributes[count].val.clusterDim.z = 1;
        ++count;
    }
    cudaLaunchConfig_t config = launch_config(grid, block, shared_bytes, stream);
    config.attrs = attributes;
    config.numAttrs = count;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}
// The same without clusters.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_programmatic_dependent(void (*kernel)(Parameters...), const Grid& grid, dim3 block, size_t shared_bytes,
                                          void* stream, const Arguments&... arguments) {
    return launch_clusters(kernel, 1, grid, block, shared_bytes, stream, arguments...);
}

}  // namespace mamba
