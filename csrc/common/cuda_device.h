// What the entry points of mamba_cuda share: the device of a call, the launchers for a dtype, and CUDA's errors.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "common/error.h"

namespace mamba {

// Makes a device current for the scope and restores the caller's. error is what CUDA said.
class DeviceGuard {
 public:
    explicit DeviceGuard(int32_t device) : previous_(-1), error(cudaGetDevice(&previous_)) {
        if (error == cudaSuccess && previous_ != device) {
            error = cudaSetDevice(device);
        } else {
            previous_ = -1;
        }
    }
    ~DeviceGuard() {
        if (previous_ >= 0) {
            cudaSetDevice(previous_);
        }
    }
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
    int previous_;

 public:
    cudaError_t error;
};

// What plans depend on. A thread asks the runtime only where it did not ask about the same device last.
struct DeviceLimits {
    int processors;  // multiprocessors
    int shared;      // bytes of shared memory that a block may have
    int major;       // of the compute capability
    cudaError_t error;

    explicit DeviceLimits(int32_t device);
};

// The device of a call: current for the scope.
struct CallDevice : DeviceLimits {
    const DeviceGuard guard;

    explicit CallDevice(int32_t device) : DeviceLimits(device), guard(device) {
        error = guard.error != cudaSuccess ? guard.error : error;
    }
};

// An op's table of launchers for a dtype that passed the checks. Its of<T>() is compiled in one file a dtype.
template <class Launchers>
Launchers launchers_of([[maybe_unused]] int32_t dtype) {
#ifndef MAMBA_DISABLE_HALF
    if (dtype == MAMBA_FLOAT16) {
        return Launchers::template of<__half>();
    }
#endif
#ifndef MAMBA_DISABLE_BF16
    if (dtype == MAMBA_BFLOAT16) {
        return Launchers::template of<__nv_bfloat16>();
    }
#endif
    return Launchers::template of<float>();
}

// Turns a CUDA error into an error code and a message that names the kernel; MAMBA_OK for cudaSuccess.
int32_t cuda_status(cudaError_t error, const char* kernel, int64_t batch, int64_t dim, int64_t seqlen, int64_t dstate);

}  // namespace mamba
