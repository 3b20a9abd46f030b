// causal_conv1d forward and backward against float64 loops.
#pragma once

#include "tests/cuda/harness.h"

struct ConvCase {
    int32_t dtype, weight_dtype;
    int64_t batch, dim, seqlen;
    int32_t width, silu;
    bool bias;
    int x_channel_last, out_channel_last;
    int64_t pad, lead;  // extra elements in the outer stride; elements before the first (breaks alignment)
    bool seq_idx, initial, final, infinity;
};

static double ref_input(const Tensor& x, const Tensor& initial, const ConvCase& c, int64_t b, int64_t d, int64_t t) {
    if (t >= 0) {
        return x.get(b, d, t);
    }
    const int64_t index = c.width - 1 + t;
    return c.initial && index >= 0 ? initial.get(b, d, index) : 0.0;
}

static void run_conv_case(const ConvCase& c) {
    ++g_cases;
    snprintf(g_case, sizeof(g_case),
             "conv dtype=%d wdtype=%d B=%d D=%d L=%d W=%d silu=%d bias=%d layout=%d%d pad=%d lead=%d seq=%d "
             "init=%d final=%d inf=%d",
             c.dtype, c.weight_dtype, static_cast<int>(c.batch), static_cast<int>(c.dim), static_cast<int>(c.seqlen), c.width,
             c.silu, c.bias, c.x_channel_last, c.out_channel_last, static_cast<int>(c.pad), static_cast<int>(c.lead), c.seq_idx,
             c.initial, c.final, c.infinity);
    const int64_t B = c.batch, D = c.dim, L = c.seqlen, W = c.width, S = W - 1;
    const int* x_order = c.x_channel_last ? kOrderChannelLast : kOrderPlain;
    const int* out_order = c.out_channel_last ? kOrderChannelLast : kOrderPlain;
    Tensor x, weight, bias, initial, final, out, dout, dx, dfinal, dinitial, dweight, dbias;
    // (B, D, L, 1): the last dimension only makes the tensor 4-d, so a plain order pads after it; pad whole rows instead.
    const int plain3[4] = {3, 0, 1, 2};
    const int last3[4] = {3, 0, 2, 1};
    x_order = c.x_channel_last ? last3 : plain3;
    out_order = c.out_channel_last ? last3 : plain3;
    x.make(c.dtype, B, D, L, 1, x_order, c.pad, c.lead);
    out.make(c.dtype, B, D, L, 1, out_order, c.pad, c.lead);
    dout.make(c.dtype, B, D, L, 1, out_order, c.pad, c.lead);
    dx.make(c.dtype, B, D, L, 1, x_order, c.pad, c.lead);
    weight.make(c.weight_dtype, 1, 1, D, W, kOrderPlain, 0, 0);
    bias.make(c.weight_dtype, 1, 1, 1, D, kOrderPlain, 0, 0);
    initial.make(c.dtype, B, D, S, 1, last3, 1, 1);
    final.make(c.dtype, B, D, S, 1, plain3, 1, 1);
    dfinal.make(c.dtype, B, D, S, 1, plain3, 0, 0);
    dinitial.make(c.dtype, B, D, S, 1, plain3, 0, 0);
    x.fill_random(1.0, 0.0);
    dout.fill_random(1.0, 0.0);
    weight.fill_random(0.5, 0.0);
    bias.fill_random(0.5, 0.0);
    initial.fill_random(1.0, 0.0);
    dfinal.fill_random(1.0, 0.0);
    if (c.infinity && B * D > 0) {
        for (int64_t t = 3; t < L; t += 37) {
            x.set(B - 1, D / 2, t, 0, HUGE_VAL);
        }
        x.upload();
    }
    int32_t* seq_idx = static_cast<int32_t*>(malloc(static_cast<size_t>(B * L + 1) * 4));
    int32_t* seq_device = nullptr;
    check_cuda(cudaMalloc(reinterpret_cast<void**>(&seq_device), static_cast<size_t>(B * L + 1) * 4), "malloc");
    for (int64_t b = 0; b < B; ++b) {
        int32_t id = 0;
        for (int64_t t = 0; t < L; ++t) {
            id += random_below(t % 40 < 10 ? 2 : 25) == 0 && t > 0;
            seq_idx[b * L + t] = id;
        }
    }
    check_cuda(cudaMemcpy(seq_device, seq_idx, static_cast<size_t>(B * L) * 4, cudaMemcpyHostToDevice), "seq_idx");

    MambaCausalConv1dBackward q;
    memset(&q, 0, sizeof(q));
    MambaCausalConv1d& p = q.forward;
    p.batch = B;
    p.dim = D;
    p.seqlen = L;
    p.width = c.width;
    p.silu = c.silu;
    p.dtype = c.dtype;
    p.weight_dtype = c.weight_dtype;
    p.bias_dtype = c.weight_dtype;
    p.x = x.data();
    p.weight = weight.data();
    p.bias = c.bias ? bias.data() : nullptr;
    p.seq_idx = c.seq_idx ? seq_device : nullptr;
    p.initial_states = c.initial ? initial.data() : nullptr;
    p.final_states = c.final ? final.data() : nullptr;
    p.out = out.data();
    p.x_batch_stride = x.stride[0];
    p.x_dim_stride = x.stride[1];
    p.x_len_stride = x.stride[2];
    p.out_batch_stride = out.stride[0];
    p.out_dim_stride = out.stride[1];
    p.out_len_stride = out.stride[2];
    p.initial_batch_stride = initial.stride[0];
    p.initial_dim_stride = initial.stride[1];
    p.initial_len_stride = initial.stride[2];
    p.final_batch_stride = final.stride[0];
    p.final_dim_stride = final.stride[1];
    p.final_len_stride = final.stride[2];
    const int64_t slots = mamba_causal_conv1d_backward_slots(&p);
    const int32_t sums_dtype = slots == 1 ? c.weight_dtype : MAMBA_FLOAT32;
    dweight.make(sums_dtype, 1, slots, D, W, kOrderPlain, 0, 0);
    dbias.make(sums_dtype, 1, 1, slots, D, kOrderPlain, 0, 0);
    q.dout = dout.data();
    q.dx = dx.data();
    q.dout_batch_stride = dout.stride[0];
    q.dout_dim_stride = dout.stride[1];
    q.dout_len_stride = dout.stride[2];
    q.dx_batch_stride = dx.stride[0];
    q.dx_dim_stride = dx.stride[1];
    q.dx_len_stride = dx.stride[2];
    q.dfinal_states = c.final ? dfinal.data() : nullptr;
    q.dinitial_states = c.initial ? dinitial.data() : nullptr;
    q.slots = slots;
    q.dweight = dweight.data();
    q.dbias = c.bias ? dbias.data() : nullptr;

    if (!check_status(mamba_causal_conv1d_forward(&p)) || (!c.infinity && !check_status(mamba_causal_conv1d_backward(&q)))) {
        return;
    }
    check_cuda(cudaDeviceSynchronize(), "kernels");
    out.download();
    final.download();
    dx.download();
    dinitial.download();
    dweight.download();
    dbias.download();

    Comparison out_check = {"out", 0}, final_check = {"final_states", 0}, dx_check = {"dx", 0},
               dinitial_check = {"dinitial_states", 0};
    Comparison dweight_check = {"dweight", 0}, dbias_check = {"dbias", 0};
    const double relative = rounding(c.dtype) * 1.02 + 4e-6;
    const double sums_relative = rounding(sums_dtype) * 1.02;
    const double absolute = 1e-5;
    double* g = static_cast<double*>(malloc(static_cast<size_t>(L + 1) * sizeof(double)));
    for (int64_t d = 0; d < D; ++d) {
        double sum_weight[4] = {}, size_weight[4] = {}, sum_bias = 0.0, size_bias = 0.0;
        for (int64_t b = 0; b < B; ++b) {
            const int32_t* seq = seq_idx + b * L;
            for (int64_t t = 0; t < L; ++t) {
                double pre = c.bias ? bias.get(0, 0, 0, d) : 0.0;
                double in[4] = {};
                for (int64_t k = 0; k < W; ++k) {
                    const bool same = !c.seq_idx || (t - k >= 0 && seq[t - k] == seq[t]);
                    in[k] = same ? ref_input(x, initial, c, b, d, t - k) : 0.0;
                    pre += weight.get(0, 0, d, W - 1 - k) * in[k];
                }
                const double s = ref_sigmoid(pre);
                const double expected = c.silu ? pre * s : pre;
                out_check.check(out.get(b, d, t), expected, fabs(expected) * relative + absolute, b, d, t);
                g[t] = dout.get(b, d, t) * (c.silu ? s * (1.0 + pre * (1.0 - s)) : 1.0);
                for (int64_t k = 0; k < W; ++k) {
                    sum_weight[k] += g[t] * in[k];
                    size_weight[k] += fabs(g[t] * in[k]);
                }
                sum_bias += g[t];
                size_bias += fabs(g[t]);
            }
            for (int64_t i = 0; i < S && c.final; ++i) {
                final_check.check(final.get(b, d, i), ref_input(x, initial, c, b, d, L - S + i), 0.0, b, d, i);
            }
            for (int64_t t = c.initial ? -S : 0; t < L && !c.infinity; ++t) {
                double expected = 0.0;
                for (int64_t k = 0; k < W; ++k) {
                    if (t + k >= 0 && t + k < L && (!c.seq_idx || seq[t + k] == seq[t])) {
                        expected += weight.get(0, 0, d, W - 1 - k) * g[t + k];
                    }
                }
                if (c.final && t >= L - S) {
                    expected += dfinal.get(b, d, t - (L - S));
                }
                const double got = t >= 0 ? dx.get(b, d, t) : dinitial.get(b, d, t + S);
                (t >= 0 ? dx_check : dinitial_check).check(got, expected, fabs(expected) * relative + absolute, b, d, t);
            }
        }
        double got_bias = 0.0;
        for (int64_t k = 0; k < W && !c.infinity; ++k) {
            double got = 0.0;
            for (int64_t slot = 0; slot < slots; ++slot) {
                got += dweight.get(0, slot, d, W - 1 - k);
            }
            const double rounded = fabs(sum_weight[k]) * sums_relative;
            dweight_check.check(got, sum_weight[k], size_weight[k] * 3e-6 + 1e-5 + rounded, d, k, 0);
        }
        for (int64_t slot = 0; slot < slots && c.bias && !c.infinity; ++slot) {
            got_bias += dbias.get(0, 0, slot, d);
        }
        if (c.bias && !c.infinity) {
            dbias_check.check(got_bias, sum_bias, size_bias * 3e-6 + 1e-5 + fabs(sum_bias) * sums_relative, d, 0, 0);
        }
    }
    out_check.finish(&out);
    final_check.finish(&final);
    dx_check.finish(&dx);
    dinitial_check.finish(&dinitial);
    dweight_check.finish(nullptr);
    dbias_check.finish(nullptr);
    Tensor* const tensors[] = {&x, &weight, &bias, &initial, &final, &out, &dout, &dx, &dfinal, &dinitial, &dweight, &dbias};
    for (Tensor* tensor : tensors) {
        tensor->release();
    }
    cudaFree(seq_device);
    free(seq_idx);
    free(g);
}

static void test_conv() {
    const int64_t sizes[][3] = {{1, 1, 1},   {2, 3, 2},    {1, 4, 3},      {3, 5, 7},     {2, 8, 8},
                                {1, 33, 16}, {2, 64, 64},  {2, 40, 100},   {1, 132, 257}, {2, 12, 512},
                                {1, 8, 520}, {1, 6, 1029}, {2, 4, 2048},   {2, 5, 0},     {0, 4, 16},
                                {3, 0, 8},   {300, 8, 3},  {130, 4, 1030}, {1, 260, 24},  {5, 4, 1}};
    int turn = 0;
    for (const int64_t(&size)[3] : sizes) {
        for (int32_t dtype = 0; dtype < 3; ++dtype) {
            for (int layout = 0; layout < 4; ++layout) {
                const bool large = size[0] * size[1] * size[2] > 20000;
                for (int variant = 0; variant < (large ? 1 : 4); ++variant, ++turn) {
                    ConvCase c;
                    memset(&c, 0, sizeof(c));
                    c.dtype = dtype;
                    c.weight_dtype = turn % 2 == 0 ? dtype : MAMBA_FLOAT32;
                    c.batch = size[0];
                    c.dim = size[1];
                    c.seqlen = size[2];
                    c.width = 2 + (turn + turn / 3) % 3;
                    c.silu = turn % 5 != 0;
                    c.bias = turn % 7 != 0;
                    c.x_channel_last = layout & 1;
                    c.out_channel_last = layout == 3 ? 0 : layout & 1;  // 3 mixes: channel-last in, plain out
                    if (layout == 2) {
                        c.out_channel_last = turn % 2;
                        c.pad = turn % 3 == 0 ? 8 : 3;
                    }
                    c.lead = variant == 1 ? 1 : (variant == 2 ? 8 : 0);
                    c.seq_idx = variant == 2;
                    c.initial = variant == 3 || (variant == 1 && turn % 3 == 0);
                    c.final = variant == 3 || (variant == 0 && turn % 3 == 1);
                    c.infinity = variant == 0 && turn % 4 == 0;
                    run_conv_case(c);
                }
            }
        }
    }
}

// What most models ask for, which kernels have a form of their own for: rows that fill warps, and begin and end anywhere.
static void test_conv_plain() {
    const int64_t lengths[] = {128, 256, 300, 517, 1024, 1029, 2047, 2048, 3073, 4099};
    int turn = 0;
    for (int64_t length : lengths) {
        for (int32_t dtype = 0; dtype < 3; ++dtype) {
            for (int variant = 0; variant < 4; ++variant, ++turn) {
                ConvCase c;
                memset(&c, 0, sizeof(c));
                c.dtype = dtype;
                c.weight_dtype = turn % 2 == 0 ? dtype : (dtype + 1) % 3;
                c.batch = 1 + turn % 2;
                c.dim = variant == 1 ? 8 : 3;
                c.seqlen = length;
                c.width = 4;
                c.silu = 1;
                c.bias = turn % 5 != 0;
                c.x_channel_last = c.out_channel_last = variant == 1;
                c.lead = variant == 2 ? 3 : 0;
                c.pad = variant == 3 ? 16 : 0;
                c.final = turn % 4 == 1;
                c.infinity = turn % 7 == 3;
                run_conv_case(c);
            }
        }
    }
}

// What must be refused, before any kernel starts.
static void expect_refusal(const char* what, int32_t status, int32_t expected) {
    ++g_cases;
    if (status != expected) {
        printf("FAIL %s: status %d, expected %d\n", what, static_cast<int>(status), static_cast<int>(expected));
        ++g_failures;
    }
}

static void test_conv_errors() {
    float element = 0.0f;
    MambaCausalConv1d p;
    memset(&p, 0, sizeof(p));
    p.batch = p.dim = p.seqlen = 1;
    p.width = 5;
    expect_refusal("width 5", mamba_causal_conv1d_forward(&p), MAMBA_ERROR_UNSUPPORTED);
    p.width = 4;
    expect_refusal("x NULL", mamba_causal_conv1d_forward(&p), MAMBA_ERROR_INVALID);
    p.x = &element;
    p.weight = &element;
    p.dtype = 7;
    expect_refusal("dtype 7", mamba_causal_conv1d_forward(&p), MAMBA_ERROR_INVALID);
    p.dtype = 0;
    p.batch = -1;
    expect_refusal("batch -1", mamba_causal_conv1d_forward(&p), MAMBA_ERROR_INVALID);
    expect_refusal("params NULL", mamba_causal_conv1d_forward(nullptr), MAMBA_ERROR_INVALID);
    MambaCausalConv1dBackward q;
    memset(&q, 0, sizeof(q));
    q.forward = p;
    q.forward.batch = 1;
    q.dout = q.dx = &element;
    q.dweight = &element;
    q.slots = 3;
    expect_refusal("slots 3", mamba_causal_conv1d_backward(&q), MAMBA_ERROR_INVALID);
    MambaCausalConv1dUpdate u;
    memset(&u, 0, sizeof(u));
    u.batch = u.dim = u.seqlen = 1;
    u.width = 4;
    u.state_len = 2;
    u.x = u.weight = &element;
    u.conv_state = u.out = &element;
    expect_refusal("state_len 2", mamba_causal_conv1d_update(&u), MAMBA_ERROR_INVALID);
    MambaSelectiveStateUpdate s;
    memset(&s, 0, sizeof(s));
    s.batch = s.nheads = s.headdim = s.ngroups = s.state_rows = 1;
    s.dstate = 257;
    expect_refusal("dstate 257", mamba_selective_state_update(&s), MAMBA_ERROR_UNSUPPORTED);
    s.dstate = 16;
    s.ngroups = 2;
    expect_refusal("ngroups 2 of 1 head", mamba_selective_state_update(&s), MAMBA_ERROR_INVALID);
}
