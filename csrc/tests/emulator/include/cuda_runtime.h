// What csrc uses of CUDA's header of this name, for a host compiler: qualifiers, vector types, device functions, and the
// runtime's functions (runtime.cpp). A kernel that needs more of CUDA: add it here, as the CUDA C++ Programming Guide has it.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "emulator.h"

// ---- qualifiers ------------------------------------------------------------------------------------------------------

// A kernel is static, so that its shared variables belong to one file: GCC's AddressSanitizer watches the ends of no others.
#define __global__ static
#define __shared__ static
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))

// ---- vector types ----------------------------------------------------------------------------------------------------

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) {
    return {x, y};
}
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
    return {x, y, z, w};
}
inline float2 make_float2(float x, float y) {
    return {x, y};
}
inline float4 make_float4(float x, float y, float z, float w) {
    return {x, y, z, w};
}

// ---- device functions ------------------------------------------------------------------------------------------------

// The running thread's (machine.cpp).
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

inline void __syncthreads() {
    emulator::meet_block();
}
inline void __threadfence() {}
inline void __syncwarp() {
    emulator::meet_warp("__syncwarp");
}

// All lanes take part, as in all of csrc.
template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    return emulator::shuffle(mask, value, emulator::lane() / width * width + source % width);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, int distance, int width = 32) {
    const int lane = emulator::lane();
    return emulator::shuffle(mask, value, lane % width >= distance ? lane - distance : lane);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, int distance) {
    const int lane = emulator::lane();
    return emulator::shuffle(mask, value, lane + distance < 32 ? lane + distance : lane);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
    return emulator::shuffle(mask, value, emulator::lane() ^ lanes);
}

inline int __any_sync(unsigned mask, int value) {
    emulator::shuffle(mask, value, 0);
    int any = 0;
    for (int lane = 0; lane < 32; ++lane) {
        any |= emulator::look<int>(lane);
    }
    return any;
}

inline unsigned __ballot_sync(unsigned mask, int value) {
    emulator::shuffle(mask, value, 0);
    unsigned ballot = 0;
    for (int lane = 0; lane < 32; ++lane) {
        ballot |= (emulator::look<int>(lane) != 0 ? 1u : 0u) << lane;
    }
    return ballot;
}

template <typename T>
void __stcs(T* address, T value) {
    *address = value;
}

template <typename To, typename From>
To emulated_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To to;
    memcpy(&to, &from, sizeof(to));
    return to;
}
inline float __uint_as_float(unsigned bits) {
    return emulated_bits<float>(bits);
}
inline float __int_as_float(int bits) {
    return emulated_bits<float>(bits);
}
inline unsigned __float_as_uint(float value) {
    return emulated_bits<unsigned>(value);
}
inline int __float_as_int(float value) {
    return emulated_bits<int>(value);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((low | static_cast<uint64_t>(high) << 32) >> (shift & 31));
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const uint64_t bytes = low | static_cast<uint64_t>(high) << 32;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        result |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    }
    return result;
}
inline float rsqrtf(float value) {
    return 1.0f / sqrtf(value);
}
inline int __clzll(long long value) {
    return value == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(value));
}
inline int __double2loint(double value) {
    int64_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return static_cast<int>(bits);
}
inline int __float2int_rn(float value) {
    const double rounded = rint(static_cast<double>(value));
    return !(rounded == rounded)      ? 0
           : rounded >= 2147483647.0  ? 2147483647
           : rounded <= -2147483648.0 ? INT32_MIN
                                      : static_cast<int>(rounded);
}
inline void sincospif(float value, float* sin_of, float* cos_of) {
    const double radians = 3.14159265358979323846 * value;
    *sin_of = static_cast<float>(sin(radians));
    *cos_of = static_cast<float>(cos(radians));
}
template <typename T>
T atomicAdd(T* address, T value) {  // threads take turns only where they wait
    const T old = *address;
    *address = old + value;
    return old;
}
inline void __trap() {
    emulator::fail("__trap()");
}

// ---- runtime ---------------------------------------------------------------------------------------------------------

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorInsufficientDriver = 35,
    cudaErrorInvalidDeviceFunction = 98,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorNoKernelImageForDevice = 209,
    cudaErrorLaunchOutOfResources = 701,
    cudaErrorUnsupportedPtxVersion = 222,
    cudaErrorLaunchFailure = 719,
    cudaErrorNotSupported = 801,
};
enum cudaDeviceAttr {
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
    cudaDevAttrClusterLaunch = 120,
};
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributeNonPortableClusterSizeAllowed = 14,
};
enum cudaLaunchAttributeID { cudaLaunchAttributeClusterDimension = 4, cudaLaunchAttributeProgrammaticStreamSerialization = 6 };

typedef struct CUstream_st* cudaStream_t;
struct cudaFuncAttributes {
    int ptxVersion;
    size_t sharedSizeBytes;
};
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    union {
        int programmaticStreamSerializationAllowed;
        struct {
            unsigned x, y, z;
        } clusterDim;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute* attrs;
    unsigned numAttrs;
};

constexpr unsigned cudaMemAttachGlobal = 1;

cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetLastError();
const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaRuntimeGetVersion(int* version);
cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaMallocManaged(void** memory, size_t bytes, unsigned flags);
cudaError_t cudaFree(void* memory);
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream);

// There are no graphs: all of these fail.
typedef struct CUgraph_st* cudaGraph_t;
typedef struct CUgraphExec_st* cudaGraphExec_t;
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed = 2 };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone = 0 };
constexpr unsigned cudaStreamNonBlocking = 1;
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status);
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long flags);
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph);

template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute attribute, int value) {
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
        emulator::allow_shared(reinterpret_cast<const void*>(kernel), value);
    }
    return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel*) {
    attributes->ptxVersion = __CUDA_ARCH__ / 10;
    attributes->sharedSizeBytes = 0;
    return cudaSuccess;
}
// Runs the kernel to its end. Streams are kept by that alone.
template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments... arguments) {
    const dim3 &grid = config->gridDim, &block = config->blockDim;
    const emulator::Launch launch = {
        reinterpret_cast<const void*>(kernel), {grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, config->dynamicSmemBytes};
    return static_cast<cudaError_t>(emulator::run(launch, [=] { kernel(arguments...); }));
}
