// The CUDA runtime's functions. The GPU is what the environment says, an H100 by default.
#include <cuda_runtime.h>
#include <stdlib.h>

#include "machine.h"

namespace {

cudaError_t last_error = cudaSuccess;

int setting(const char* name, int otherwise) {
    const char* const text = getenv(name);
    return text != nullptr ? atoi(text) : otherwise;
}

cudaError_t keep(cudaError_t error) {
    if (error != cudaSuccess) {
        last_error = error;
    }
    return error;
}

}  // namespace

cudaError_t cudaGetDeviceCount(int* count) {
    *count = 1;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    return keep(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}
cudaError_t cudaGetLastError() {
    const cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
const char* cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case cudaSuccess:
            return "cudaSuccess";
        case cudaErrorInvalidConfiguration:
            return "cudaErrorInvalidConfiguration";
        case cudaErrorLaunchFailure:
            return "cudaErrorLaunchFailure";
        default:
            return "another error";
    }
}
const char* cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorLaunchFailure ? emulator::last_failure() : "see the emulator's runtime.cpp";
}
cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = 13000;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
    return cudaRuntimeGetVersion(version);
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    switch (attribute) {
        case cudaDevAttrMultiProcessorCount:
            *value = setting("MAMBA_EMULATOR_MULTIPROCESSORS", 132);
            break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin:
            *value = setting("MAMBA_EMULATOR_SHARED", 232448);
            break;
        case cudaDevAttrComputeCapabilityMajor:
            *value = setting("MAMBA_EMULATOR_CAPABILITY", 9);
            break;
        case cudaDevAttrClusterLaunch:
            *value = 0;  // it has no clusters
            break;
    }
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
    return cudaSuccess;
}
cudaError_t cudaMallocManaged(void** memory, size_t bytes, unsigned) {
    *memory = malloc(bytes);
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
    memset(memory, value, bytes);
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t*, unsigned) {
    return cudaErrorNotSupported;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus*) {
    return cudaErrorNotSupported;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
    return cudaErrorNotSupported;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
    return cudaErrorNotSupported;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t*) {
    return cudaErrorNotSupported;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t*, cudaGraph_t, unsigned long long) {
    return cudaErrorNotSupported;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) {
    return cudaErrorNotSupported;
}
cudaError_t cudaGraphDestroy(cudaGraph_t) {
    return cudaErrorNotSupported;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) {
    return cudaErrorNotSupported;
}
cudaError_t cudaFree(void* memory) {
    free(memory);
    return cudaSuccess;
}
