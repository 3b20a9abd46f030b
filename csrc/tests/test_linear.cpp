// linear, dequantize and greedy_token of both libraries against loops in double, over sizes, strides and dtypes.
#include <vector>

#include "tests/testing.h"

using testing::begin_case;
using testing::expect;
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

#ifdef MAMBA_TEST_CUDA
// A norm before it, as mamba_cuda takes one.
static void run_norm_case(int64_t features, int64_t outputs, int32_t dtype, int turn) {
    begin_case("linear norm %d dtype=%d in=%d out=%d", turn, dtype, static_cast<int>(features), static_cast<int>(outputs));
    const int32_t residual_dtype = turn % 2 ? dtype : MAMBA_FLOAT32;
    Tensor x(dtype, {1, features}), residual(residual_dtype, {1, features}), sum(residual_dtype, {1, features});
    Tensor norm_weight(turn % 3 ? dtype : MAMBA_FLOAT32, {features}), out(dtype, {1, outputs});
    Tensor scales(MAMBA_FLOAT16, {outputs, (features + 31) / 32});
    testing::Memory<int8_t> weight(static_cast<size_t>(outputs * features), 0);
    x.fill_random(1.0);
    residual.fill_random(2.0);
    norm_weight.fill_random(1.0);
    scales.fill_random(0.01 / sqrt(static_cast<double>(features)));
    for (int64_t i = 0; i < outputs * features; ++i) {
        weight.data()[i] = static_cast<int8_t>((i * 89 + turn) % 256 - 128);
    }
    MambaLinear p;
    memset(&p, 0, sizeof(p));
    p.run.num_threads = 1;
    p.rows = 1;
    p.in_features = features;
    p.out_features = outputs;
    p.dtype = dtype;
    p.weight_dtype = MAMBA_INT8;
    p.norm_weight_dtype = norm_weight.dtype;
    p.residual_dtype = residual_dtype;
    p.norm_eps = 1e-5f;
    p.x = x.data();
    p.weight = weight.data();
    p.scales = scales.data();
    p.norm_weight = norm_weight.data();
    p.residual = turn % 4 == 3 ? nullptr : residual.data();
    p.residual_out = sum.data();
    p.out = out.data();
    if (!expect_ok(mamba_linear(&p))) {
        return;
    }
    expect_close("residual_out", sum, 1e-6, [&](int64_t, int64_t i, int64_t, int64_t) {
        return x.get(0, i) + (p.residual != nullptr ? residual.get(0, i) : 0.0);
    });
    double squares = 0.0;  // of the sum as it was rounded
    for (int64_t i = 0; i < features; ++i) {
        squares += sum.get(0, i) * sum.get(0, i);
    }
    const double rstd = 1.0 / sqrt(squares / static_cast<double>(features) + 1e-5);
    // The norm's result is rounded to dtype before it is multiplied.
    expect_close("out", out, dtype == MAMBA_FLOAT32 ? 1e-5 : 4e-3, [&](int64_t, int64_t o, int64_t, int64_t) {
        double product = 0.0;
        for (int64_t i = 0; i < features; ++i) {
            product += scales.get(o, i / 32) * weight.data()[o * features + i] * sum.get(0, i) * rstd * norm_weight.get(i);
        }
        return product;
    });
}

static void test_norm() {
    const int64_t sizes[][2] = {{16, 1}, {48, 17}, {768, 40}, {784, 9}, {2048, 33}};
    int turn = 0;
    for (const auto& size : sizes) {
        for (int32_t dtype = MAMBA_FLOAT32; dtype <= MAMBA_BFLOAT16; ++dtype, ++turn) {
            run_norm_case(size[0], size[1], dtype, turn);
        }
    }
}
#endif

static void test_int8() {
    const int64_t sizes[][3] = {{1, 1, 1},     {1, 31, 5},   {1, 32, 1},   {1, 33, 40},   {2, 48, 17},
                                {3, 768, 33},  {4, 64, 9},   {5, 100, 3},  {8, 96, 8},    {9, 33, 21},
                                {1, 2500, 19}, {1, 768, 37}, {1, 1536, 9}, {1, 32, 6400}, {1, 4112, 5}};
    int turn = 0;
    for (const auto& size : sizes) {
        for (int32_t dtype = MAMBA_FLOAT32; dtype <= MAMBA_BFLOAT16; ++dtype, ++turn) {
            run_int8_case(size[0], size[1], size[2], dtype, turn);
        }
    }
}

// Rows that indices of 4 or 8 bytes name, in mamba_cuda some of no row, or all rows.
static void run_dequantize_case(int64_t rows, int64_t features, int32_t dtype, int index_bytes) {
    begin_case("dequantize dtype=%d R=%d in=%d index=%d", dtype, static_cast<int>(rows), static_cast<int>(features),
               index_bytes);
    const int64_t blocks = (features + 31) / 32, weight_rows = index_bytes > 0 ? 7 : rows;
    Tensor scales(MAMBA_FLOAT16, {weight_rows, blocks}), out(dtype, {rows, features});
    testing::Memory<int8_t> weight(static_cast<size_t>(weight_rows * features) + 1, 0);
    testing::Memory<int32_t> short_indices(static_cast<size_t>(rows) + 1, 0);
    testing::Memory<int64_t> long_indices(static_cast<size_t>(rows) + 1, 0);
    scales.fill_random(0.01);
    for (int64_t i = 0; i < weight_rows * features; ++i) {
        weight.data()[i] = static_cast<int8_t>(i * 89 % 256 - 128);
    }
    for (int64_t r = 0; r < rows; ++r) {
        const int kind = testing::kCuda ? static_cast<int>(r % 5) : 0;
        long_indices.data()[r] = kind == 3 ? -1 - r : kind == 4 ? weight_rows + r : r * 3 % weight_rows;
        short_indices.data()[r] = static_cast<int32_t>(long_indices.data()[r]);
    }
    MambaDequantize p;
    memset(&p, 0, sizeof(p));
    p.run.num_threads = 2;
    p.rows = rows;
    p.features = features;
    p.weight_rows = weight_rows;
    p.dtype = dtype;
    p.index_bytes = index_bytes;
    p.weight = weight.data();
    p.scales = scales.data();
    p.indices = index_bytes == 8   ? static_cast<const void*>(long_indices.data())
                : index_bytes == 4 ? short_indices.data()
                                   : nullptr;
    p.out = out.data();
    if (!expect_ok(mamba_dequantize(&p))) {
        return;
    }
    expect_close("out", out, 1e-7, [&](int64_t r, int64_t i, int64_t, int64_t) {
        const int64_t row = index_bytes > 0 ? long_indices.data()[r] : r;
        return row < 0 || row >= weight_rows ? static_cast<double>(NAN)
                                             : static_cast<double>(weight.data()[row * features + i]) * scales.get(row, i / 32);
    });
}

static void test_dequantize() {
    const int64_t sizes[][2] = {{1, 768}, {1, 1}, {6, 31}, {7, 33}, {0, 8}, {3, 0}, {40, 4100}, {9, 2080}};
    for (const auto& size : sizes) {
        for (int32_t dtype = MAMBA_FLOAT32; dtype <= MAMBA_BFLOAT16; ++dtype) {
            for (int index_bytes = 0; index_bytes <= 8; index_bytes += 4) {
                run_dequantize_case(size[0], size[1], dtype, index_bytes);
            }
        }
    }
}

// turn: which of what a token is written to there is.
static void run_greedy_case(int64_t rows, int64_t vocabulary, int32_t dtype, int turn) {
    begin_case("greedy %d dtype=%d R=%d V=%d", turn, dtype, static_cast<int>(rows), static_cast<int>(vocabulary));
    const int64_t width = 5;
    Tensor logits(dtype, {rows, vocabulary}, turn % 3 == 1 ? 3 : turn % 3 == 2 ? 8 : 0);
    logits.fill_random(turn % 2 ? 1.0 : 100.0);
    testing::Memory<int64_t> tokens(static_cast<size_t>(rows) + 1, -1), ends(static_cast<size_t>(rows) + 1, 2);
    testing::Memory<int64_t> positions(static_cast<size_t>(rows) + 1, 7), eos(2, 0);
    testing::Memory<int64_t> sequences(static_cast<size_t>(rows * width) + 1, -1);
    testing::Memory<int32_t> lengths(static_cast<size_t>(rows) + 1, 9);
    testing::Memory<uint8_t> ended(static_cast<size_t>(rows) + 1, 0);
    std::vector<int64_t> expected;
    for (int64_t r = 0; r < rows; ++r) {
        int64_t best = 0;
        for (int64_t i = 1; i < vocabulary; ++i) {
            best = logits.get(r, i) > logits.get(r, best) ? i : best;
        }
        expected.push_back(best);
        ended.data()[r] = r % 3 == 1;
    }
    eos.data()[0] = vocabulary;
    eos.data()[1] = rows > 0 ? expected[0] : 0;
    MambaGreedyToken p;
    memset(&p, 0, sizeof(p));
    p.run.num_threads = 2;
    p.rows = rows;
    p.vocabulary = vocabulary;
    p.dtype = dtype;
    p.logits = logits.data();
    p.logits_row_stride = logits.stride[0];
    p.tokens = tokens.data();
    p.sequences = turn % 2 ? sequences.data() : nullptr;
    p.sequences_row_stride = width;
    p.ends = turn % 2 ? ends.data() : nullptr;
    p.positions = turn % 2 ? positions.data() : nullptr;
    p.lengths = turn % 2 ? lengths.data() : nullptr;
    p.eos = eos.data();
    p.eos_count = 2;
    p.ended = turn % 4 > 1 ? ended.data() : nullptr;
    if (!expect_ok(mamba_greedy_token(&p))) {
        return;
    }
    bool good = true;
    for (int64_t r = 0; r < rows; ++r) {
        const bool over = p.ended != nullptr && r % 3 == 1;
        const int64_t token = over ? vocabulary : expected[static_cast<size_t>(r)], more = turn % 2;
        for (int64_t i = 0; i < width; ++i) {
            good = good && sequences.data()[r * width + i] == (i == 2 && more ? token : -1);
        }
        good = good && tokens.data()[r] == token && ends.data()[r] == 2 + more && positions.data()[r] == 7 + more;
        good = good && lengths.data()[r] == 9 + more;
        good = good && (ended.data()[r] != 0) == (r % 3 == 1 || (p.ended != nullptr && token == eos.data()[1]));
    }
    good = good && tokens.data()[rows] == -1 && ends.data()[rows] == 2 && positions.data()[rows] == 7;
    expect(good && lengths.data()[rows] == 9 && ended.data()[rows] == 0, "what a token is written to differs");
}

static void test_greedy() {
    const int64_t sizes[][2] = {{1, 1}, {1, 59}, {4, 257}, {5, 8200}, {0, 8}, {2, 50277}};
    int turn = 0;
    for (const auto& size : sizes) {
        for (int32_t dtype = MAMBA_FLOAT32; dtype <= MAMBA_BFLOAT16; ++dtype) {
            for (int variant = 0; variant < 4; ++variant, ++turn) {
                run_greedy_case(size[0], size[1], dtype, turn);
            }
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
    p.rows = 2;
    p.norm_weight = &p;
#ifdef MAMBA_TEST_CUDA
    expect_error(mamba_linear(&p), MAMBA_ERROR_UNSUPPORTED, "a norm needs 1 row and an int8 weight, got 2 rows");
#else
    expect_error(mamba_linear(&p), MAMBA_ERROR_UNSUPPORTED, "a norm before it is in mamba_cuda alone");
    const int64_t indices[] = {2, 3};
    MambaDequantize q;
    memset(&q, 0, sizeof(q));
    q.rows = 2;
    q.features = 1;
    q.weight_rows = 3;
    q.run.num_threads = 1;
    q.index_bytes = 8;
    q.indices = indices;
    q.weight = q.scales = indices;
    q.out = &q;
    expect_error(mamba_dequantize(&q), MAMBA_ERROR_INDEX, "indices must be in 0..2, got 3");
#endif
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
#ifdef MAMBA_TEST_CUDA
        test_norm();
#endif
        test_dequantize();
        test_greedy();
        test_errors();
    });
}
