// Does the emulator notice? Kernels with a planted fault each, and the same kernels without it. "selftest" runs all, "selftest
// NAME" runs one with its fault and shows what is reported.
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/cuda_utils.cuh"
#include "common/ptx_matrix.cuh"

namespace mamba {
namespace {

constexpr int kThreads = 128;
constexpr int kOrders = 20;  // that warps run in, for each kernel

// ---- kernels: out[i] = in[kThreads - 1 - i], a detour each -------------------------------------------------------------

template <bool kFault>
__global__ void barrier_missing(float* out, const float* in) {
    __shared__ float values[kThreads];
    values[threadIdx.x] = in[threadIdx.x];
    if (!kFault) {
        __syncthreads();
    }
    out[threadIdx.x] = values[kThreads - 1 - threadIdx.x];
}

template <bool kFault>
__global__ void warp_barrier_missing(float* out, const float* in) {
    __shared__ float values[kThreads];
    values[threadIdx.x] = in[threadIdx.x];
    if (!kFault) {
        __syncwarp();
    }
    out[kThreads - 1 - (threadIdx.x ^ 31)] = values[threadIdx.x ^ 31];
}

template <bool kFault>
__global__ void barrier_too_early(float* out, const float* in) {  // the next values are written while these are read
    __shared__ float values[kThreads];
    for (int round = 0; round < 2; ++round) {
        values[threadIdx.x] = in[threadIdx.x] - static_cast<float>(round);
        __syncthreads();
        if (round == 0) {
            out[threadIdx.x] = values[kThreads - 1 - threadIdx.x];
        }
        if (!kFault) {
            __syncthreads();
        }
    }
}

template <bool kFault>
__global__ void copy_not_awaited(float* out, const float* in) {
    __shared__ __align__(16) float values[kThreads];
    if (threadIdx.x % 4 == 0) {
        cp_async<16>(values + threadIdx.x, in + threadIdx.x, true);
    }
    cp_async_commit_group();
    if (!kFault) {
        cp_async_wait_group<0>();
    }
    __syncthreads();
    out[threadIdx.x] = values[kThreads - 1 - threadIdx.x];
}

template <bool kFault>
__global__ void too_few_copies_awaited(float* out, const float* in) {
    __shared__ __align__(16) float values[2][kThreads];
    for (int i = 0; i < 2; ++i) {
        if (threadIdx.x % 4 == 0) {
            cp_async<16>(values[i] + threadIdx.x, in + threadIdx.x, true);
        }
        cp_async_commit_group();
    }
    cp_async_wait_group<kFault ? 1 : 0>();
    __syncthreads();
    out[threadIdx.x] = values[1][kThreads - 1 - threadIdx.x];
}

template <bool kFault>
__global__ void copies_awaited_by_their_thread_only(float* out, const float* in) {
    __shared__ __align__(16) float values[kThreads];
    if (threadIdx.x % 4 == 0) {
        cp_async<16>(values + threadIdx.x, in + threadIdx.x, true);
    }
    cp_async_commit_group();
    cp_async_wait_group<0>();
    if (!kFault) {
        __syncthreads();
    }
    out[threadIdx.x] = values[kThreads - 1 - threadIdx.x];
}

template <bool kFault, bool kDeadlock>
__device__ void copy_in_bulk(float* out, const float* in) {
    MAMBA_DYNAMIC_SHARED(16, float, values);
    uint64_t* const barrier = reinterpret_cast<uint64_t*>(values + kThreads);
    if (threadIdx.x == 0) {
        mbarrier_init(barrier);
    }
    fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(barrier, (kFault && kDeadlock ? 2 : 1) * kThreads * static_cast<int>(sizeof(float)));
        cp_async_bulk_load(values, in, kThreads * static_cast<int>(sizeof(float)), barrier);
    }
    if (!kFault || kDeadlock) {
        mbarrier_wait_parity(barrier, 0);
    }
    __syncthreads();
    out[threadIdx.x] = values[kThreads - 1 - threadIdx.x];
}
template <bool kFault>
__global__ void bulk_copy_not_awaited(float* out, const float* in) {
    copy_in_bulk<kFault, false>(out, in);
}
template <bool kFault>
__global__ void bulk_copy_never_full(float* out, const float* in) {
    copy_in_bulk<kFault, true>(out, in);
}

template <bool kFault>
__global__ void shuffle_of_half_a_warp(float* out, const float* in) {
    float value = in[threadIdx.x ^ 31];
    if (!kFault || threadIdx.x % 32 < 16) {
        value = __shfl_xor_sync(0xffffffffu, value, 31);
    }
    out[kThreads - 1 - threadIdx.x] = value;
}

// 16 ones times a tile that is 1 / 16: every sum is 1.
template <bool kFault>
__global__ void product_not_awaited(float* out, const float* in) {
    MAMBA_DYNAMIC_SHARED(1024, uint32_t, tile);  // 16 rows of k, 64 columns
    for (int i = threadIdx.x; i < 16 * 64 / 2; i += kThreads) {
        tile[i] = 0x3d803d80;
    }
    fence_proxy_async();
    __syncthreads();
    const uint32_t ones[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};
    float sums[8][4] = {};
    const uint64_t descriptor = uint64_t{1} << 62 | uint64_t{64} << 32 | shared_address(tile) >> 4;
    wgmma_fence();
    wgmma<__nv_bfloat16, 1>(sums, ones, descriptor);
    wgmma_commit_group();
    if (!kFault) {
        wgmma_wait_group<0>();
    }
    out[threadIdx.x] = in[kThreads - 1 - threadIdx.x] * sums[7][3];
}

// kFault: shared memory is written again before the store has read it.
template <bool kFault>
__global__ void bulk_store_not_awaited(float* out, const float* in) {
    MAMBA_DYNAMIC_SHARED(16, float, values);
    values[threadIdx.x] = in[kThreads - 1 - threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) {
        cp_async_bulk_store(out, values, kThreads * static_cast<int>(sizeof(float)));
        if (!kFault) {
            cp_async_bulk_wait_group_read();
        }
    }
    __syncthreads();
    values[threadIdx.x] = 0.0f;
    __syncthreads();
    if (threadIdx.x == 0) {
        cp_async_bulk_wait_group_read();
    }
}

template <bool kFault>
__global__ void read_beyond_a_tensor(float* out, const float* in) {
    out[threadIdx.x] = in[kThreads - 1 - threadIdx.x + (kFault ? 1 : 0)];
}

template <bool kFault>
__global__ void copy_from_beyond_a_tensor(float* out, const float* in) {
    __shared__ __align__(16) float values[kThreads + 4];
    if (threadIdx.x % 4 == 0) {
        cp_async<16>(values + threadIdx.x, in + threadIdx.x + (kFault ? 4 : 0), true);
    }
    cp_async_commit_group();
    cp_async_wait_group<0>();
    __syncthreads();
    out[threadIdx.x] = values[kThreads - 1 - threadIdx.x];
}

template <bool kFault>
__global__ void write_beyond_shared(float* out, const float* in) {
    __shared__ float values[kThreads];
    values[threadIdx.x + (kFault ? 1 : 0)] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = values[kThreads - 1 - threadIdx.x];
}

template <bool kFault>
__global__ void write_beyond_dynamic_shared(float* out, const float* in) {
    MAMBA_DYNAMIC_SHARED(16, float, values);
    values[threadIdx.x] = in[threadIdx.x];
    if (kFault && threadIdx.x == 0) {
        values[2 * kThreads] = 0.0f;
    }
    __syncthreads();
    out[threadIdx.x] = values[kThreads - 1 - threadIdx.x];
}

// ---- the tests -------------------------------------------------------------------------------------------------------

using Kernel = void(float*, const float*);
struct Test {
    const char* name;
    Kernel* faulty;
    Kernel* sound;
    size_t shared_bytes;
    bool sanitizer;  // only AddressSanitizer sees it
};
#define TEST(kernel, shared_bytes, sanitizer) {#kernel, kernel<true>, kernel<false>, shared_bytes, sanitizer}
const Test kTests[] = {
    TEST(barrier_missing, 0, false),
    TEST(warp_barrier_missing, 0, false),
    TEST(barrier_too_early, 0, false),
    TEST(copy_not_awaited, 0, false),
    TEST(too_few_copies_awaited, 0, false),
    TEST(copies_awaited_by_their_thread_only, 0, false),
    TEST(bulk_copy_not_awaited, 2 * kThreads * sizeof(float), false),
    TEST(bulk_copy_never_full, 2 * kThreads * sizeof(float), false),
    TEST(bulk_store_not_awaited, kThreads * sizeof(float), false),
    TEST(shuffle_of_half_a_warp, 0, false),
    TEST(product_not_awaited, 2048, false),
    TEST(read_beyond_a_tensor, 0, true),
    TEST(copy_from_beyond_a_tensor, 0, true),
    TEST(write_beyond_shared, 0, true),
    TEST(write_beyond_dynamic_shared, 2 * kThreads * sizeof(float), true),
};
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

bool is_right(Kernel* kernel, size_t shared_bytes) {
    float* const in = static_cast<float*>(malloc(kThreads * sizeof(float)));
    float* const out = static_cast<float*>(malloc(kThreads * sizeof(float)));
    bool right = true;
    for (int order = 0; order < kOrders && right; ++order) {
        for (int i = 0; i < kThreads; ++i) {
            in[i] = static_cast<float>(1 + i + order);
        }
        const cudaError_t error = launch_kernel(kernel, 1, kThreads, shared_bytes, nullptr, out, in);
        if (error != cudaSuccess) {
            fprintf(stderr, "%s: %s\n", cudaGetErrorName(error), cudaGetErrorString(error));
            right = false;
        }
        for (int i = 0; i < kThreads && right; ++i) {
            if (!(out[i] == in[kThreads - 1 - i])) {
                fprintf(stderr, "out[%d] is %g, expected %g\n", i, out[i], in[kThreads - 1 - i]);
                right = false;
            }
        }
    }
    free(in);
    free(out);
    return right;
}

// In a process of its own, which AddressSanitizer may end.
bool is_right_apart(Kernel* kernel, size_t shared_bytes) {
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        if (freopen("/dev/null", "w", stderr) == nullptr) {
            _exit(2);
        }
        _exit(is_right(kernel, shared_bytes) ? 0 : 1);
    }
    int status = 1;
    waitpid(child, &status, 0);
    return status == 0;
}

}  // namespace
}  // namespace mamba

int main(int count, char** words) {
    using namespace mamba;
    int problems = 0;
    for (const Test& test : kTests) {
        if (count > 1) {
            if (strcmp(words[1], test.name) == 0) {
                return is_right(test.faulty, test.shared_bytes) ? 0 : 1;
            }
            continue;
        }
        const char* verdict = "noticed";
        if (!is_right_apart(test.sound, test.shared_bytes)) {
            verdict = "FAILS WITHOUT A FAULT";
            ++problems;
        } else if (test.sanitizer && !kSanitized) {
            verdict = "left to AddressSanitizer";
        } else if (is_right_apart(test.faulty, test.shared_bytes)) {
            verdict = "NOT NOTICED";
            ++problems;
        }
        printf("%-40s %s\n", test.name, verdict);
    }
    if (count > 1) {
        fprintf(stderr, "selftest: there is no %s\n", words[1]);
        return 2;
    }
    return problems == 0 ? 0 : 1;
}
