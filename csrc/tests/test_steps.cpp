// mamba2_step and mamba_step of both libraries against double-precision loops: the output, and both states.
#include "tests/testing.h"

using testing::begin_case;
using testing::expect_close;
using testing::expect_ok;
using testing::sigmoid;
using testing::Tensor;

static const double kArithmetic = 1e-5;

static double silu(double x) {
    return x * sigmoid(x);
}
static double softplus(double x) {
    return x > 20 ? x : log1p(exp(x));
}

// The convolution's value and its new state, of inputs (B, I) that begin at a column of `rows`.
struct Convolution {
    int64_t width, length;
    Tensor state, weight, bias, want_state;
    std::vector<double> out;  // (B, I)

    Convolution(int64_t batch, int64_t channels, int64_t width_, int64_t length_, int32_t dtype, int64_t gap)
        : width(width_),
          length(length_),
          state(dtype, {batch, channels, length_}, gap),
          weight(dtype, {channels, width_}),
          bias(dtype, {channels}) {
        state.fill_random(1.0);
        weight.fill_random(0.5);
        bias.fill_random(0.5);
    }
    void run(const Tensor& rows, int64_t column) {
        want_state = state;
        out.clear();
        state.for_each([&](int64_t b, int64_t c, int64_t s, int64_t) {
            const double input = rows.get(b, column + c);
            want_state.set(s + 1 < length ? state.get(b, c, s + 1) : input, b, c, s);
            if (s == 0) {
                double sum = bias.get(c) + weight.get(c, width - 1) * input;
                for (int64_t k = 1; k < width; ++k) {
                    sum += weight.get(c, width - 1 - k) * state.get(b, c, length - k);
                }
                out.push_back(silu(sum));
            }
        });
    }
    double get(int64_t b, int64_t c) const { return out[static_cast<size_t>(b * state.size[1] + c)]; }
    template <class Params>
    void fill(Params* p) {
        p->width = static_cast<int32_t>(width);
        p->state_len = length;
        p->conv_state_dtype = state.dtype;
        p->conv_weight_dtype = weight.dtype;
        p->conv_bias_dtype = bias.dtype;
        p->conv_state = state.data();
        p->conv_weight = weight.data();
        p->conv_bias = bias.data();
        p->conv_state_batch_stride = state.stride[0];
        p->conv_state_dim_stride = state.stride[1];
        p->conv_state_len_stride = state.stride[2];
    }
    void expect_state() {
        expect_close("conv_state", state, kArithmetic,
                     [&](int64_t b, int64_t c, int64_t s, int64_t) { return want_state.get(b, c, s); });
    }
};

static void expect_state(const Tensor& state, const Tensor& want, double arithmetic = kArithmetic) {
    // a 16-bit state may be rounded the other way where float32 and double lie on either side of a tie
    const double tie = state.dtype == MAMBA_FLOAT32 ? arithmetic : 2 * testing::rounding(state.dtype);
    expect_close("state", state, tie, [&](int64_t i, int64_t j, int64_t k, int64_t l) { return want.get(i, j, k, l); });
}

static void run_mamba2(const int64_t* size, int32_t dtype, int turn) {
    const int64_t B = size[0], H = size[1], P = size[2], G = size[3], N = size[4];
    begin_case("mamba2_step %d dtype=%d B=%d H=%d P=%d G=%d N=%d", turn, dtype, static_cast<int>(B), static_cast<int>(H),
               static_cast<int>(P), static_cast<int>(G), static_cast<int>(N));
    const int64_t gap = turn % 4 == 1 ? 3 : turn % 4 == 3 ? 8 : 0;
    const bool norm = turn % 2 == 0, before = turn % 4 == 2;
    const int64_t I = H * P + 2 * G * N, group = H * P / G;
    Tensor rows(dtype, {B, H * P + I + H}, gap), state(turn % 5 == 4 ? MAMBA_FLOAT32 : dtype, {B, H, P, N}, gap);
    Tensor out(dtype, {B, H * P}, gap), D(dtype, {H, P});
    Tensor dt_bias(dtype, {H}), A_log(dtype, {H}), norm_weight(dtype, {H * P});
    Convolution conv(B, I, 2 + turn % 3, 4 + turn % 2, dtype, gap);
    for (Tensor* tensor : {&rows, &state, &D, &dt_bias, &A_log, &norm_weight}) {
        tensor->fill_random(0.7);
    }
    conv.run(rows, H * P);
    Tensor want_state = state;
    std::vector<double> y(static_cast<size_t>(B * H * P));
    for (int64_t b = 0; b < B; ++b) {
        for (int64_t h = 0; h < H; ++h) {
            const double dt = softplus(rows.get(b, H * P + I + h) + dt_bias.get(h)), A = -exp(A_log.get(h));
            const int64_t g = h / (H / G);
            for (int64_t q = 0; q < P; ++q) {
                double sum = D.get(h, q) * conv.get(b, h * P + q);
                for (int64_t n = 0; n < N; ++n) {
                    const double input = dt * conv.get(b, H * P + g * N + n) * conv.get(b, h * P + q);
                    const double next = exp(dt * A) * state.get(b, h, q, n) + input;
                    want_state.set(next, b, h, q, n);
                    sum += conv.get(b, H * P + (G + g) * N + n) * next;
                }
                y[static_cast<size_t>((b * H + h) * P + q)] = sum;
            }
        }
    }
    const auto normalised = [&](int64_t b, int64_t c) {
        const auto value = [&](int64_t k) {
            const double z = silu(rows.get(b, k));
            return y[static_cast<size_t>(b * H * P + k)] * (norm && before ? 1.0 : z);
        };
        if (!norm) {
            return value(c);
        }
        double squares = 0.0;
        for (int64_t k = c / group * group; k < (c / group + 1) * group; ++k) {
            squares += value(k) * value(k);
        }
        const double gate = before ? silu(rows.get(b, c)) : 1.0;
        return value(c) / sqrt(squares / static_cast<double>(group) + 1e-5) * norm_weight.get(c) * gate;
    };

    MambaMamba2Step p;
    memset(&p, 0, sizeof(p));
    p.run.num_threads = 1 + turn % 3;
    p.batch = B;
    p.nheads = H;
    p.headdim = P;
    p.ngroups = G;
    p.dstate = N;
    p.gate = 1;
    p.norm_before_gate = before;
    p.dtype = dtype;
    p.state_dtype = state.dtype;
    p.dt_bias_dtype = p.A_log_dtype = p.D_dtype = p.norm_weight_dtype = dtype;
    p.dt_max = static_cast<float>(HUGE_VAL);
    p.norm_eps = 1e-5f;
    p.zxBCdt = rows.data();
    p.state = state.data();
    p.dt_bias = dt_bias.data();
    p.A_log = A_log.data();
    p.D = D.data();
    p.norm_weight = norm ? norm_weight.data() : nullptr;
    p.out = out.data();
    p.zxBCdt_batch_stride = rows.stride[0];
    p.out_batch_stride = out.stride[0];
    p.state_batch_stride = state.stride[0];
    p.state_head_stride = state.stride[1];
    p.state_dim_stride = state.stride[2];
    p.state_dstate_stride = state.stride[3];
    p.D_head_stride = D.stride[0];
    p.D_dim_stride = D.stride[1];
    conv.fill(&p);
    if (!expect_ok(mamba_mamba2_step(&p))) {
        return;
    }
    // before the norm the output lies in memory rounded
    const double rounded = dtype == MAMBA_FLOAT32 ? kArithmetic : 2 * testing::rounding(dtype);
    expect_close("out", out, norm ? rounded : kArithmetic,
                 [&](int64_t b, int64_t c, int64_t, int64_t) { return normalised(b, c); });
    expect_state(state, want_state);
    conv.expect_state();
}

// x_proj's weight as int8 with scales.
struct Int8Weight {
    int64_t columns;
    testing::Memory<int8_t> values;
    Tensor scales;

    Int8Weight(int64_t rows, int64_t columns_)
        : columns(columns_), values(static_cast<size_t>(rows * columns_)), scales(MAMBA_FLOAT16, {rows, (columns_ + 31) / 32}) {
        scales.fill_random(0.01 / sqrt(static_cast<double>(columns)));
        for (size_t i = 0; i < values.size(); ++i) {
            values[i] = static_cast<int8_t>(static_cast<int>(i * 89 % 255) - 127);
        }
    }
    double get(int64_t row, int64_t column) const {
        return values[static_cast<size_t>(row * columns + column)] * scales.get(row, column / 32);
    }
};

static void run_mamba(const int64_t* size, int32_t dtype, int turn) {
    const int64_t B = size[0], D = size[1], R = size[2], N = size[3];
    begin_case("mamba_step %d dtype=%d B=%d D=%d R=%d N=%d", turn, dtype, static_cast<int>(B), static_cast<int>(D),
               static_cast<int>(R), static_cast<int>(N));
    const int64_t gap = turn % 4 == 1 ? 3 : turn % 4 == 3 ? 8 : 0;
    Tensor rows(dtype, {B, 2 * D}, gap), state(turn % 5 == 4 ? MAMBA_FLOAT32 : dtype, {B, D, N}, gap), out(dtype, {B, D}, gap);
    Tensor x_proj(dtype, {R + 2 * N, D}), dt_proj(dtype, {D, R}), dt_bias(dtype, {D}), A_log(dtype, {D, N}), skip(dtype, {D});
    Convolution conv(B, D, 2 + turn % 3, 4 + turn % 2, dtype, gap);
    for (Tensor* tensor : {&rows, &state, &dt_bias, &A_log, &skip}) {
        tensor->fill_random(0.7);
    }
    x_proj.fill_random(1.0 / sqrt(static_cast<double>(D)));
    dt_proj.fill_random(1.0 / sqrt(static_cast<double>(R)));
    Int8Weight int8(R + 2 * N, D);
    const bool is_int8 = turn % 3 == 2;
    if (is_int8) {
#ifndef MAMBA_TEST_CUDA  // whose tensor cores take it rounded to dtype
        x_proj = Tensor(MAMBA_FLOAT32, {R + 2 * N, D});
#endif
        x_proj.for_each([&](int64_t o, int64_t d, int64_t, int64_t) { x_proj.set(int8.get(o, d), o, d); });
    }
    conv.run(rows, 0);
    Tensor want_state = state;
    std::vector<double> want;
    for (int64_t b = 0; b < B; ++b) {
        std::vector<double> projected(static_cast<size_t>(R + 2 * N), 0.0);
        x_proj.for_each([&](int64_t o, int64_t d, int64_t, int64_t) { projected[o] += x_proj.get(o, d) * conv.get(b, d); });
        for (int64_t d = 0; d < D; ++d) {
            double dt = dt_bias.get(d);
            for (int64_t r = 0; r < R; ++r) {
                dt += dt_proj.get(d, r) * projected[r];
            }
            dt = softplus(dt);
            double y = skip.get(d) * conv.get(b, d);
            for (int64_t n = 0; n < N; ++n) {
                const double next =
                    exp(-dt * exp(A_log.get(d, n))) * state.get(b, d, n) + dt * projected[R + n] * conv.get(b, d);
                want_state.set(next, b, d, n);
                y += projected[R + N + n] * next;
            }
            want.push_back(y * silu(rows.get(b, D + d)));
        }
    }

    MambaMambaStep p;
    memset(&p, 0, sizeof(p));
    p.run.num_threads = 1 + turn % 3;
    p.batch = B;
    p.dim = D;
    p.dt_rank = R;
    p.dstate = N;
    p.dtype = dtype;
    p.state_dtype = state.dtype;
    p.dt_bias_dtype = p.A_log_dtype = p.D_dtype = dtype;
    p.xz = rows.data();
    p.x_proj_weight = is_int8 ? int8.values.data() : x_proj.data();
    p.x_proj_scales = is_int8 ? int8.scales.data() : nullptr;
    p.dt_proj_weight = dt_proj.data();
    p.dt_bias = dt_bias.data();
    p.state = state.data();
    p.A_log = A_log.data();
    p.D = skip.data();
    p.out = out.data();
    p.xz_batch_stride = rows.stride[0];
    p.out_batch_stride = out.stride[0];
    p.state_batch_stride = state.stride[0];
    p.state_dim_stride = state.stride[1];
    p.state_dstate_stride = state.stride[2];
    conv.fill(&p);
    testing::Memory<unsigned char> workspace(static_cast<size_t>(mamba_mamba_step_workspace(&p)) + 16, 0xff);
    p.workspace = workspace.data();
    if (!expect_ok(mamba_mamba_step(&p))) {
        return;
    }
    // with an int8 weight mamba_cpu rounds x_proj's input to 16 bits
    const double arithmetic = is_int8 && !testing::kCuda ? 3e-4 : kArithmetic;
    expect_close("out", out, arithmetic, [&](int64_t b, int64_t d, int64_t, int64_t) { return want[b * D + d]; });
    expect_state(state, want_state, arithmetic);
    conv.expect_state();
}

static void test_tables() {
    const int64_t mamba2[][5] = {{1, 1, 1, 1, 1},    {2, 4, 64, 1, 128}, {3, 6, 5, 3, 7},
                                 {1, 2, 33, 2, 256}, {9, 2, 8, 1, 20},   {3, 3, 16, 1, 64}};
    const int64_t mamba[][4] = {{1, 1, 1, 1},    {2, 130, 5, 16}, {9, 64, 4, 3},     {3, 70, 40, 100},
                                {1, 32, 3, 256}, {5, 64, 4, 16},  {1, 1552, 48, 16}, {18, 64, 4, 16}};
    int turn = 0;
    for (int i = 0; i < 8; ++i) {
        for (int32_t dtype = MAMBA_FLOAT32; dtype <= MAMBA_BFLOAT16; ++dtype) {
            for (int variant = 0; variant < 5; ++variant, ++turn) {
                if (i < 6) {
                    run_mamba2(mamba2[i], dtype, turn);
                }
                run_mamba(mamba[i], dtype, turn);
            }
        }
    }
}

int main(int argc, char** argv) {
    return testing::run_tests(argc, argv, [] { test_tables(); });
}
