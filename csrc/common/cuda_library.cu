// What mamba_cuda says about itself, and how CUDA's errors become ours.
#include "common/check.h"
#include "common/cuda_device.h"

namespace mamba {

DeviceLimits::DeviceLimits(int32_t device) : processors(0), shared(0), major(0), error(cudaSuccess) {
    static thread_local int32_t known_device = -1;
    static thread_local int known[3];
    if (device != known_device) {
        known_device = -1;
        const cudaDeviceAttr attributes[] = {cudaDevAttrMultiProcessorCount, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                             cudaDevAttrComputeCapabilityMajor};
        for (int i = 0; i < 3 && error == cudaSuccess; ++i) {
            error = cudaDeviceGetAttribute(&known[i], attributes[i], device);
        }
        if (error != cudaSuccess) {
            return;
        }
        known_device = device;
    }
    processors = known[0];
    shared = known[1];
    major = known[2];
}

namespace {
// The last refusal of allow_shared on this thread, for the message: bytes asked for, and what a block may have.
thread_local int64_t refused_shared, most_shared;

// What allow_shared has let a kernel have on a device.
struct Allowed {
    const void* kernel;
    int device;
    int64_t bytes;
};

// The place of a kernel on a device, or else one for it. Asking the driver takes as long as a launch, so kernels share no
// place before all that lie near it are taken.
Allowed& allowed(const void* kernel, int device) {
    constexpr uintptr_t kPlaces = 256, kTried = 16;
    static thread_local Allowed places[kPlaces];
    const uintptr_t first = reinterpret_cast<uintptr_t>(kernel) / 16;
    for (uintptr_t i = 0; i < kTried; ++i) {
        Allowed& place = places[(first + i) % kPlaces];
        if (place.kernel == nullptr || (place.kernel == kernel && place.device == device)) {
            return place;
        }
    }
    return places[first % kPlaces];
}
}  // namespace

cudaError_t allow_shared(const void* kernel, int64_t bytes) {
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) {
        return error;
    }
    Allowed& place = allowed(kernel, device);
    if (place.kernel == kernel && place.device == device && place.bytes >= bytes) {
        return cudaSuccess;
    }
    // The limit is the process's. So every thread sets the same, all that there is: none finds less than it was told.
    const DeviceLimits limits(device);
    cudaFuncAttributes now;
    error = limits.error != cudaSuccess ? limits.error : cudaFuncGetAttributes(&now, kernel);
    if (error == cudaSuccess) {
        const int most = limits.shared - static_cast<int>(now.sharedSizeBytes);
        if (bytes > most) {
            refused_shared = bytes;
            most_shared = most;
            return cudaErrorLaunchOutOfResources;
        }
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
        if (error == cudaSuccess) {
            place = {kernel, device, most};
        }
    }
    return error;
}

int32_t cuda_status(cudaError_t error, const char* kernel, int64_t batch, int64_t dim, int64_t seqlen, int64_t dstate) {
    if (error == cudaSuccess) {
        return MAMBA_OK;
    }
    cudaGetLastError();  // a launch error is sticky until it is read
    if (error == cudaErrorInvalidConfiguration) {
        return fail(MAMBA_ERROR_UNSUPPORTED,
                    "%s: more blocks than a launch can have: batch=%lld dim=%lld seqlen=%lld dstate=%lld", kernel,
                    static_cast<long long>(batch), static_cast<long long>(dim), static_cast<long long>(seqlen),
                    static_cast<long long>(dstate));
    }
    if (error == cudaErrorLaunchOutOfResources && refused_shared > 0) {
        const int64_t bytes = refused_shared;
        refused_shared = 0;
        return fail(MAMBA_ERROR_UNSUPPORTED,
                    "%s: needs %lld bytes of shared memory, of which this GPU lets a block have %lld: batch=%lld dim=%lld "
                    "seqlen=%lld dstate=%lld",
                    kernel, static_cast<long long>(bytes), static_cast<long long>(most_shared), static_cast<long long>(batch),
                    static_cast<long long>(dim), static_cast<long long>(seqlen), static_cast<long long>(dstate));
    }
    int32_t code = MAMBA_ERROR_CUDA;
    if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction ||
        error == cudaErrorUnsupportedPtxVersion) {
        code = MAMBA_ERROR_NO_KERNEL_IMAGE;
    } else if (error == cudaErrorInsufficientDriver || error == cudaErrorNoDevice) {
        code = MAMBA_ERROR_DRIVER;
    }
    return fail(code, "%s (CUDA error %d: %s) in %s with batch=%lld dim=%lld seqlen=%lld dstate=%lld", cudaGetErrorName(error),
                static_cast<int>(error), cudaGetErrorString(error), kernel, static_cast<long long>(batch),
                static_cast<long long>(dim), static_cast<long long>(seqlen), static_cast<long long>(dstate));
}

}  // namespace mamba

int32_t mamba_library_info(MambaLibraryInfo* info) {
    mamba::Check check("library_info");
    check.pointer("info", info);
    if (!check.ok()) {
        return check.status();
    }
    *info = MambaLibraryInfo{};
    info->abi_version = MAMBA_ABI_VERSION;
    info->is_cuda = 1;
    info->supports_float16 = mamba::dtype_enabled(MAMBA_FLOAT16);
    info->supports_bfloat16 = mamba::dtype_enabled(MAMBA_BFLOAT16);
    const char isa[] = "cuda";
    for (unsigned i = 0; i < sizeof(isa); ++i) {
        info->isa[i] = isa[i];
    }
    int version = 0;
    if (cudaRuntimeGetVersion(&version) == cudaSuccess) {
        info->cuda_runtime_version = version;
    }
    if (cudaDriverGetVersion(&version) == cudaSuccess) {
        info->cuda_driver_version = version;
    }
    cudaGetLastError();  // a machine without a driver is not an error here
    return MAMBA_OK;
}
