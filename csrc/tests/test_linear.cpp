// linear of both libraries against double-precision sums, over sizes, strides and dtypes.
#include "tests/testing.h"

using testing::begin_case;
using testing::expect_close;
using testing::expect_error;
using testing::expect_ok;
using testing::Tensor;

static void run_case(int64_t rows, int64_t features, int64_t outputs, int32_t dtype, int turn) {
    begin_case("linear %d dtype=%d R=%d in=%d out=%d", turn, dtype, static_cast<int>(rows), static_cast<int>(features),
               static_cast<int>(outputs));
    const int64_t gap = turn % 3 == 1 ? 3 : turn % 3 == 2 ? 8 : 0;  // the second keeps vectors aligned
    Tensor x(dtype, {rows, features}, gap), weight(dtype, {outputs, features}), out(dtype, {rows, outputs}, gap);
    Tensor bias(turn % 2 ? dtype : MAMBA_FLOAT32, {outputs});
    x.fill_random(1.0);
    weight.fill_random(features > 0 ? 1.0 / sqrt(static_cast<double>(features)) : 1.0);
    bias.fill_random(1.0);
    const bool use_bias = turn % 4 != 3;
    MambaLinear p;
    memset(&p, 0, sizeof(p));
    p.run.num_threads = 1 + turn % 3;
    p.rows = rows;
    p.in_features = features;
    p.out_features = outputs;
    p.dtype = p.weight_dtype = dtype;
    p.bias_dtype = bias.dtype;
    p.x = x.data();
    p.weight = weight.data();
    p.bias = use_bias ? bias.data() : nullptr;
    p.out = out.data();
    p.x_row_stride = x.stride[0];
    p.out_row_stride = out.stride[0];
    if (!expect_ok(mamba_linear(&p))) {
        return;
    }
    expect_close("out", out, 4e-6, [&](int64_t r, int64_t o, int64_t, int64_t) {
        double sum = use_bias ? bias.get(o) : 0.0;
        for (int64_t i = 0; i < features; ++i) {
            sum += weight.get(o, i) * x.get(r, i);
        }
        return sum;
    });
}

// A weight of int8, whose scales are read as they are. mamba_cpu rounds x to 16 bits.
static void run_int8_case(int64_t rows, int64_t features, int64_t outputs, int32_t dtype, int turn) {
    begin_case("linear int8 %d dtype=%d R=%d in=%d out=%d", turn, dtype, static_cast<int>(rows), static_cast<int>(features),
               static_cast<int>(outputs));
    const int64_t gap = turn % 3 == 1 ? 3 : turn % 3 == 2 ? 8 : 0, blocks = (features + 31) / 32;
    Tensor x(dtype, {rows, features}, gap), out(dtype, {rows, outputs}, gap);
    Tensor scales(MAMBA_FLOAT16, {outputs, blocks}), bias(MAMBA_FLOAT32, {outputs});
    testing::Memory<int8_t> weight(static_cast<size_t>(outputs * features) + 1, 0);
    x.fill_random(1.0);
    scales.fill_random(0.01 / sqrt(static_cast<double>(features + 1)));
    bias.fill_random(1.0);
    for (int64_t i = 0; i < outputs * features; ++i) {
        weight.data()[i] = static_cast<int8_t>((i * 89 + turn) % 256 - 128);
    }
    MambaLinear p;
    memset(&p, 0, sizeof(p));
    p.run.num_threads = 1 + turn % 3;
    p.rows = rows;
    p.in_features = features;
    p.out_features = outputs;
    p.dtype = dtype;
    p.weight_dtype = MAMBA_INT8;
    p.bias_dtype = bias.dtype;
    p.x = x.data();
    p.weight = weight.data();
    p.scales = scales.data();
    p.bias = bias.data();
    p.out = out.data();
    p.x_row_stride = x.stride[0];
    p.out_row_stride = out.stride[0];
    if (!expect_ok(mamba_linear(&p))) {
        return;
    }
    expect_close("out", out, 1e-4, [&](int64_t r, int64_t o, int64_t, int64_t) {
        double sum = bias.get(o);
        for (int64_t i = 0; i < features; ++i) {
            sum += scales.get(o, i / 32) * weight.data()[o * features + i] * x.get(r, i);
        }
        return sum;
    });
}

static void test_int8() {
    const int64_t sizes[][3] = {{1, 1, 1},  {1, 31, 5},  {1, 32, 1}, {1, 33, 40}, {2, 48, 17},  {3, 768, 33},
                                {4, 64, 9}, {5, 100, 3}, {8, 96, 8}, {9, 33, 21}, {1, 2500, 19}};
    int turn = 0;
    for (const auto& size : sizes) {
        for (int32_t dtype = MAMBA_FLOAT32; dtype <= MAMBA_BFLOAT16; ++dtype, ++turn) {
            run_int8_case(size[0], size[1], size[2], dtype, turn);
        }
    }
}

static void test_errors() {
    begin_case("linear errors");
    MambaLinear p;
    memset(&p, 0, sizeof(p));
    p.rows = p.in_features = p.out_features = 1;
    p.run.num_threads = 1;
    expect_error(mamba_linear(&p), MAMBA_ERROR_INVALID, "x is NULL");
    p.rows = -1;
    expect_error(mamba_linear(&p), MAMBA_ERROR_INVALID, "rows must be at least 0, got -1");
    expect_error(mamba_linear(nullptr), MAMBA_ERROR_INVALID, "params is NULL");
}

static void test_table() {
    const int64_t sizes[][3] = {{1, 1, 1},   {1, 768, 50}, {1, 1000, 9}, {2, 7, 33}, {3, 256, 17}, {4, 264, 8},   {5, 2049, 3},
                                {8, 96, 40}, {9, 33, 21},  {0, 4, 3},    {2, 4, 0},  {2, 0, 5},    {1, 4096, 300}};
    int turn = 0;
    for (const auto& size : sizes) {
        for (int32_t dtype = MAMBA_FLOAT32; dtype <= MAMBA_BFLOAT16; ++dtype) {
            for (int variant = 0; variant < 4; ++variant, ++turn) {
                run_case(size[0], size[1], size[2], dtype, turn);
            }
        }
    }
}

int main(int argc, char** argv) {
    return testing::run_tests(argc, argv, [] {
        test_table();
        test_int8();
        test_errors();
    });
}
