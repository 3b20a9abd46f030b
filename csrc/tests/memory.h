// Memory that the library under test works on. mamba_cuda's tests (MAMBA_TEST_CUDA) take it from CUDA, managed: the host and
// the GPU see it at one address.
#pragma once

#include <stddef.h>

#include <vector>

#if defined(MAMBA_TEST_CUDA)
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#endif

namespace testing {

#if defined(MAMBA_TEST_CUDA)

constexpr bool kCuda = true;

template <typename T>
struct ManagedAllocator {
    using value_type = T;

    ManagedAllocator() = default;
    template <typename U>
    ManagedAllocator(const ManagedAllocator<U>&) {}

    T* allocate(size_t count) {
        void* memory = nullptr;
        const cudaError_t error = cudaMallocManaged(&memory, count * sizeof(T), cudaMemAttachGlobal);
        if (error != cudaSuccess) {
            printf("cudaMallocManaged: %s\n", cudaGetErrorString(error));
            exit(2);
        }
        return static_cast<T*>(memory);
    }
    void deallocate(T* memory, size_t) { cudaFree(memory); }

    bool operator==(const ManagedAllocator&) const { return true; }
    bool operator!=(const ManagedAllocator&) const { return false; }
};
template <typename T>
using Memory = std::vector<T, ManagedAllocator<T>>;

#else

constexpr bool kCuda = false;

template <typename T>
using Memory = std::vector<T>;

#endif

}  // namespace testing
