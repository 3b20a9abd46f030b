// selective_state_update against float64 loops.
#pragma once

#include "tests/cuda/harness.h"

// Copies the first headdim and state over a whole head, and makes the tensor say so with stride 0.
static void expand(Tensor& tensor, int dimension) {
    tensor.stride[dimension] = 0;
}

static void run_state_update_case(int turn, int64_t B, int64_t H, int64_t P, int64_t N, int64_t G, int32_t state_dtype,
                                  int32_t dtype) {
    ++g_cases;
    const bool indexed = turn % 5 < 2, use_z = turn % 3 != 0, use_D = turn % 4 != 0, use_bias = turn % 7 != 0;
    const bool dt_softplus = turn % 6 != 0;
    const bool expanded = turn % 4 == 3;  // A, dt, dt_bias and D are one value a head, as in Mamba-2
    const bool strided = turn % 8 == 5;   // nothing is contiguous
    const int32_t parameter_dtype = turn % 9 == 8 ? dtype : MAMBA_FLOAT32;
    const int64_t rows = B + 1;
    snprintf(g_case, sizeof(g_case), "state update %d state=%d dtype=%d B=%d H=%d P=%d N=%d G=%d expanded=%d strided=%d", turn,
             state_dtype, dtype, static_cast<int>(B), static_cast<int>(H), static_cast<int>(P), static_cast<int>(N),
             static_cast<int>(G), expanded, strided);
    const int reversed[4] = {3, 2, 1, 0};
    const int* order = strided ? reversed : kOrderPlain;
    const int64_t pad = turn % 3 == 1 ? 4 : 0;
    const int64_t lead = turn % 11 == 3 ? 1 : 0;
    Tensor state, before, x, dt, A, Bt, Ct, D, z, bias, out;
    state.make(state_dtype, rows, H, P, N, order, pad, lead);
    before.make(state_dtype, rows, H, P, N, order, pad, lead);
    x.make(dtype, 1, B, H, P, order, pad, lead);
    z.make(dtype, 1, B, H, P, kOrderPlain, pad, lead);
    out.make(dtype, 1, B, H, P, order, pad, lead);
    dt.make(turn % 2 ? dtype : MAMBA_FLOAT32, 1, B, H, P, order, pad, lead);
    A.make(parameter_dtype, 1, H, P, N, order, pad, lead);
    Bt.make(dtype, 1, B, G, N, order, pad, lead);
    Ct.make(dtype, 1, B, G, N, kOrderPlain, pad, lead);
    D.make(parameter_dtype, 1, 1, H, P, order, pad, lead);
    bias.make(parameter_dtype, 1, 1, H, P, order, pad, lead);
    if (expanded) {
        expand(A, 2);
        expand(A, 3);
        expand(dt, 3);
        expand(D, 3);
        expand(bias, 3);
    }
    before.fill_random(1.0, 0.0);
    memcpy(state.host, before.host, static_cast<size_t>(state.elements * element_size(state_dtype)));
    state.upload();
    x.fill_random(1.0, 0.0);
    z.fill_random(1.0, 0.0);
    dt.fill_random(dt_softplus ? 3.0 : 0.2, dt_softplus ? -2.0 : 0.5);
    A.fill_random(0.5, -1.5);
    Bt.fill_random(1.0, 0.0);
    Ct.fill_random(1.0, 0.0);
    D.fill_random(1.0, 0.0);
    bias.fill_random(1.0, 0.0);
    if (dt_softplus && B * H * P > 2) {  // far into both ends of softplus
        dt.set(0, B - 1, H - 1, P - 1, 30.0);
        dt.set(0, 0, 0, 0, -25.0);
        dt.upload();
    }
    int32_t indices[256];
    for (int64_t b = 0; b < B; ++b) {
        indices[b] = static_cast<int32_t>(b == 1 ? -1 : (b == 2 ? rows + 3 : rows - 1 - b));
    }
    int32_t* device = nullptr;
    check_cuda(cudaMalloc(reinterpret_cast<void**>(&device), sizeof(indices)), "malloc");
    check_cuda(cudaMemcpy(device, indices, sizeof(indices), cudaMemcpyHostToDevice), "copy");

    MambaSelectiveStateUpdate p;
    memset(&p, 0, sizeof(p));
    p.batch = B;
    p.nheads = H;
    p.headdim = P;
    p.dstate = N;
    p.ngroups = G;
    p.state_dtype = state_dtype;
    p.x_dtype = p.BC_dtype = dtype;
    p.dt_dtype = dt.dtype;
    p.A_dtype = p.D_dtype = p.dt_bias_dtype = parameter_dtype;
    p.dt_softplus = dt_softplus;
    p.state = state.data();
    p.x = x.data();
    p.dt = dt.data();
    p.A = A.data();
    p.B = Bt.data();
    p.C = Ct.data();
    p.D = use_D ? D.data() : nullptr;
    p.z = use_z ? z.data() : nullptr;
    p.dt_bias = use_bias ? bias.data() : nullptr;
    p.state_batch_indices = indexed ? device : nullptr;
    p.out = out.data();
    p.state_rows = rows;
    p.state_row_stride = state.stride[0];
    p.state_head_stride = state.stride[1];
    p.state_dim_stride = state.stride[2];
    p.state_dstate_stride = state.stride[3];
    p.x_batch_stride = x.stride[1];
    p.x_head_stride = x.stride[2];
    p.x_dim_stride = x.stride[3];
    p.dt_batch_stride = dt.stride[1];
    p.dt_head_stride = dt.stride[2];
    p.dt_dim_stride = dt.stride[3];
    p.A_head_stride = A.stride[1];
    p.A_dim_stride = A.stride[2];
    p.A_dstate_stride = A.stride[3];
    p.B_batch_stride = Bt.stride[1];
    p.B_group_stride = Bt.stride[2];
    p.B_dstate_stride = Bt.stride[3];
    p.C_batch_stride = Ct.stride[1];
    p.C_group_stride = Ct.stride[2];
    p.C_dstate_stride = Ct.stride[3];
    p.D_head_stride = D.stride[2];
    p.D_dim_stride = D.stride[3];
    p.z_batch_stride = z.stride[1];
    p.z_head_stride = z.stride[2];
    p.z_dim_stride = z.stride[3];
    p.dt_bias_head_stride = bias.stride[2];
    p.dt_bias_dim_stride = bias.stride[3];
    p.out_batch_stride = out.stride[1];
    p.out_head_stride = out.stride[2];
    p.out_dim_stride = out.stride[3];
    if (!check_status(mamba_selective_state_update(&p))) {
        return;
    }
    check_cuda(cudaDeviceSynchronize(), "kernel");
    out.download();
    state.download();

    Comparison out_check = {"out", 0}, state_check = {"state", 0};
    for (int64_t b = 0; b < B; ++b) {
        const int64_t row = indexed ? indices[b] : b;
        for (int64_t h = 0; h < H; ++h) {
            for (int64_t i = 0; i < P; ++i) {
                if (row < 0 || row >= rows) {
                    out_check.check(out.get(0, b, h, i), row < 0 ? 0.0 : NAN, 0.0, b, h, i);
                    continue;
                }
                double step = dt.get(0, b, h, i) + (use_bias ? bias.get(0, 0, h, i) : 0.0);
                step = dt_softplus ? (step > 20.0 ? step : log1p(exp(step))) : step;
                const double input = x.get(0, b, h, i);
                double y = use_D ? D.get(0, 0, h, i) * input : 0.0;
                double size = fabs(y);
                for (int64_t n = 0; n < N; ++n) {
                    const double decay = exp(step * A.get(0, h, i, n));
                    const double update = step * Bt.get(0, b, h / (H / G), n) * input;
                    const double next = decay * before.get(row, h, i, n) + update;
                    const double scale = fabs(decay * before.get(row, h, i, n)) + fabs(update);
                    y += Ct.get(0, b, h / (H / G), n) * next;
                    size += fabs(Ct.get(0, b, h / (H / G), n)) * scale;
                    state_check.check(state.get(row, h, i, n), next,
                                      fabs(next) * rounding(state_dtype) * 1.02 + scale * 4e-6 + 1e-6, row, h, i * N + n);
                }
                double gate = 1.0;
                if (use_z) {
                    const double zi = z.get(0, b, h, i);
                    gate = zi * ref_sigmoid(zi);
                }
                out_check.check(out.get(0, b, h, i), y * gate,
                                fabs(y * gate) * rounding(dtype) * 1.02 + size * fabs(gate) * 4e-6 + 1e-6, b, h, i);
            }
        }
    }
    out_check.finish(&out);
    state_check.finish(&state);
    Tensor* const tensors[] = {&state, &before, &x, &z, &out, &dt, &A, &Bt, &Ct, &D, &bias};
    for (Tensor* tensor : tensors) {
        tensor->release();
    }
    cudaFree(device);
}

static void test_state_update() {
    // B, H, P, N, G
    const int64_t sizes[][5] = {{1, 1, 1, 1, 1},   {2, 1, 40, 16, 1}, {1, 300, 1, 16, 2}, {9, 4, 8, 16, 2},
                                {3, 2, 5, 7, 1},   {2, 3, 16, 64, 3}, {4, 2, 33, 128, 1}, {2, 2, 3, 256, 2},
                                {3, 1, 17, 20, 1}, {2, 4, 4, 255, 4}, {130, 1, 12, 8, 1}, {1, 8, 64, 130, 1},
                                {2, 5, 1, 12, 5}};
    int turn = 0;
    for (const int64_t(&size)[5] : sizes) {
        for (int32_t dtype = 0; dtype < 3; ++dtype) {
            for (int variant = 0; variant < 8; ++variant, ++turn) {
                const int32_t state_dtype = variant % 2 == 0 ? MAMBA_FLOAT32 : dtype;
                run_state_update_case(turn, size[0], size[1], size[2], size[3], size[4], state_dtype, dtype);
            }
        }
    }
    const int64_t empty[][5] = {{0, 2, 3, 16, 1}, {2, 0, 3, 16, 1}, {2, 2, 0, 16, 1}};
    for (const int64_t(&size)[5] : empty) {
        run_state_update_case(turn++, size[0], size[1], size[2], size[3], size[4], MAMBA_FLOAT32, MAMBA_FLOAT32);
    }
}
