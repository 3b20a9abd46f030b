// What every CPU kernel stands on, seen through the C ABI: the accuracy of exp, softplus and silu at ordinary and at extreme
// arguments, the conversions of the 16-bit types, and what the library says about itself.
#include "tests/testing.h"

using testing::begin_case;
using testing::expect;
using testing::expect_error;
using testing::expect_ok;

// Runs the scan of one step over one channel an element: h = exp(delta A) initial + delta B u, y = D u silu?(z).
struct OneStep {
    std::vector<float> delta, A, B, C, D, u, z, initial, out, last;

    explicit OneStep(size_t count)
        : delta(count, 0.0f),
          A(count, 0.0f),
          B(count, 0.0f),
          C(count, 0.0f),
          D(count, 0.0f),
          u(count, 0.0f),
          z(count, 0.0f),
          initial(count, 0.0f),
          out(count, -1.0f),
          last(count, -1.0f) {}

    void run(bool softplus, bool gate) {
        MambaSelectiveScan p;
        memset(&p, 0, sizeof(p));
        p.run.num_threads = 1;
        p.batch = p.seqlen = p.dstate = p.ngroups = p.segments = 1;
        p.dim = static_cast<int64_t>(delta.size());
        p.delta_softplus = softplus;
        p.u = u.data();
        p.delta = delta.data();
        p.z = gate ? z.data() : nullptr;
        p.A = A.data();
        p.B = B.data();
        p.C = C.data();
        p.D = D.data();
        p.initial_state = initial.data();
        p.out = out.data();
        p.last_state = last.data();
        p.u_dim_stride = p.delta_dim_stride = p.z_dim_stride = p.out_dim_stride = 1;
        expect_ok(mamba_selective_scan_forward(&p));
    }
};

// The largest error in units of 2^-24 of the result; results below the normal floats may be zero.
static double worst_error(const std::vector<float>& got, const std::vector<double>& want, const std::vector<double>& at,
                          const char* name) {
    double worst = 0.0;
    for (size_t i = 0; i < got.size(); ++i) {
        const double size = fabs(want[i]), error = fabs(got[i] - want[i]);
        double units = 0.0;
        if (isnan(want[i]) || isnan(got[i])) {
            units = isnan(want[i]) && isnan(got[i]) ? 0.0 : HUGE_VAL;
        } else if (size > 3.4028235e38 || isinf(got[i])) {
            units = size > 3.4028e38 && isinf(got[i]) ? 0.0 : HUGE_VAL;
        } else if (size < 1.2e-38) {
            units = error <= 1.2e-38 ? 0.0 : HUGE_VAL;
        } else {
            units = error / size * 16777216.0;
        }
        if (isinf(units)) {
            testing::report("%s(%.9g) is %.9g, expected %.9g", name, at[i], got[i], want[i]);
        } else if (units > worst) {
            worst = units;
        }
    }
    return worst;
}

static std::vector<double> arguments(double low, double high) {
    std::vector<double> at;
    for (int i = 0; i <= 20000; ++i) {
        at.push_back(static_cast<float>(low + (high - low) * i / 20000));
    }
    for (const double special : {0.0, -0.0, 1e-30, -1e-30, 1e-7, -1e-7, 1e-3, -1e-3}) {
        at.push_back(static_cast<float>(special));
    }
    return at;
}

static void expect_accurate(const char* name, double worst, double limit) {
    if (worst > limit) {
        testing::report("%s is off by %.2f units of 2^-24, at most %.2f expected", name, worst, limit);
    }
}

static void test_decay() {
    begin_case("exp(delta A)");
    // Rounding delta A log2(e) to float costs up to |exponent| / 2 units; what the polynomial loses is the rest.
    const double ranges[][3] = {{-1, 0, 2.5}, {-8, 2, 10.0}, {-87, 88, 90.0}};
    for (const auto& range : ranges) {
        std::vector<double> at = arguments(range[0], range[1]), want;
        OneStep step(at.size());
        for (size_t i = 0; i < at.size(); ++i) {
            step.delta[i] = 1.0f;
            step.A[i] = static_cast<float>(at[i]);
            step.initial[i] = 1.0f;
            want.push_back(exp(at[i]));
        }
        step.run(false, false);
        expect_accurate("exp", worst_error(step.last, want, at, "exp"), range[2]);
    }
    // slow decay: 1 - exp(x) must not drift
    OneStep slow(64);
    for (size_t i = 0; i < 64; ++i) {
        slow.delta[i] = 1.0f;
        slow.A[i] = -ldexpf(1.0f, -static_cast<int>(i % 22) - 1);
        slow.initial[i] = 1.0f;
    }
    slow.run(false, false);
    for (size_t i = 0; i < 64; ++i) {
        expect(fabs(slow.last[i] - exp(static_cast<double>(slow.A[i]))) <= 6.1e-8, "exp near 1 is off by more than an ulp");
    }
    const double infinity = HUGE_VAL;
    std::vector<double> at = {-infinity, -1e30, -1000, -104, 89, 1000, 1e30, infinity, NAN, 0}, want;
    OneStep extreme(at.size());
    for (size_t i = 0; i < at.size(); ++i) {
        extreme.delta[i] = 1.0f;
        extreme.A[i] = static_cast<float>(at[i]);
        extreme.initial[i] = 1.0f;
        want.push_back(exp(at[i]));
    }
    extreme.run(false, false);
    worst_error(extreme.last, want, at, "exp");
}

static void test_softplus() {
    begin_case("softplus");
    std::vector<double> at = arguments(-80, 60), near = arguments(-3, 3), want;
    at.insert(at.end(), near.begin(), near.end());
    for (const double special : {20.0, 20.000001, 19.999999, 1e30, HUGE_VAL, static_cast<double>(NAN), -1e30, -HUGE_VAL}) {
        at.push_back(static_cast<float>(special));
    }
    OneStep step(at.size());
    for (size_t i = 0; i < at.size(); ++i) {
        step.delta[i] = static_cast<float>(at[i]);
        step.A[i] = -1.0f;
        step.B[i] = step.u[i] = 1.0f;  // last_state = softplus(delta) * 1 * 1
        want.push_back(at[i] > 20 ? at[i] : log1p(exp(at[i])));
    }
    step.run(true, false);
    expect_accurate("softplus", worst_error(step.last, want, at, "softplus"), 4.0);
}

static void test_silu() {
    begin_case("silu");
    std::vector<double> at = arguments(-80, 80), near = arguments(-4, 4), want;
    at.insert(at.end(), near.begin(), near.end());
    for (const double special : {100.0, 1e30, HUGE_VAL, static_cast<double>(NAN)}) {
        at.push_back(static_cast<float>(special));
    }
    OneStep step(at.size());
    for (size_t i = 0; i < at.size(); ++i) {
        step.z[i] = static_cast<float>(at[i]);
        step.D[i] = step.u[i] = 1.0f;
        want.push_back(at[i] / (1.0 + exp(-at[i])));
    }
    step.run(false, true);
    expect_accurate("silu", worst_error(step.out, want, at, "silu"), 4.0);
}

// Copies x into a state of another dtype: a convolution update with as many inputs as places.
static void copy_through_state(const void* x, int32_t x_dtype, void* state, int32_t state_dtype, int64_t count) {
    std::vector<unsigned char> out(static_cast<size_t>(count) * 4);
    const float weight[2] = {0.0f, 0.0f};
    MambaCausalConv1dUpdate p;
    memset(&p, 0, sizeof(p));
    p.run.num_threads = 1;
    p.batch = p.dim = p.state_rows = 1;
    p.seqlen = p.state_len = count;
    p.width = 2;
    p.dtype = x_dtype;
    p.state_dtype = state_dtype;
    p.x = x;
    p.conv_state = state;
    p.weight = weight;
    p.out = out.data();
    p.x_len_stride = p.state_len_stride = p.out_len_stride = 1;
    expect_ok(mamba_causal_conv1d_update(&p));
}

static void test_conversions() {
    for (const int32_t dtype : {MAMBA_FLOAT16, MAMBA_BFLOAT16}) {
        begin_case("conversions of dtype %d", dtype);
        const int bits = testing::fraction_bits(dtype);
        // every 16-bit value to float
        std::vector<uint16_t> all(65536), rounded;
        for (size_t i = 0; i < all.size(); ++i) {
            all[i] = static_cast<uint16_t>(i);
        }
        std::vector<float> floats(all.size());
        copy_through_state(all.data(), dtype, floats.data(), MAMBA_FLOAT32, 65536);
        for (size_t i = 0; i < all.size(); ++i) {
            const double want = testing::decode16(all[i], bits);
            // denormal bfloat16 values are denormal floats, which may count as zero
            const bool tiny = fabs(want) < 1.1754944e-38 && floats[i] == 0.0f;
            const bool same = isnan(want) ? isnan(floats[i]) : floats[i] == want && signbit(floats[i]) == signbit(want);
            if (!same && !tiny) {
                testing::report("0x%04x becomes %.9g, expected %.9g", static_cast<unsigned>(i), floats[i], want);
                break;
            }
        }
        // and back: each value itself, the ties above and below, and their neighbours
        std::vector<float> values;
        for (size_t i = 0; i < all.size(); ++i) {
            const float value = static_cast<float>(testing::decode16(all[i], bits));
            const float next = static_cast<float>(testing::decode16(static_cast<uint16_t>(i + 1), bits));
            const float tie = value / 2 + next / 2;
            for (const float v : {value, tie, nextafterf(tie, 0.0f), nextafterf(tie, static_cast<float>(HUGE_VAL))}) {
                values.push_back(v);
            }
        }
        for (const double special : {65519.0, 65520.0, 65504.0, 3.4e38, 1e-8, 2.98e-8, 2.99e-8, 1e-40}) {
            values.push_back(static_cast<float>(special));
        }
        rounded.resize(values.size());
        copy_through_state(values.data(), MAMBA_FLOAT32, rounded.data(), dtype, static_cast<int64_t>(values.size()));
        for (size_t i = 0; i < values.size(); ++i) {
            const uint16_t want = testing::encode16(values[i], bits);
            const bool same = isnan(values[i]) ? isnan(testing::decode16(rounded[i], bits)) : rounded[i] == want;
            const bool tiny = fabs(values[i]) < 1.1754944e-38 && (rounded[i] & 0x7fff) == 0;
            if (!same && !tiny) {
                testing::report("%.9g is rounded to 0x%04x, expected 0x%04x", values[i], rounded[i], want);
                break;
            }
        }
    }
}

static void test_library() {
    begin_case("library");
    MambaLibraryInfo info;
    expect_ok(mamba_library_info(&info));
    expect(info.abi_version == MAMBA_ABI_VERSION && info.is_cuda == 0 && info.cuda_runtime_version == 0, "library info");
    expect(info.supports_float16 == 1 && info.supports_bfloat16 == 1, "dtypes");
    expect(strcmp(info.isa, getenv("MAMBA_SSM_CPU_ISA")) == 0, "the instruction set is the one that was asked for");
    expect(mamba_struct_size("MambaSelectiveScan") == sizeof(MambaSelectiveScan), "struct size");
    expect(mamba_struct_size("MambaLibraryInfo") == sizeof(MambaLibraryInfo), "struct size");
    expect(mamba_struct_size("nothing") == 0 && mamba_struct_size(nullptr) == 0, "unknown struct");
    expect_error(mamba_library_info(nullptr), MAMBA_ERROR_INVALID, "NULL");
}

int main(int argc, char** argv) {
    const char* forced = getenv("MAMBA_SSM_CPU_ISA");
    if (forced != nullptr && strcmp(forced, "sse9") == 0) {
        MambaLibraryInfo info;
        expect_error(mamba_library_info(&info), MAMBA_ERROR_INVALID, "expected generic, avx2 or avx512, got \"sse9\"");
        return testing::failures == 0 ? 0 : 1;
    }
    if (forced == nullptr) {
        testing::set_isa("sse9");
        if (argc < 1 || system(("\"" + std::string(argv[0]) + "\"").c_str()) != 0) {
            printf("FAIL a wrong MAMBA_SSM_CPU_ISA is not refused\n");
            return 1;
        }
        testing::set_isa("");
    }
    return testing::run_tests(argc, argv, [] {
        test_decay();
        test_softplus();
        test_silu();
        test_conversions();
        test_library();
    });
}
