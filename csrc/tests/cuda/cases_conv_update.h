// causal_conv1d_update against float64 loops.
#pragma once

#include "tests/cuda/harness.h"

static void run_conv_update_case(int turn, int64_t B, int64_t D, int64_t L, int64_t S, int32_t dtype, int32_t state_dtype) {
    const int32_t width = 2 + turn % 3;
    const int64_t rows = B + 2;
    const bool circular = turn % 2 != 0, indexed = turn % 5 < 2, silu = turn % 4 != 0, use_bias = turn % 7 != 0;
    if (S < width - 1) {
        return;
    }
    ++g_cases;
    snprintf(g_case, sizeof(g_case), "conv update %d dtype=%d state=%d B=%d D=%d L=%d S=%d W=%d circular=%d indexed=%d", turn,
             dtype, state_dtype, static_cast<int>(B), static_cast<int>(D), static_cast<int>(L), static_cast<int>(S), width,
             circular, indexed);
    const int plain3[4] = {3, 0, 1, 2};
    const int last3[4] = {3, 0, 2, 1};
    Tensor x, out, state, before, weight, bias;
    x.make(dtype, B, D, L, 1, turn % 3 == 0 ? last3 : plain3, turn % 2, turn % 3);
    out.make(dtype, B, D, L, 1, turn % 3 == 1 ? last3 : plain3, turn % 2, 0);
    state.make(state_dtype, rows, D, S, 1, turn % 4 == 1 ? last3 : plain3, turn % 3, turn % 2);
    before.make(state_dtype, rows, D, S, 1, turn % 4 == 1 ? last3 : plain3, turn % 3, turn % 2);
    weight.make(turn % 2 ? MAMBA_FLOAT32 : dtype, 1, 1, D, width, kOrderPlain, 0, 0);
    bias.make(MAMBA_FLOAT32, 1, 1, 1, D, kOrderPlain, 0, 0);
    x.fill_random(1.0, 0.0);
    weight.fill_random(0.5, 0.0);
    bias.fill_random(0.5, 0.0);
    before.fill_random(1.0, 0.0);
    memcpy(state.host, before.host, static_cast<size_t>(state.elements * element_size(state_dtype)));
    state.upload();
    int32_t lengths[64], indices[64];
    for (int64_t b = 0; b < B; ++b) {
        lengths[b] = static_cast<int32_t>(random_below(20));
        indices[b] = static_cast<int32_t>(b == 1 ? -1 : (b == 2 ? rows : rows - 1 - b));
    }
    int32_t* device = nullptr;
    check_cuda(cudaMalloc(reinterpret_cast<void**>(&device), sizeof(lengths) + sizeof(indices)), "malloc");
    check_cuda(cudaMemcpy(device, lengths, sizeof(lengths), cudaMemcpyHostToDevice), "copy");
    check_cuda(cudaMemcpy(device + 64, indices, sizeof(indices), cudaMemcpyHostToDevice), "copy");

    MambaCausalConv1dUpdate p;
    memset(&p, 0, sizeof(p));
    p.batch = B;
    p.dim = D;
    p.seqlen = L;
    p.state_len = S;
    p.width = width;
    p.silu = silu;
    p.dtype = dtype;
    p.state_dtype = state_dtype;
    p.weight_dtype = weight.dtype;
    p.bias_dtype = bias.dtype;
    p.x = x.data();
    p.conv_state = state.data();
    p.weight = weight.data();
    p.bias = use_bias ? bias.data() : nullptr;
    p.cache_seqlens = circular ? device : nullptr;
    p.conv_state_indices = indexed ? device + 64 : nullptr;
    p.out = out.data();
    p.state_rows = rows;
    p.x_batch_stride = x.stride[0];
    p.x_dim_stride = x.stride[1];
    p.x_len_stride = x.stride[2];
    p.state_row_stride = state.stride[0];
    p.state_dim_stride = state.stride[1];
    p.state_len_stride = state.stride[2];
    p.out_batch_stride = out.stride[0];
    p.out_dim_stride = out.stride[1];
    p.out_len_stride = out.stride[2];
    if (!check_status(mamba_causal_conv1d_update(&p))) {
        return;
    }
    check_cuda(cudaDeviceSynchronize(), "kernel");
    out.download();
    state.download();

    Comparison out_check = {"out", 0}, state_check = {"conv_state", 0};
    for (int64_t b = 0; b < B; ++b) {
        const int64_t row = indexed ? indices[b] : b;
        for (int64_t d = 0; d < D; ++d) {
            if (row < 0 || row >= rows) {
                for (int64_t t = 0; t < L; ++t) {
                    out_check.check(out.get(b, d, t), row < 0 ? 0.0 : NAN, 0.0, b, d, t);
                }
                continue;
            }
            for (int64_t t = 0; t < L; ++t) {
                double pre = use_bias ? bias.get(0, 0, 0, d) : 0.0;
                for (int64_t k = 0; k < width; ++k) {
                    const int64_t step = t - k;
                    const int64_t old = circular ? ((lengths[b] + step) % S + S) % S : S + step;
                    pre += weight.get(0, 0, d, width - 1 - k) * (step >= 0 ? x.get(b, d, step) : before.get(row, d, old));
                }
                const double expected = silu ? pre * ref_sigmoid(pre) : pre;
                out_check.check(out.get(b, d, t), expected, fabs(expected) * (rounding(dtype) * 1.02 + 4e-6) + 1e-5, b, d, t);
            }
            for (int64_t i = 0; i < S; ++i) {
                double expected = before.get(row, d, i);
                if (circular) {
                    for (int64_t t = 0; t < L; ++t) {
                        expected = (lengths[b] + t) % S == i ? x.get(b, d, t) : expected;
                    }
                } else {
                    expected = i + L < S ? before.get(row, d, i + L) : x.get(b, d, i + L - S);
                }
                state_check.check(state.get(row, d, i), expected, fabs(expected) * rounding(state_dtype), row, d, i);
            }
        }
    }
    for (int64_t row = 0; row < rows; ++row) {
        bool used = false;
        for (int64_t b = 0; b < B; ++b) {
            used = used || row == (indexed ? indices[b] : b);
        }
        for (int64_t d = 0; d < D && !used; ++d) {
            for (int64_t i = 0; i < S; ++i) {
                state_check.check(state.get(row, d, i), before.get(row, d, i), 0.0, row, d, i);
            }
        }
    }
    out_check.finish(&out);
    state_check.finish(&state);
    Tensor* const tensors[] = {&x, &out, &state, &before, &weight, &bias};
    for (Tensor* tensor : tensors) {
        tensor->release();
    }
    cudaFree(device);
}

static void test_conv_update() {
    const int64_t sizes[][4] = {{1, 1, 1, 3}, {3, 5, 1, 4}, {4, 300, 1, 3}, {2, 64, 3, 4},
                                {5, 7, 9, 4}, {1, 8, 2, 1}, {3, 33, 4, 11}};
    int turn = 0;
    for (const int64_t(&size)[4] : sizes) {
        for (int32_t dtype = 0; dtype < 3; ++dtype) {
            for (int variant = 0; variant < 8; ++variant, ++turn) {
                run_conv_update_case(turn, size[0], size[1], size[2], size[3], dtype, variant % 3 == 0 ? MAMBA_FLOAT32 : dtype);
            }
        }
    }
}
