// selective_scan of mamba_cpu, forward and backward, against double-precision loops over a table of options.
#include <thread>

#include "tests/scan_reference.h"

using testing::begin_case;
using testing::expect;
using testing::expect_close;
using testing::expect_error;
using testing::expect_ok;
using testing::Tensor;

// Float32 sums of this length and these values lose a few 1e-7 of the largest; exponentials are accurate to an ulp or two.
static const double kArithmetic = 4e-6;

static void describe(const char* what, const ScanCase& c) {
    begin_case(
        "%s dtype=%d B=%d D=%d L=%d N=%d G=%d varB=%d varC=%d z=%d D=%d bias=%d softplus=%d init=%d last=%d seq=%d gap=%d "
        "threads=%d",
        what, c.dtype, static_cast<int>(c.batch), static_cast<int>(c.dim), static_cast<int>(c.seqlen),
        static_cast<int>(c.dstate), static_cast<int>(c.ngroups), c.variable_B, c.variable_C, c.z, c.D, c.bias, c.softplus,
        c.initial, c.last, c.seq_idx, static_cast<int>(c.gap), c.threads);
}

static void run_case(const ScanCase& c) {
    describe("scan", c);
    ScanData x(c);
    const ScanReference want(x);
    const double terms = sqrt(static_cast<double>(c.batch * c.seqlen + 1));  // the scale of sums over all steps
    const auto row = [&](const std::vector<double>& values) {
        return [&](int64_t b, int64_t d, int64_t t, int64_t) { return values[want.row(b, d, t)]; };
    };
    const auto sum = [&](const std::vector<double>& values) {
        return [&](int64_t b, int64_t d, int64_t t, int64_t) { return values[want.row(b, d, t)] + (c.add ? kBefore : 0.0); };
    };
    const auto state = [&](const std::vector<double>& values) {
        return [&](int64_t b, int64_t d, int64_t n, int64_t) { return values[want.state(b, d, n)]; };
    };
    const auto parameter = [&](const std::vector<double>& values) {
        return [&](int64_t d, int64_t n, int64_t, int64_t) { return values[want.parameter(d, n)]; };
    };
    const auto channel = [&](const std::vector<double>& values) {
        return [&](int64_t d, int64_t, int64_t, int64_t) { return values[d]; };
    };
    const MambaSelectiveScan p = x.forward();
    if (!expect_ok(mamba_selective_scan_forward(&p))) {
        return;
    }
    expect_close("out", x.out, kArithmetic, sum(want.out));
    if (c.last) {
        expect_close("last_state", x.last, kArithmetic, state(want.last));
    }
    expect_close("checkpoints", x.checkpoints, kArithmetic, [&](int64_t b, int64_t chunk, int64_t d, int64_t n) {
        return want.checkpoints[((b * x.checkpoints.size[1] + chunk) * c.dim + d) * c.dstate + n];
    });

    const MambaSelectiveScanBackward q = x.backward();
    if (!expect_ok(mamba_selective_scan_backward(&q))) {
        return;
    }
    if (c.batch == 0 || c.dim == 0) {
        return;
    }
    if (c.out_again) {
        expect_close("out of backward", x.out, kArithmetic, sum(want.out));
    }
    expect_close("du", x.du, kArithmetic, row(want.du));
    expect_close("ddelta", x.ddelta, kArithmetic, row(want.ddelta));
    if (c.z) {
        expect_close("dz", x.dz, kArithmetic, sum(want.dz));
    }
    expect_close("dA", x.dA, kArithmetic, parameter(want.dA), terms);
    if (c.D) {
        expect_close("dD", x.dD, kArithmetic, channel(want.dD), terms);
    }
    if (c.bias) {
        expect_close("ddelta_bias", x.dbias, kArithmetic, channel(want.dbias), terms);
    }
    if (c.initial) {
        expect_close("dinitial_state", x.dinitial, kArithmetic, state(want.dinitial));
    }
    const auto check_matrix = [&](const char* name, const Tensor& got, bool variable, const std::vector<double>& values) {
        if (!variable) {
            expect_close(name, got, kArithmetic, parameter(values), terms);
            return;
        }
        expect_close(name, got, kArithmetic,
                     [&](int64_t b, int64_t g, int64_t n, int64_t t) { return values[want.group(b, g, n, t)]; });
    };
    check_matrix("dB", x.dB, c.variable_B, want.dB);
    check_matrix("dC", x.dC, c.variable_C, want.dC);
}

static void test_table() {
    // batch, dim, seqlen, dstate, ngroups: around the lanes (8, 16), the tile of 64 steps, and the states taken together
    const int64_t sizes[][5] = {{1, 1, 1, 1, 1},    {1, 16, 64, 16, 1}, {2, 17, 65, 16, 1},  {1, 8, 63, 4, 1},
                                {3, 5, 7, 3, 1},    {2, 33, 130, 5, 1}, {1, 48, 129, 16, 3}, {2, 12, 70, 2, 4},
                                {1, 6, 200, 17, 6}, {1, 20, 66, 64, 1}, {1, 3, 70, 256, 1},  {2, 40, 192, 7, 2},
                                {1, 9, 257, 33, 1}, {2, 16, 16, 8, 1},  {1, 1, 300, 1, 1},   {1, 31, 128, 128, 1}};
    int turn = 0;
    for (const auto& size : sizes) {
        for (int32_t dtype = MAMBA_FLOAT32; dtype <= MAMBA_BFLOAT16; ++dtype) {
            for (int variant = 0; variant < 4; ++variant, ++turn) {
                ScanCase c;
                c.dtype = dtype;
                c.batch = size[0];
                c.dim = size[1];
                c.seqlen = size[2];
                c.dstate = size[3];
                c.ngroups = size[4];
                c.variable_B = variant != 1;
                c.variable_C = variant != 1 && variant != 2;
                c.z = turn % 3 != 0;
                c.D = turn % 4 != 1;
                c.bias = turn % 5 != 2;
                c.softplus = turn % 7 < 5;
                c.initial = turn % 2 != 0;
                c.last = turn % 3 != 2;
                c.seq_idx = turn % 5 < 2;
                c.out_again = turn % 2 == 0;
                c.gap = turn % 4 == 3 ? 3 : 0;
                c.threads = 1 + turn % 3;
                run_case(c);
            }
        }
    }
}

static void test_each_option() {
    for (int bits = 0; bits < 512; ++bits) {
        ScanCase c;
        c.batch = 2;
        c.dim = 18;
        c.seqlen = 67;
        c.dstate = 6;
        c.ngroups = 2;
        c.variable_B = bits & 1;
        c.variable_C = bits & 2;
        c.z = bits & 4;
        c.D = bits & 8;
        c.bias = bits & 16;
        c.softplus = bits & 32;
        c.initial = c.last = bits & 64;
        c.seq_idx = bits & 128;
        c.reverse = bits & 256;
        c.add = c.out_again = c.reverse && bits % 3 == 0;
        run_case(c);
    }
}

// The analytic gradients that all else is compared with, themselves against finite differences.
static void test_reference_gradients() {
    ScanCase c;
    c.batch = 2;
    c.dim = 4;
    c.seqlen = 66;
    c.dstate = 3;
    c.ngroups = 2;
    c.initial = true;
    for (int variant = 0; variant < 5; ++variant) {
        c.variable_B = variant != 1;
        c.variable_C = variant != 2;
        c.seq_idx = variant >= 3;
        c.reverse = variant == 4;
        describe("finite differences", c);
        ScanData x(c);
        const ScanReference want(x);
        const auto check = [&](const char* name, Tensor& input, const std::vector<double>& gradient) {
            for (int trial = 0; trial < 6; ++trial) {
                int64_t at[4];
                for (int i = 0; i < 4; ++i) {
                    at[i] = testing::random_below(input.size[i]);
                }
                const double value = input.get(at[0], at[1], at[2], at[3]), step = 1.0 / 4096;
                input.set(value + step, at[0], at[1], at[2], at[3]);
                const double high_value = input.get(at[0], at[1], at[2], at[3]), high = ScanReference(x).loss(x);
                input.set(value - step, at[0], at[1], at[2], at[3]);
                const double low_value = input.get(at[0], at[1], at[2], at[3]), low = ScanReference(x).loss(x);
                input.set(value, at[0], at[1], at[2], at[3]);
                const int64_t flat = ((at[0] * input.size[1] + at[1]) * input.size[2] + at[2]) * input.size[3] + at[3];
                const double expected = gradient[flat];
                const double measured = (high - low) / (high_value - low_value);
                if (fabs(measured - expected) > 1e-3 * (1.0 + fabs(expected))) {
                    testing::report("d%s is %.6g by the chain rule, %.6g by differences", name, expected, measured);
                }
            }
        };
        check("u", x.u, want.du);
        check("delta", x.delta, want.ddelta);
        check("z", x.z, want.dz);
        check("A", x.A, want.dA);
        check("B", x.B, want.dB);
        check("C", x.C, want.dC);
        check("D", x.D, want.dD);
        check("delta_bias", x.bias, want.dbias);
        check("initial_state", x.initial, want.dinitial);
    }
}

static void test_empty() {
    const int64_t sizes[][3] = {{0, 4, 8}, {2, 0, 8}, {2, 18, 0}, {0, 0, 0}};
    for (const auto& size : sizes) {
        ScanCase c;
        c.batch = size[0];
        c.dim = size[1];
        c.seqlen = size[2];
        c.dstate = 5;
        for (int variant = 0; variant < 4; ++variant) {
            c.initial = variant & 1;
            c.variable_B = c.variable_C = variant & 2;
            run_case(c);
        }
    }
}

// More threads than blocks, shares that split a batch entry's channels or run from amid one into the next, and several entries
// a share.
static void test_threads() {
    const int64_t sizes[][5] = {
        {1, 100, 700, 16, 1}, {3, 50, 400, 16, 1}, {5, 40, 300, 16, 2}, {7, 8, 2000, 16, 1}, {2, 160, 300, 16, 1}};
    for (const auto& size : sizes) {
        ScanCase c;
        c.batch = size[0];
        c.dim = size[1];
        c.seqlen = size[2];
        c.dstate = size[3];
        c.ngroups = size[4];
        ScanData one(c);
        c.threads = 5;
        ScanData many = one;
        many.c.threads = 5;
        run_case(c);
        describe("threads", c);
        const MambaSelectiveScan p = one.forward(), q = many.forward();
        expect_ok(mamba_selective_scan_forward(&p));
        expect_ok(mamba_selective_scan_forward(&q));
        expect(one.out.bytes == many.out.bytes && one.last.bytes == many.last.bytes, "forward depends on the thread count");
        const MambaSelectiveScanBackward first = many.backward();
        expect_ok(mamba_selective_scan_backward(&first));
        const Tensor dA = many.dA, dB = many.dB, dC = many.dC, du = many.du;
        const MambaSelectiveScanBackward again = many.backward();
        expect_ok(mamba_selective_scan_backward(&again));
        expect(dA.bytes == many.dA.bytes && dB.bytes == many.dB.bytes && dC.bytes == many.dC.bytes && du.bytes == many.du.bytes,
               "two equal backward calls differ");
        MambaSelectiveScanBackward short_of_slots = again;
        short_of_slots.slots = 0;
        expect_error(mamba_selective_scan_backward(&short_of_slots), MAMBA_ERROR_INVALID, "slots");
        MambaSelectiveScanBackward without_memory = again;
        without_memory.forward.workspace = nullptr;
        const MambaSelectiveScan& f = again.forward;
        if (f.workspace != nullptr) {
            expect_error(mamba_selective_scan_backward(&without_memory), MAMBA_ERROR_INVALID, "workspace");
        }
    }
}

static void test_concurrent_calls() {
    ScanCase c;
    c.dim = 64;
    c.seqlen = 600;
    c.dstate = 16;
    c.threads = 3;
    describe("concurrent calls", c);
    std::vector<ScanData> data(4, ScanData(c));
    std::vector<std::thread> threads;
    std::vector<int32_t> status(data.size(), -1);
    for (size_t i = 0; i < data.size(); ++i) {
        threads.emplace_back([&data, &status, i] {
            const MambaSelectiveScan p = data[i].forward();
            status[i] = mamba_selective_scan_forward(&p);
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    for (size_t i = 0; i < data.size(); ++i) {
        expect(status[i] == MAMBA_OK && data[i].out.bytes == data[0].out.bytes, "a concurrent call went wrong");
    }
}

// A NaN stays in its channel, and in its sequence.
static void test_nan() {
    ScanCase c;
    c.dim = 20;
    c.seqlen = 200;
    c.dstate = 5;
    c.seq_idx = true;
    describe("NaN", c);
    ScanData x(c);
    for (int64_t t = 0; t < c.seqlen; ++t) {
        x.seq_idx[t] = t < 70 ? 0 : t < 130 ? 1 : 2;
    }
    x.u.set(NAN, 0, 3, 80);
    const MambaSelectiveScan p = x.forward();
    expect_ok(mamba_selective_scan_forward(&p));
    x.out.for_each([&](int64_t, int64_t d, int64_t t, int64_t) {
        const bool poisoned = d == 3 && t >= 80 && t < 130;
        if (isnan(x.out.get(0, d, t)) != poisoned) {
            testing::report("out[0, %d, %d] is %g", static_cast<int>(d), static_cast<int>(t), x.out.get(0, d, t));
        }
    });
    const MambaSelectiveScanBackward q = x.backward();
    expect_ok(mamba_selective_scan_backward(&q));
    x.ddelta.for_each([&](int64_t, int64_t d, int64_t t, int64_t) {
        const bool may_be = d == 3 && t >= 70 && t < 130;
        if (isnan(x.ddelta.get(0, d, t)) && !may_be) {
            testing::report("ddelta[0, %d, %d] is NaN", static_cast<int>(d), static_cast<int>(t));
        }
    });
    x.dout.set(NAN, 0, 7, 150);
    x.u.set(0.0, 0, 3, 80);
    const MambaSelectiveScan fresh = x.forward();
    expect_ok(mamba_selective_scan_forward(&fresh));
    const MambaSelectiveScanBackward r = x.backward();
    expect_ok(mamba_selective_scan_backward(&r));
    x.du.for_each([&](int64_t, int64_t d, int64_t t, int64_t) {
        const bool poisoned = d == 7 && t >= 130 && t <= 150;
        if (isnan(x.du.get(0, d, t)) != poisoned) {
            testing::report("du[0, %d, %d] is %g", static_cast<int>(d), static_cast<int>(t), x.du.get(0, d, t));
        }
    });
}

static void test_errors() {
    begin_case("scan errors");
    ScanCase c;
    c.dim = 6;
    c.seqlen = 70;
    c.dstate = 4;
    ScanData x(c);
    const MambaSelectiveScan good = x.forward();
    MambaSelectiveScan p = good;
    const auto refuse = [&](int32_t code, const char* words) {
        expect_error(mamba_selective_scan_forward(&p), code, words);
        p = good;
    };
    expect_error(mamba_selective_scan_forward(nullptr), MAMBA_ERROR_INVALID, "NULL");
    expect_error(mamba_selective_scan_backward(nullptr), MAMBA_ERROR_INVALID, "NULL");
    MambaSelectiveScanPlan plan;
    expect_error(mamba_selective_scan_plan(nullptr, 1, &plan), MAMBA_ERROR_INVALID, "params");
    expect_error(mamba_selective_scan_plan(&p, 1, nullptr), MAMBA_ERROR_INVALID, "plan");
    p.batch = -1;
    refuse(MAMBA_ERROR_INVALID, "batch");
    p.seqlen = -1;
    refuse(MAMBA_ERROR_INVALID, "seqlen");
    p.dstate = 0;
    refuse(MAMBA_ERROR_INVALID, "dstate");
    p.dstate = 257;
    refuse(MAMBA_ERROR_UNSUPPORTED, "257");
    p.ngroups = 4;
    refuse(MAMBA_ERROR_INVALID, "ngroups");
    p.ngroups = 0;
    refuse(MAMBA_ERROR_INVALID, "ngroups");
    p.dtype = 3;
    refuse(MAMBA_ERROR_INVALID, "dtype");
    p.run.num_threads = 0;
    refuse(MAMBA_ERROR_INVALID, "num_threads");
    p.segments = 2;
    p.workspace = x.last.floats();
    refuse(MAMBA_ERROR_INVALID, "segments");
    p.u = nullptr;
    refuse(MAMBA_ERROR_INVALID, "NULL");
    p.A = nullptr;
    refuse(MAMBA_ERROR_INVALID, "NULL");
    p.out = nullptr;
    refuse(MAMBA_ERROR_INVALID, "out");
    const MambaSelectiveScanBackward good_backward = x.backward();
    MambaSelectiveScanBackward q = good_backward;
    q.forward.checkpoints = nullptr;
    expect_error(mamba_selective_scan_backward(&q), MAMBA_ERROR_INVALID, "checkpoints");
    q = good_backward;
    q.dz = nullptr;
    expect_error(mamba_selective_scan_backward(&q), MAMBA_ERROR_INVALID, "dz");
    q = good_backward;
    q.dA = nullptr;
    expect_error(mamba_selective_scan_backward(&q), MAMBA_ERROR_INVALID, "dA");
}

int main(int argc, char** argv) {
    return testing::run_tests(argc, argv, [] {
        test_table();
        test_each_option();
        test_reference_gradients();
        test_empty();
        test_threads();
        test_concurrent_calls();
        test_nan();
        test_errors();
    });
}
