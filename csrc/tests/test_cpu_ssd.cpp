// Mamba-2's scan of mamba_cpu, forward and backward, against double-precision loops over time.
#include "tests/testing.h"

using testing::begin_case;
using testing::expect;
using testing::expect_close;
using testing::expect_error;
using testing::expect_ok;
using testing::Tensor;

static const double kArithmetic = 1e-5;  // sums over hundreds of steps, states and channels in float32

struct SsdCase {
    int64_t batch, seqlen, nheads, headdim, ngroups, dstate;
    int32_t dtype, dt_dtype;
    int turn;  // picks the options
};

static void set_strides(const Tensor& tensor, int64_t* first, int64_t* second, int64_t* third) {
    *first = tensor.stride[0];
    *second = tensor.stride[1];
    *third = tensor.stride[2];
}

// A problem's tensors; gradients of the same shapes.
struct Problem {
    Tensor x, dt, A, A_given, B, C, D, z, bias, initial, out, final_state;  // A_given: A, or A_log
    Tensor dout, dfinal, dx, ddt, dA, dB, dC, dD, dbias, dinitial;
    std::vector<int32_t> seq_idx;
    bool use_D, D_per_dim, use_bias, use_initial, use_seq_idx, softplus, A_is_log;
    double dt_min, dt_max;
};

static double step_size(const Problem& q, double raw, double* slope) {
    *slope = 1.0;
    if (q.softplus) {
        *slope = 1.0 / (1.0 + exp(-raw));
        raw = log1p(exp(raw));
    }
    *slope = raw < q.dt_min || raw > q.dt_max ? 0.0 : *slope;
    return raw < q.dt_min ? q.dt_min : raw > q.dt_max ? q.dt_max : raw;
}

// What the kernels should give, in double.
struct Truth {
    std::vector<double> y, final_state, dx, ddt, dA, dB, dC, dD, dbias, dinitial;
    double dA_terms = 0.0, dbias_terms = 0.0;  // largest sums of the terms' sizes: dA and ddt_bias may be a small rest
};

static Truth reference(const SsdCase& c, const Problem& q) {
    const int64_t P = c.headdim, N = c.dstate, L = c.seqlen, H = c.nheads, G = c.ngroups;
    const auto sized = [](int64_t count) { return std::vector<double>(static_cast<size_t>(count), 0.0); };
    Truth t;
    t.y = t.dx = sized(c.batch * L * H * P);
    t.final_state = t.dinitial = sized(c.batch * H * P * N);
    t.ddt = sized(c.batch * L * H);
    t.dB = t.dC = sized(c.batch * L * G * N);
    t.dA = t.dbias = sized(H);
    t.dD = sized(H * P);
    for (int64_t b = 0; b < c.batch; ++b) {
        for (int64_t h = 0; h < H; ++h) {
            const int64_t g = h / (H / G);
            std::vector<double> states = sized((L + 1) * P * N), gradient = sized(P * N);
            std::vector<double> dt = sized(L), slope = sized(L), decay = sized(L);
            double dA_terms = 0.0, dbias_terms = 0.0;
            for (int64_t i = 0; i < P * N; ++i) {
                states[i] = q.use_initial ? q.initial.get(b, h, i / N, i % N) : 0.0;
                gradient[i] = q.dfinal.get(b, h, i / N, i % N);
            }
            for (int64_t l = 0; l < L; ++l) {
                dt[l] = step_size(q, q.dt.get(b, l, h) + (q.use_bias ? q.bias.get(h) : 0.0), &slope[l]);
                const bool restart = q.use_seq_idx && l > 0 && q.seq_idx[b * L + l] != q.seq_idx[b * L + l - 1];
                decay[l] = restart ? 0.0 : exp(dt[l] * q.A.get(h));
                for (int64_t p = 0; p < P; ++p) {
                    double y = q.use_D ? q.D.get(h, p) * q.x.get(b, l, h, p) : 0.0;
                    for (int64_t n = 0; n < N; ++n) {
                        const double state =
                            decay[l] * states[(l * P + p) * N + n] + dt[l] * q.x.get(b, l, h, p) * q.B.get(b, l, g, n);
                        states[((l + 1) * P + p) * N + n] = state;
                        y += state * q.C.get(b, l, g, n);
                    }
                    t.y[((b * L + l) * H + h) * P + p] = y;
                }
            }
            for (int64_t l = L - 1; l >= 0; --l) {
                double through_decay = 0.0, through_input = 0.0;
                for (int64_t p = 0; p < P; ++p) {
                    const double dy = q.dout.get(b, l, h, p), x = q.x.get(b, l, h, p);
                    double dx = q.use_D ? q.D.get(h, p) * dy : 0.0;
                    t.dD[h * P + p] += dy * x;
                    for (int64_t n = 0; n < N; ++n) {
                        double& state_gradient = gradient[p * N + n];
                        const double B = q.B.get(b, l, g, n);
                        state_gradient += dy * q.C.get(b, l, g, n);
                        t.dC[((b * L + l) * G + g) * N + n] += dy * states[((l + 1) * P + p) * N + n];
                        t.dB[((b * L + l) * G + g) * N + n] += state_gradient * dt[l] * x;
                        dx += state_gradient * dt[l] * B;
                        through_input += state_gradient * x * B;
                        through_decay += state_gradient * decay[l] * states[(l * P + p) * N + n];
                        state_gradient *= decay[l];
                    }
                    t.dx[((b * L + l) * H + h) * P + p] = dx;
                }
                const double ddt = (through_input + through_decay * q.A.get(h)) * slope[l];
                t.ddt[(b * L + l) * H + h] = ddt;
                t.dA[h] += through_decay * dt[l] * (q.A_is_log ? q.A.get(h) : 1.0);
                t.dbias[h] += ddt;
                dA_terms += fabs(through_decay * dt[l] * (q.A_is_log ? q.A.get(h) : 1.0));
                dbias_terms += fabs(ddt);
            }
            t.dA_terms = dA_terms > t.dA_terms ? dA_terms : t.dA_terms;
            t.dbias_terms = dbias_terms > t.dbias_terms ? dbias_terms : t.dbias_terms;
            for (int64_t i = 0; i < P * N; ++i) {
                t.final_state[(b * H + h) * P * N + i] = states[L * P * N + i];
                t.dinitial[(b * H + h) * P * N + i] = gradient[i];
            }
        }
    }
    return t;
}

static Problem make_problem(const SsdCase& c) {
    const int turn = c.turn;
    const int64_t gap = turn % 3 == 1 ? 3 : 0;
    const std::vector<int64_t> rows = {c.batch, c.seqlen, c.nheads, c.headdim};
    const std::vector<int64_t> matrix = {c.batch, c.seqlen, c.ngroups, c.dstate};
    const std::vector<int64_t> states = {c.batch, c.nheads, c.headdim, c.dstate};
    const std::vector<int> heads_first = turn % 4 == 2 ? std::vector<int>{0, 2, 1, 3} : std::vector<int>{};
    Problem q;
    q.use_D = turn % 4 != 3;
    q.D_per_dim = turn % 2 == 1;
    q.use_bias = turn % 3 != 2;
    q.use_initial = turn % 2 == 0;
    q.use_seq_idx = turn % 5 == 3;
    q.softplus = turn % 3 != 0;
    q.dt_min = turn % 4 == 1 ? 0.2 : 0.0;
    q.dt_max = turn % 4 == 1 ? 0.6 : HUGE_VAL;
    q.x = Tensor(c.dtype, rows, gap, heads_first);
    q.z = Tensor(c.dtype, rows, gap);
    q.out = Tensor(c.dtype, rows, gap, heads_first);
    q.dout = Tensor(c.dtype, rows, gap);
    q.dx = Tensor(c.dtype, rows, gap, heads_first);
    q.dt = Tensor(c.dt_dtype, {c.batch, c.seqlen, c.nheads}, gap, turn % 2 ? std::vector<int>{2, 0, 1} : std::vector<int>{});
    q.ddt = Tensor(c.dt_dtype, {c.batch, c.seqlen, c.nheads}, gap);
    q.B = Tensor(c.dtype, matrix, gap);
    q.C = Tensor(c.dtype, matrix, 0, heads_first);
    q.dB = Tensor(c.dtype, matrix, gap, heads_first);
    q.dC = Tensor(c.dtype, matrix, gap);
    q.initial = q.final_state = q.dfinal = q.dinitial = Tensor(MAMBA_FLOAT32, states);
    q.A_is_log = turn % 4 >= 2;
    q.A = q.dA = q.dbias = Tensor(MAMBA_FLOAT32, {c.nheads});
    q.A_given = q.bias = Tensor(q.A_is_log ? c.dt_dtype : static_cast<int32_t>(MAMBA_FLOAT32), {c.nheads});
    q.D = Tensor(MAMBA_FLOAT32, {c.nheads, c.headdim});
    q.dD = q.D_per_dim ? q.D : q.dA;
    q.x.fill_random(1.0);
    q.z.fill_random(1.0);
    q.dout.fill_random(1.0);
    q.dt.fill_random(0.3, q.softplus ? -1.0 : 0.5);
    q.dt.for_each([&](int64_t b, int64_t l, int64_t h, int64_t) {
        const double value = q.dt.get(b, l, h);
        q.dt.set(q.softplus ? value : fabs(value) + 0.05, b, l, h);
    });
    q.A.for_each([&](int64_t h, int64_t, int64_t, int64_t) {
        const double A = -0.2 - 0.4 * static_cast<double>(h);
        q.A_given.set(q.A_is_log ? log(-A) : A, h);
        q.A.set(q.A_is_log ? -exp(q.A_given.get(h)) : A, h);
    });
    q.B.fill_random(0.7);
    q.C.fill_random(0.7);
    q.D.fill_random(1.0);
    if (!q.D_per_dim) {
        q.D.for_each([&](int64_t h, int64_t p, int64_t, int64_t) { q.D.set(q.D.get(h, 0), h, p); });
    }
    q.bias.fill_random(0.02);
    q.initial.fill_random(1.0);
    q.dfinal.fill_random(1.0);
    for (int64_t i = 0; i < c.batch * c.seqlen; ++i) {
        q.seq_idx.push_back(i == 0 ? 0 : q.seq_idx.back() + (testing::random_below(20) == 0 ? 1 : 0));
    }
    return q;
}

static MambaSsd parameters(const SsdCase& c, Problem& q) {
    MambaSsd p;
    memset(&p, 0, sizeof(p));
    p.run.num_threads = 1 + c.turn % 3;
    p.batch = c.batch;
    p.seqlen = c.seqlen;
    p.nheads = c.nheads;
    p.headdim = c.headdim;
    p.ngroups = c.ngroups;
    p.dstate = c.dstate;
    p.dtype = c.dtype;
    p.dt_dtype = c.dt_dtype;
    p.A_dtype = p.dt_bias_dtype = q.A_is_log ? c.dt_dtype : static_cast<int32_t>(MAMBA_FLOAT32);
    p.A_is_log = q.A_is_log;
    p.dt_softplus = q.softplus;
    p.dt_min = static_cast<float>(q.dt_min);
    p.dt_max = static_cast<float>(q.dt_max);
    p.x = q.x.data();
    p.dt = q.dt.data();
    p.A = q.A_given.data();
    p.B = q.B.data();
    p.C = q.C.data();
    p.D = q.use_D ? q.D.floats() : nullptr;
    p.D_head_stride = c.headdim;
    p.D_dim_stride = q.D_per_dim ? 1 : 0;
    p.dt_bias = q.use_bias ? q.bias.data() : nullptr;
    p.initial_state = q.use_initial ? q.initial.floats() : nullptr;
    p.seq_idx = q.use_seq_idx ? q.seq_idx.data() : nullptr;
    p.out = q.out.data();
    p.final_state = q.final_state.floats();
    set_strides(q.x, &p.x_batch_stride, &p.x_len_stride, &p.x_head_stride);
    set_strides(q.dt, &p.dt_batch_stride, &p.dt_len_stride, &p.dt_head_stride);
    set_strides(q.B, &p.B_batch_stride, &p.B_len_stride, &p.B_group_stride);
    set_strides(q.C, &p.C_batch_stride, &p.C_len_stride, &p.C_group_stride);
    set_strides(q.z, &p.z_batch_stride, &p.z_len_stride, &p.z_head_stride);
    set_strides(q.out, &p.out_batch_stride, &p.out_len_stride, &p.out_head_stride);
    return p;
}

static bool run_backward(const MambaSsd& forward, Problem& q) {
    MambaSsdBackward p;
    memset(&p, 0, sizeof(p));
    p.forward = forward;
    p.forward.z = nullptr;
    std::vector<double> workspace(static_cast<size_t>(mamba_ssd_backward_workspace(&p.forward) / 8 + 2));
    p.forward.workspace = workspace.data();
    p.dout = q.dout.data();
    p.dfinal_state = q.dfinal.floats();
    p.dx = q.dx.data();
    p.ddt = q.ddt.data();
    p.dA = q.dA.floats();
    p.dB = q.dB.data();
    p.dC = q.dC.data();
    p.dD = q.use_D ? q.dD.floats() : nullptr;
    p.ddt_bias = q.use_bias ? q.dbias.floats() : nullptr;
    p.dinitial_state = q.dinitial.floats();
    set_strides(q.dout, &p.dout_batch_stride, &p.dout_len_stride, &p.dout_head_stride);
    set_strides(q.dx, &p.dx_batch_stride, &p.dx_len_stride, &p.dx_head_stride);
    set_strides(q.ddt, &p.ddt_batch_stride, &p.ddt_len_stride, &p.ddt_head_stride);
    set_strides(q.dB, &p.dB_batch_stride, &p.dB_len_stride, &p.dB_group_stride);
    set_strides(q.dC, &p.dC_batch_stride, &p.dC_len_stride, &p.dC_group_stride);
    return expect_ok(mamba_ssd_backward(&p));
}

static void run_case(const SsdCase& c) {
    begin_case("ssd %d dtype=%d/%d B=%d L=%d H=%d P=%d G=%d N=%d", c.turn, c.dtype, c.dt_dtype, static_cast<int>(c.batch),
               static_cast<int>(c.seqlen), static_cast<int>(c.nheads), static_cast<int>(c.headdim), static_cast<int>(c.ngroups),
               static_cast<int>(c.dstate));
    Problem q = make_problem(c);
    const Truth truth = reference(c, q);
    MambaSsd p = parameters(c, q);
    const int64_t L = c.seqlen, H = c.nheads, P = c.headdim, G = c.ngroups, N = c.dstate;
    const auto at_row = [&](const std::vector<double>& values) {
        return [&values, L, H, P](int64_t b, int64_t l, int64_t h, int64_t i) { return values[((b * L + l) * H + h) * P + i]; };
    };
    const auto at_matrix = [&](const std::vector<double>& values) {
        return [&values, L, G, N](int64_t b, int64_t l, int64_t g, int64_t n) { return values[((b * L + l) * G + g) * N + n]; };
    };
    const auto at_state = [&](const std::vector<double>& values) {
        return [&values, H, P, N](int64_t b, int64_t h, int64_t i, int64_t n) { return values[((b * H + h) * P + i) * N + n]; };
    };
    const auto at_head = [&](const std::vector<double>& values) {
        return [&values](int64_t h, int64_t, int64_t, int64_t) { return values[h]; };
    };
    if (!expect_ok(mamba_ssd_forward(&p))) {
        return;
    }
    expect_close("out", q.out, kArithmetic, at_row(truth.y));
    expect_close("final_state", q.final_state, kArithmetic, at_state(truth.final_state));
    if (!run_backward(p, q) || c.batch == 0 || H == 0) {
        return;  // empty: nothing is written
    }
    expect_close("dx", q.dx, kArithmetic, at_row(truth.dx));
    expect_close("ddt", q.ddt, 3 * kArithmetic,
                 [&](int64_t b, int64_t l, int64_t h, int64_t) { return truth.ddt[(b * L + l) * H + h]; });
    expect_close("dA", q.dA, kArithmetic, at_head(truth.dA), truth.dA_terms);
    expect_close("dB", q.dB, kArithmetic, at_matrix(truth.dB));
    expect_close("dC", q.dC, kArithmetic, at_matrix(truth.dC));
    expect_close("dinitial_state", q.dinitial, kArithmetic, at_state(truth.dinitial));
    if (q.use_bias) {
        expect_close("ddt_bias", q.dbias, kArithmetic, at_head(truth.dbias), truth.dbias_terms);
    }
    if (q.use_D && q.D_per_dim) {
        expect_close("dD", q.dD, kArithmetic, [&](int64_t h, int64_t i, int64_t, int64_t) { return truth.dD[h * P + i]; });
    } else if (q.use_D) {
        expect_close("dD", q.dD, kArithmetic, [&](int64_t h, int64_t, int64_t, int64_t) {
            double sum = 0.0;
            for (int64_t i = 0; i < P; ++i) {
                sum += truth.dD[h * P + i];
            }
            return sum;
        });
    }
    // the gate, on what the plain output should be
    p.z = q.z.data();
    if (expect_ok(mamba_ssd_forward(&p))) {
        expect_close("gated out", q.out, kArithmetic, [&](int64_t b, int64_t l, int64_t h, int64_t i) {
            const double z = q.z.get(b, l, h, i);
            return truth.y[((b * L + l) * H + h) * P + i] * z / (1.0 + exp(-z));
        });
    }
}

static void test_table() {
    // batch, seqlen, nheads, headdim, ngroups, dstate
    const int64_t sizes[][6] = {{1, 1, 1, 1, 1, 1},    {2, 3, 2, 5, 1, 3},      {1, 15, 4, 16, 2, 17},  {2, 64, 3, 24, 3, 8},
                                {1, 65, 2, 64, 1, 16}, {2, 127, 4, 7, 2, 33},   {1, 130, 1, 49, 1, 64}, {1, 200, 2, 16, 1, 5},
                                {3, 79, 2, 32, 1, 48}, {1, 66, 1, 256, 1, 256}, {0, 5, 2, 4, 1, 4},     {2, 5, 0, 4, 1, 4},
                                {2, 0, 2, 4, 1, 4}};
    int turn = 0;
    for (const auto& size : sizes) {
        for (int32_t dtype = MAMBA_FLOAT32; dtype <= MAMBA_BFLOAT16; ++dtype) {
            for (int variant = 0; variant < 4; ++variant, ++turn) {
                const int32_t dt_dtype = variant % 2 ? MAMBA_FLOAT32 : dtype;
                run_case({size[0], size[1], size[2], size[3], size[4], size[5], dtype, dt_dtype, turn});
            }
        }
    }
    for (int i = 0; i < 2; ++i) {  // enough work for several threads: heads, and parts of a head
        run_case({2, 200, 4, 64, 1, 64, MAMBA_FLOAT32, MAMBA_FLOAT32, 100 + 3 * i});
        run_case({1, 300, 1, 128, 1, 64, MAMBA_BFLOAT16, MAMBA_FLOAT32, 101 + 3 * i});
    }
}

static void test_packed() {
    begin_case("ssd packed");
    const SsdCase c = {1, 150, 2, 20, 1, 12, MAMBA_FLOAT32, MAMBA_FLOAT32, 0};
    const int32_t bounds[] = {10, 60, 60, 140};
    Problem q = make_problem(c);
    MambaSsd p = parameters(c, q);
    Tensor states(MAMBA_FLOAT32, {3, 2, 20, 12}), starts(MAMBA_FLOAT32, {3, 2, 20, 12});
    starts.fill_random(1.0);
    p.batch = 3;
    p.cu_seqlens = bounds;
    p.initial_state = starts.floats();
    p.final_state = states.floats();
    expect_ok(mamba_ssd_forward(&p));
    const Tensor together = q.out;
    for (int i = 0; i < 3; ++i) {
        MambaSsd one = parameters(c, q);
        Tensor state(MAMBA_FLOAT32, {1, 2, 20, 12});
        one.seqlen = bounds[i + 1] - bounds[i];
        one.x = q.x.floats() + bounds[i] * q.x.stride[1];
        one.dt = q.dt.floats() + bounds[i] * q.dt.stride[1];
        one.B = q.B.floats() + bounds[i] * q.B.stride[1];
        one.C = q.C.floats() + bounds[i] * q.C.stride[1];
        one.out = q.out.floats() + bounds[i] * q.out.stride[1];
        one.initial_state = starts.floats() + i * starts.stride[0];
        one.final_state = state.floats();
        expect_ok(mamba_ssd_forward(&one));
        expect(memcmp(state.data(), states.floats() + i * states.stride[0], 2 * 20 * 12 * 4) == 0, "states differ");
    }
    expect(memcmp(together.bytes.data(), q.out.bytes.data(), q.out.bytes.size()) == 0, "outputs differ");
    expect(q.out.bytes.front() == 0xff && q.out.bytes.back() == 0xff, "a step of no sequence was written");
}

static void test_errors() {
    begin_case("ssd errors");
    const SsdCase c = {1, 4, 2, 3, 1, 2, MAMBA_FLOAT32, MAMBA_FLOAT32, 0};
    const int32_t falling[] = {0, 3, 2}, beyond[] = {0, 2, 5};
    Problem q = make_problem(c);
    const MambaSsd good = parameters(c, q);
    MambaSsd p = good;
    const auto refuse = [&](int32_t code, const char* words) {
        expect_error(mamba_ssd_forward(&p), code, words);
        p = good;
    };
    expect_ok(mamba_ssd_forward(&p));
    expect_error(mamba_ssd_forward(nullptr), MAMBA_ERROR_INVALID, "params");
    expect_error(mamba_ssd_backward(nullptr), MAMBA_ERROR_INVALID, "params");
    p.dstate = 257;
    refuse(MAMBA_ERROR_UNSUPPORTED, "dstate");
    p.headdim = 257;
    refuse(MAMBA_ERROR_UNSUPPORTED, "headdim");
    p.ngroups = 3;
    refuse(MAMBA_ERROR_INVALID, "ngroups");
    p.dtype = 7;
    refuse(MAMBA_ERROR_INVALID, "x");
    p.x = nullptr;
    refuse(MAMBA_ERROR_INVALID, "x is NULL");
    p.run.num_threads = 0;
    refuse(MAMBA_ERROR_INVALID, "num_threads");
    p.batch = 2;
    p.cu_seqlens = falling;
    refuse(MAMBA_ERROR_INVALID, "sequence 1 is from 3 to 2");
    p.batch = 2;
    p.cu_seqlens = beyond;
    refuse(MAMBA_ERROR_INVALID, "seqlen=4");
    MambaSsdBackward backward;
    memset(&backward, 0, sizeof(backward));
    backward.forward = good;
    expect_error(mamba_ssd_backward(&backward), MAMBA_ERROR_INVALID, "dout is NULL");
    float memory[64] = {};
    backward.dout = backward.dx = backward.ddt = backward.dB = backward.dC = memory;
    backward.dA = backward.dD = backward.ddt_bias = memory;
    expect_error(mamba_ssd_backward(&backward), MAMBA_ERROR_INVALID, "workspace");
}

int main(int argc, char** argv) {
    return testing::run_tests(argc, argv, [] {
        test_table();
        test_packed();
        test_errors();
    });
}
