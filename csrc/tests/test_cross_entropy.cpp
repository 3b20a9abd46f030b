// cross_entropy of both libraries against double-precision loops: dtypes, sizes, rows apart, options, and labels of all kinds.
#include "tests/testing.h"

using testing::begin_case;
using testing::expect_close;
using testing::expect_error;
using testing::expect_ok;
using testing::Memory;
using testing::Tensor;

struct Options {
    float label_smoothing, z_loss;
    double scale;    // of the logits
    double special;  // in some places, unless 0
};

// What a row's loss and gradient are, in double.
struct Truth {
    double loss;
    std::vector<double> gradient;
};

static Truth row_truth(const MambaCrossEntropy& p, const Tensor& logits, int64_t row, int64_t label) {
    const int64_t size = p.vocabulary;
    Truth truth = {0.0, std::vector<double>(static_cast<size_t>(size), 0.0)};
    if (label == p.ignore_index) {
        return truth;
    }
    if (label < 0 || label >= size) {
        return {NAN, std::vector<double>(static_cast<size_t>(size), NAN)};
    }
    double max = -HUGE_VAL, sum = 0.0, mean = 0.0;
    for (int64_t j = 0; j < size; ++j) {
        max = fmax(max, logits.get(row, j));
    }
    for (int64_t j = 0; j < size; ++j) {
        sum += exp(logits.get(row, j) - max);
        mean += logits.get(row, j) / static_cast<double>(size);
    }
    const double smooth = p.label_smoothing, z = p.z_loss, lse = max + log(sum), share = smooth / static_cast<double>(size);
    truth.loss = z * lse * lse - (1.0 - smooth) * (logits.get(row, label) - max - log(sum));
    if (smooth != 0.0) {
        truth.loss -= smooth * (mean - max - log(sum));
    }
    for (int64_t j = 0; j < size; ++j) {
        const double of_label = j == label ? 1.0 - smooth : 0.0;
        truth.gradient[static_cast<size_t>(j)] = exp(logits.get(row, j) - max) / sum * (1.0 + 2.0 * z * lse) - share - of_label;
    }
    return truth;
}

static void run_case(int64_t rows, int64_t size, int32_t dtype, const Options& options, int turn) {
    begin_case("cross_entropy %d dtype=%d R=%d V=%d smoothing=%g z=%g scale=%g special=%g", turn, dtype, static_cast<int>(rows),
               static_cast<int>(size), options.label_smoothing, options.z_loss, options.scale, options.special);
    const int64_t gap = turn % 3 == 1 ? 3 : turn % 3 == 2 ? 8 : 0;  // the second keeps vectors aligned
    Tensor logits(dtype, {rows, size}, gap), losses(MAMBA_FLOAT32, {rows});
    logits.fill_random(options.scale);
    Memory<int64_t> labels(static_cast<size_t>(rows) + 1);
    for (int64_t r = 0; r < rows; ++r) {
        const int kind = static_cast<int>((turn + r) % 7);
        labels[static_cast<size_t>(r)] = kind == 5 ? -7 : kind == 6 ? (r % 2 ? size : -1) : (r * 31 + turn) % size;
        if (options.special != 0.0 && r % 2 == 0) {
            logits.set(options.special, r, testing::random_below(size));
        }
        for (int64_t j = 0; j < size && kind == 5; ++j) {
            logits.set(NAN, r, j);
        }
    }
    MambaCrossEntropy p;
    memset(&p, 0, sizeof(p));
    p.run.num_threads = 1 + turn % 3;
    p.rows = rows;
    p.vocabulary = size;
    p.ignore_index = -7;
    p.dtype = dtype;
    p.gradient = turn % 4 != 3;
    p.label_smoothing = options.label_smoothing;
    p.z_loss = options.z_loss;
    p.logits = logits.data();
    p.labels = labels.data();
    p.losses = losses.floats();
    p.logits_row_stride = logits.stride[0];
    const Tensor given = logits;
    std::vector<Truth> truths;
    for (int64_t r = 0; r < rows; ++r) {
        truths.push_back(row_truth(p, given, r, labels[static_cast<size_t>(r)]));
    }
    if (!expect_ok(mamba_cross_entropy(&p))) {
        return;
    }
    expect_close("losses", losses, 1e-6,
                 [&](int64_t r, int64_t, int64_t, int64_t) { return truths[static_cast<size_t>(r)].loss; });
    // A label's own entry is the small rest of 1 where labels are smoothed.
    const double scale = options.label_smoothing > 0.0f ? 0.1 : 1e-3;
    const auto expected = [&](int64_t r, int64_t j, int64_t, int64_t) {
        return p.gradient ? truths[static_cast<size_t>(r)].gradient[static_cast<size_t>(j)] : given.get(r, j);
    };
    expect_close("logits", logits, 1e-6, expected, scale);
}

static void test_table() {
    const Options options[] = {{0.0f, 0.0f, 2.0, 0.0},  {0.1f, 0.0f, 1.0, 0.0},        {0.0f, 1e-3f, 3.0, 0.0},
                               {1.0f, 1e-2f, 1.0, 0.0}, {0.2f, 1e-3f, 2.0, -HUGE_VAL}, {0.0f, 0.0f, 2.0, -HUGE_VAL},
                               {0.1f, 0.0f, 2.0, NAN},  {0.0f, 1e-3f, 2.0, HUGE_VAL},  {0.1f, 0.0f, 3000.0, 0.0}};
    const int64_t sizes[][2] = {{7, 1}, {9, 2}, {5, 17}, {0, 5}, {1, 64}, {8, 131}, {3, 1031}, {2, 20011}};
    int turn = 0;
    for (const auto& size : sizes) {
        for (int32_t dtype = MAMBA_FLOAT32; dtype <= MAMBA_BFLOAT16; ++dtype) {
            for (const Options& some : options) {
                run_case(size[0], size[1], dtype, some, turn++);
            }
        }
    }
}

// A probability of 1 - 2e-4 is 1 in bfloat16; what is left of it must not be 0.
static void test_a_probability_near_one() {
    begin_case("cross_entropy of a probability near one");
    Tensor logits(MAMBA_BFLOAT16, {1, 3}), losses(MAMBA_FLOAT32, {1});
    Memory<int64_t> labels(1, 0);
    logits.fill(0.0);
    logits.set(9.0, 0, 0);
    MambaCrossEntropy p;
    memset(&p, 0, sizeof(p));
    p.run.num_threads = 1;
    p.rows = p.gradient = 1;
    p.vocabulary = 3;
    p.ignore_index = -100;
    p.dtype = MAMBA_BFLOAT16;
    p.logits = logits.data();
    p.labels = labels.data();
    p.losses = losses.floats();
    p.logits_row_stride = 3;
    if (expect_ok(mamba_cross_entropy(&p))) {
        const double other = exp(-9.0) / (1.0 + 2.0 * exp(-9.0));
        expect_close("logits", logits, 1e-10,
                     [&](int64_t, int64_t j, int64_t, int64_t) { return j == 0 ? -2.0 * other : other; });
    }
}

static void test_errors() {
    begin_case("errors of cross_entropy");
    MambaCrossEntropy p;
    memset(&p, 0, sizeof(p));
    p.run.num_threads = 1;
    p.rows = 1;
    p.vocabulary = INT64_C(1) << 31;
    expect_error(mamba_cross_entropy(&p), MAMBA_ERROR_UNSUPPORTED, "cross_entropy: vocabulary must be in [1, 1073741824]");
    p.vocabulary = 4;
    expect_error(mamba_cross_entropy(&p), MAMBA_ERROR_INVALID, "cross_entropy: logits is NULL");
}

int main(int argc, char** argv) {
    return testing::run_tests(argc, argv, [] {
        test_table();
        test_a_probability_near_one();
        test_errors();
    });
}
