// norm and SwiGLU of mamba_cpu against double-precision loops: both norms, residual, gates, groups, all dtypes, rows apart.
#include "tests/testing.h"

using testing::begin_case;
using testing::expect;
using testing::expect_close;
using testing::expect_error;
using testing::expect_ok;
using testing::sigmoid;
using testing::Tensor;
using Values = std::vector<double>;

static const double kArithmetic = 4e-6;

static double silu(double x) {
    return x * sigmoid(x);
}
static double silu_slope(double x) {
    return sigmoid(x) * (1.0 + x * (1.0 - sigmoid(x)));
}

enum class Beside { nothing, residual, gate_first, gate_last };

static void run_norm_case(int turn, Beside beside, int64_t rows, int64_t groups, int64_t size, int32_t dtype, bool wide) {
    const bool rms = turn % 2 != 0, use_bias = turn % 3 != 0;
    const bool residual = beside == Beside::residual, gate = beside == Beside::gate_first || beside == Beside::gate_last;
    const int32_t other = wide ? MAMBA_FLOAT32 : dtype;
    const int64_t width = groups * size;
    begin_case("norm %d beside=%d R=%d G=%d S=%d dtype=%d/%d rms=%d bias=%d", turn, static_cast<int>(beside),
               static_cast<int>(rows), static_cast<int>(groups), static_cast<int>(size), dtype, other, rms, use_bias);
    Tensor x(dtype, {rows, width}, turn % 3), second(other, {rows, width}, turn % 2), sum(other, {rows, width}, 1);
    Tensor out(dtype, {rows, width}, turn % 4), weight(turn % 2 ? dtype : MAMBA_FLOAT32, {width});
    Tensor bias(MAMBA_FLOAT32, {width}), mean(MAMBA_FLOAT32, {rows, groups}), rstd(MAMBA_FLOAT32, {rows, groups});
    x.fill_random(1.0, 0.5);
    second.fill_random(1.0);
    weight.fill_random(1.0);
    bias.fill_random(1.0);

    MambaNorm p;
    memset(&p, 0, sizeof(p));
    p.run.num_threads = 1 + turn % 3;
    p.rows = rows;
    p.ngroups = groups;
    p.group_size = size;
    p.is_rms_norm = rms;
    p.norm_before_gate = beside == Beside::gate_last;
    p.dtype = dtype;
    p.other_dtype = other;
    p.weight_dtype = weight.dtype;
    p.bias_dtype = bias.dtype;
    p.eps = 1e-5f;
    p.x = x.data();
    p.x_row_stride = x.stride[0];
    p.residual = residual ? second.data() : nullptr;
    p.residual_row_stride = p.z_row_stride = second.stride[0];
    p.z = gate ? second.data() : nullptr;
    p.weight = weight.data();
    p.bias = use_bias ? bias.data() : nullptr;
    p.out = out.data();
    p.out_row_stride = out.stride[0];
    p.residual_out = residual ? sum.data() : nullptr;
    p.residual_out_row_stride = sum.stride[0];
    p.mean = rms ? nullptr : mean.floats();
    p.rstd = rstd.floats();
    expect_ok(mamba_norm_forward(&p));

    // The sum as it was stored, so that its rounding is not held against what follows.
    if (residual) {
        expect_close("sum", sum, 1e-7, [&](int64_t r, int64_t i, int64_t, int64_t) { return x.get(r, i) + second.get(r, i); });
    }
    Tensor dout(dtype, {rows, width}, 1), dsum(other, {rows, width}, 2), dx(dtype, {rows, width}, turn % 2);
    Tensor dsecond(other, {rows, width}, 3), dweight(weight.dtype, {width}), dbias(MAMBA_FLOAT32, {width});
    dout.fill_random(1.0);
    dsum.fill_random(1.0);
    Values want_out(static_cast<size_t>(rows * width)), want_dx = want_out, want_dsecond = want_out;
    Values want_dweight(static_cast<size_t>(width), 0.0), want_dbias = want_dweight;
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t g = 0; g < groups; ++g) {
            Values s(static_cast<size_t>(size)), wdy = s;
            double average = 0.0, variance = 0.0, along_x_hat = 0.0, along_one = 0.0;
            for (int64_t k = 0; k < size; ++k) {
                const int64_t i = g * size + k;
                s[k] = residual ? sum.get(r, i) : x.get(r, i);
                s[k] *= beside == Beside::gate_first ? silu(second.get(r, i)) : 1.0;
                average += rms ? 0.0 : s[k] / static_cast<double>(size);
            }
            for (int64_t k = 0; k < size; ++k) {
                variance += (s[k] - average) * (s[k] - average) / static_cast<double>(size);
            }
            const double scale = 1.0 / sqrt(variance + 1e-5);
            for (int64_t k = 0; k < size; ++k) {
                const int64_t i = g * size + k, e = r * width + i;
                const double normed = (s[k] - average) * scale * weight.get(i) + (use_bias ? bias.get(i) : 0.0);
                const double z = second.get(r, i);
                double dy = dout.get(r, i);
                want_out[e] = beside == Beside::gate_last ? normed * silu(z) : normed;
                if (beside == Beside::gate_last) {
                    want_dsecond[e] = dy * normed * silu_slope(z);
                    dy *= silu(z);
                }
                s[k] = (s[k] - average) * scale;
                wdy[k] = dy * weight.get(i);
                want_dweight[i] += dy * s[k];
                want_dbias[i] += dy;
                along_x_hat += wdy[k] * s[k] / static_cast<double>(size);
                along_one += rms ? 0.0 : wdy[k] / static_cast<double>(size);
            }
            for (int64_t k = 0; k < size; ++k) {
                const int64_t i = g * size + k, e = r * width + i;
                double gradient = (wdy[k] - s[k] * along_x_hat - along_one) * scale;
                if (beside == Beside::gate_first) {
                    want_dsecond[e] = gradient * x.get(r, i) * silu_slope(second.get(r, i));
                    gradient *= silu(second.get(r, i));
                }
                gradient += residual ? dsum.get(r, i) : 0.0;
                want_dx[e] = gradient;
                want_dsecond[e] = residual ? gradient : want_dsecond[e];
            }
        }
    }
    const auto of = [width](const Values& values) {
        return [&values, width](int64_t r, int64_t i, int64_t, int64_t) { return values[r * width + i]; };
    };
    const auto of_column = [](const Values& values) {
        return [&values](int64_t i, int64_t, int64_t, int64_t) { return values[i]; };
    };
    expect_close("out", out, kArithmetic, of(want_out));

    MambaNormBackward q;
    memset(&q, 0, sizeof(q));
    q.forward = p;
    q.dout = dout.data();
    q.dout_row_stride = dout.stride[0];
    q.dresidual_out = residual ? dsum.data() : nullptr;
    q.dresidual_out_row_stride = dsum.stride[0];
    q.dx = dx.data();
    q.dx_row_stride = dx.stride[0];
    q.dresidual = residual ? dsecond.data() : nullptr;
    q.dz = gate ? dsecond.data() : nullptr;
    q.dresidual_row_stride = q.dz_row_stride = dsecond.stride[0];
    q.dweight = dweight.data();
    q.dbias = use_bias ? dbias.data() : nullptr;
    expect(mamba_norm_backward_workspace(&p) == 0, "the CPU needs no workspace");
    expect_ok(mamba_norm_backward(&q));
    // the distance of a single element from the mean is zero up to rounding, and rstd large
    const double arithmetic = 20 * kArithmetic, scale = size == 1 ? 1.0 : 1e-3;
    expect_close("dx", dx, arithmetic, of(want_dx), scale);
    expect_close("dweight", dweight, arithmetic, of_column(want_dweight), scale);
    if (residual || gate) {
        expect_close("dsecond", dsecond, arithmetic, of(want_dsecond), scale);
    }
    if (use_bias) {
        expect_close("dbias", dbias, arithmetic, of_column(want_dbias));
    }
}

static void run_swiglu_case(int turn, int64_t rows, int64_t width, int32_t dtype) {
    begin_case("swiglu %d R=%d N=%d dtype=%d", turn, static_cast<int>(rows), static_cast<int>(width), dtype);
    Tensor xy(dtype, {rows, 2 * width}, turn % 3), out(dtype, {rows, width}, 1), again(dtype, {rows, width}, 2);
    Tensor dout(dtype, {rows, width}, 1), dxy(dtype, {rows, 2 * width}, turn % 2);
    xy.fill_random(2.0);
    dout.fill_random(1.0);
    MambaSwiglu p;
    memset(&p, 0, sizeof(p));
    p.run.num_threads = 1 + turn % 3;
    p.rows = rows;
    p.width = width;
    p.dtype = dtype;
    p.xy = xy.data();
    p.xy_row_stride = xy.stride[0];
    p.out = out.data();
    p.out_row_stride = out.stride[0];
    expect_ok(mamba_swiglu_forward(&p));
    const auto want = [&](int64_t r, int64_t i, int64_t, int64_t) { return silu(xy.get(r, i)) * xy.get(r, width + i); };
    expect_close("out", out, kArithmetic, want);
    p.dout = dout.data();
    p.dout_row_stride = dout.stride[0];
    p.dxy = dxy.data();
    p.dxy_row_stride = dxy.stride[0];
    p.out = turn % 2 ? again.data() : nullptr;
    p.out_row_stride = again.stride[0];
    expect_ok(mamba_swiglu_backward(&p));
    if (p.out != nullptr) {
        expect_close("out again", again, kArithmetic, want);
    }
    expect_close("dxy", dxy, kArithmetic, [&](int64_t r, int64_t i, int64_t, int64_t) {
        const double x = xy.get(r, i % width), y = xy.get(r, width + i % width), dy = dout.get(r, i % width);
        return i < width ? dy * y * silu_slope(x) : dy * silu(x);
    });
}

static void run_tests() {
    const Beside all[] = {Beside::nothing, Beside::residual, Beside::gate_first, Beside::gate_last};
    const int64_t shapes[][3] = {{1, 1, 1}, {3, 1, 7}, {5, 3, 5}, {4, 2, 16}, {2, 1, 33}, {37, 4, 24}, {400, 1, 1000}};
    int turn = 0;
    for (int32_t dtype = MAMBA_FLOAT32; dtype <= MAMBA_BFLOAT16; ++dtype) {
        for (const Beside beside : all) {
            for (const auto& shape : shapes) {
                run_norm_case(turn, beside, shape[0], shape[1], shape[2], dtype, turn % 5 < 2);
                ++turn;
            }
        }
        for (int64_t width = 1; width <= 40; width += 13) {
            run_swiglu_case(turn++, 7, width, dtype);
        }
    }
    run_swiglu_case(turn, 300, 1001, MAMBA_FLOAT32);

    begin_case("refused");
    MambaNorm p;
    memset(&p, 0, sizeof(p));
    expect_error(mamba_norm_forward(nullptr), MAMBA_ERROR_INVALID, "params is NULL");
    expect_error(mamba_norm_forward(&p), MAMBA_ERROR_INVALID, "ngroups must be at least 1, got 0");
    p.ngroups = p.group_size = p.rows = 1;
    expect_error(mamba_norm_forward(&p), MAMBA_ERROR_INVALID, "weight is NULL");
    p.dtype = MAMBA_FLOAT32;
    p.other_dtype = MAMBA_FLOAT16;
    expect_error(mamba_norm_forward(&p), MAMBA_ERROR_INVALID, "must be float32 or of x's dtype, float32, got float16");
    p.other_dtype = MAMBA_FLOAT32;
    p.group_size = static_cast<int64_t>(MAMBA_MAX_NORM_GROUP) + 1;
    expect_error(mamba_norm_forward(&p), MAMBA_ERROR_UNSUPPORTED, "group_size must be in [1, 1073741824], got 1073741825");
}

int main(int argc, char** argv) {
    return testing::run_tests(argc, argv, run_tests);
}
