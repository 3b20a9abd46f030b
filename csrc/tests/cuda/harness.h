// What the native CUDA tests share: device tensors that notice stray writes, random values, comparison and a summary.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mamba_kernels.h"

static int g_cases = 0;
static int g_failures = 0;
static char g_case[256] = "";

static void check_cuda(cudaError_t error, const char* what) {
    if (error != cudaSuccess) {
        printf("CUDA failed in %s: %s: %s\n", g_case, what, cudaGetErrorString(error));
        exit(2);
    }
}

// Returns whether the call went well; a failure is counted and printed.
static bool check_status(int32_t status) {
    if (status != MAMBA_OK) {
        printf("FAIL %s: status %d: %s\n", g_case, static_cast<int>(status), mamba_last_error());
        ++g_failures;
    }
    return status == MAMBA_OK;
}

// ---- values ----------------------------------------------------------------------------------------------------------

static uint64_t g_random = 0x9e3779b97f4a7c15ull;

static uint64_t random_bits() {
    g_random ^= g_random << 13;
    g_random ^= g_random >> 7;
    g_random ^= g_random << 17;
    return g_random >> 11;
}
// About normal: mean 0, variance 1.
static double random_normal() {
    double sum = 0.0;
    for (int i = 0; i < 4; ++i) {
        sum += static_cast<double>(random_bits()) / 9007199254740992.0 - 0.5;
    }
    return sum * 1.7320508;
}
static int64_t random_below(int64_t limit) {
    return static_cast<int64_t>(random_bits() % static_cast<uint64_t>(limit));
}

static int64_t element_size(int32_t dtype) {
    return dtype == MAMBA_FLOAT32 ? 4 : 2;
}
static double read_element(const void* data, int64_t index, int32_t dtype) {
    if (dtype == MAMBA_FLOAT32) {
        return static_cast<const float*>(data)[index];
    }
    if (dtype == MAMBA_FLOAT16) {
        return __half2float(static_cast<const __half*>(data)[index]);
    }
    return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
}
static void write_element(void* data, int64_t index, int32_t dtype, double value) {
    if (dtype == MAMBA_FLOAT32) {
        static_cast<float*>(data)[index] = static_cast<float>(value);
    } else if (dtype == MAMBA_FLOAT16) {
        static_cast<__half*>(data)[index] = __float2half_rn(static_cast<float>(value));
    } else {
        static_cast<__nv_bfloat16*>(data)[index] = __float2bfloat16_rn(static_cast<float>(value));
    }
}
// Half a unit in the last place, relative.
static double rounding(int32_t dtype) {
    return dtype == MAMBA_FLOAT32 ? 6.0e-8 : (dtype == MAMBA_FLOAT16 ? 0.00049 : 0.0040);
}

// ---- tensors ---------------------------------------------------------------------------------------------------------

// A 4-d tensor in device memory: sizes and strides in elements, `lead` elements before the first. Everything is filled
// with 0xff bytes (NaN) first; after a call, what no index reaches must still be so. A size of 0 makes an empty tensor.
struct Tensor {
    int32_t dtype;
    int64_t size[4], stride[4];
    int64_t lead, elements;
    unsigned char* host;
    unsigned char* device;

    void make(int32_t dtype_, int64_t s0, int64_t s1, int64_t s2, int64_t s3, const int* order, int64_t pad, int64_t lead_) {
        dtype = dtype_;
        lead = lead_;
        size[0] = s0;
        size[1] = s1;
        size[2] = s2;
        size[3] = s3;
        int64_t extent = 1;
        for (int i = 3; i >= 0; --i) {  // order[3] is the innermost dimension; the one outside it is padded
            stride[order[i]] = extent;
            extent *= size[order[i]];
            if (i == 3) {
                extent += pad;
            }
        }
        elements = lead + extent;
        host = static_cast<unsigned char*>(malloc(static_cast<size_t>(elements * element_size(dtype) + 1)));
        memset(host, 0xff, static_cast<size_t>(elements * element_size(dtype)));
        check_cuda(cudaMalloc(reinterpret_cast<void**>(&device), static_cast<size_t>(elements * element_size(dtype) + 1)),
                   "malloc");
        upload();
    }
    void release() {
        free(host);
        cudaFree(device);
    }
    int64_t index(int64_t i, int64_t j, int64_t k, int64_t l) const {
        return lead + i * stride[0] + j * stride[1] + k * stride[2] + l * stride[3];
    }
    double get(int64_t i, int64_t j, int64_t k, int64_t l = 0) const { return read_element(host, index(i, j, k, l), dtype); }
    void set(int64_t i, int64_t j, int64_t k, int64_t l, double value) { write_element(host, index(i, j, k, l), dtype, value); }
    void* data() const { return device + lead * element_size(dtype); }
    void upload() {
        check_cuda(cudaMemcpy(device, host, static_cast<size_t>(elements * element_size(dtype)), cudaMemcpyHostToDevice),
                   "upload");
    }
    void download() {
        check_cuda(cudaMemcpy(host, device, static_cast<size_t>(elements * element_size(dtype)), cudaMemcpyDeviceToHost),
                   "download");
    }
    void fill_random(double scale, double shift) {
        for (int64_t i = 0; i < size[0]; ++i) {
            for (int64_t j = 0; j < size[1]; ++j) {
                for (int64_t k = 0; k < size[2]; ++k) {
                    for (int64_t l = 0; l < size[3]; ++l) {
                        set(i, j, k, l, random_normal() * scale + shift);
                    }
                }
            }
        }
        upload();
    }
    // Elements that no index reaches and that are no longer 0xff.
    int64_t stray_writes() const {
        const size_t bytes = static_cast<size_t>(element_size(dtype));
        unsigned char* reached = static_cast<unsigned char*>(calloc(static_cast<size_t>(elements + 1), 1));
        for (int64_t i = 0; i < size[0]; ++i) {
            for (int64_t j = 0; j < size[1]; ++j) {
                for (int64_t k = 0; k < size[2]; ++k) {
                    for (int64_t l = 0; l < size[3]; ++l) {
                        reached[index(i, j, k, l)] = 1;
                    }
                }
            }
        }
        int64_t stray = 0;
        for (int64_t e = 0; e < elements; ++e) {
            for (size_t byte = 0; byte < bytes && !reached[e]; ++byte) {
                stray += host[static_cast<size_t>(e) * bytes + byte] != 0xff;
            }
        }
        free(reached);
        return stray;
    }
};

static const int kOrderPlain[4] = {0, 1, 2, 3};
static const int kOrderChannelLast[4] = {0, 3, 2, 1};  // of (B, D, L, 1): steps outside, channels innermost

// ---- comparison ------------------------------------------------------------------------------------------------------

// One result against its reference; a case stops printing after its first miss of a tensor.
struct Comparison {
    const char* name;
    int64_t misses;

    void check(double got, double expected, double tolerance, int64_t i, int64_t j, int64_t k) {
        bool good = fabs(got - expected) <= tolerance;
        if (isnan(expected)) {
            good = isnan(got);
        } else if (isinf(expected)) {
            good = got == expected;
        }
        if (!good && misses++ == 0) {
            printf("FAIL %s: %s[%lld, %lld, %lld] is %.9g, expected %.9g (tolerance %.3g)\n", g_case, name,
                   static_cast<long long>(i), static_cast<long long>(j), static_cast<long long>(k), got, expected, tolerance);
        }
    }
    void finish(const Tensor* tensor) {
        if (tensor != nullptr && tensor->stray_writes() != 0) {
            printf("FAIL %s: %s was written outside its elements\n", g_case, name);
            ++misses;
        }
        g_failures += misses != 0;
    }
};

static double ref_sigmoid(double x) {
    return 1.0 / (1.0 + exp(-x));
}

static int finish_tests() {
    printf("%d cases, %d failures\n", g_cases, g_failures);
    return g_failures == 0 ? 0 : 1;
}
