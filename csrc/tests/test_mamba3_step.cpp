// Mamba-3's decoding step from a layer's projection as it is: equal to the step of what loops in double make of it.
#include "tests/mamba3_problem.h"

using testing::begin_case;
using testing::expect_close;
using testing::expect_error;
using testing::expect_ok;
using testing::Memory;
using testing::Tensor;

static Tensor as_dtype(const Tensor& from, int32_t dtype) {
    Tensor to(dtype, {from.size[0], from.size[1], from.size[2], from.size[3]});
    from.for_each([&](int64_t i, int64_t j, int64_t k, int64_t l) { to.set(from.get(i, j, k, l), i, j, k, l); });
    return to;
}

// rows / rms(rows) * weight
static void norm(Tensor& rows, const Tensor& weight, double eps) {
    const int64_t N = rows.size[3];
    const Tensor from = rows;
    rows.for_each([&](int64_t b, int64_t t, int64_t r, int64_t n) {
        double squares = 0.0;
        for (int64_t i = 0; i < N; ++i) {
            squares += from.get(b, t, r, i) * from.get(b, t, r, i);
        }
        rows.set(from.get(b, t, r, n) / sqrt(squares / static_cast<double>(N) + eps) * weight.get(n), b, t, r, n);
    });
}

struct Weights {
    Tensor dt_bias, q, k;
    double A_floor;
    int32_t A_softplus;
};

// The tensors of a step that is given all of these, from those of the projection.
static Mamba3Data prepared(const Mamba3Case& c, const Mamba3Data& x, const Weights& weights) {
    Mamba3Data y = x;
    norm(y.input[kQ], weights.q, 1e-5);
    norm(y.input[kK], weights.k, 1e-3);
    const auto softplus = [](double value) { return log1p(exp(-fabs(value))) + (value > 0 ? value : 0.0); };
    for (int64_t b = 0; b < c.batch; ++b) {
        for (int64_t h = 0; h < c.nheads; ++h) {
            const double a = x.input[kAdt].get(b, 0, h);
            const double rate = weights.A_softplus != 0 ? softplus(a) : a < 0 ? 1 / (1 - a) : 1 + a;
            const double dt = softplus(x.input[kDt].get(b, 0, h) + weights.dt_bias.get(h));
            y.input[kDt].set(dt, b, 0, h);
            y.input[kAdt].set(-(rate > weights.A_floor ? rate : weights.A_floor) * dt, b, 0, h);
        }
    }
    return y;
}

static MambaMamba3Step step_of(const Mamba3Case& c, Mamba3Data& x, Tensor& out) {
    const Memory<int32_t> none;
    MambaMamba3Step p;
    memset(&p, 0, sizeof(p));
    p.scan = parameters(c, x, none, none);
    place_out(c, out, &p.scan);
    p.scan.angle_state = p.scan.ssm_state = p.scan.k_state = p.scan.v_state = nullptr;
    p.state_angle = x.input[kAngleState].floats();
    p.state_ssm = x.input[kSsmState].data();
    p.state_k = x.input[kKState].data();
    p.state_v = x.input[kVState].data();
    return p;
}

static void run_case(const Mamba3Case& c, int32_t parameter_dtype) {
    begin_case("mamba3 step %d parameters=%d B=%d R=%d H=%d P=%d G=%d N=%d S=%d", c.turn, parameter_dtype,
               static_cast<int>(c.batch), static_cast<int>(c.rank), static_cast<int>(c.nheads), static_cast<int>(c.headdim),
               static_cast<int>(c.ngroups), static_cast<int>(c.dstate), static_cast<int>(c.nangles));
    Mamba3Data x = make_data(c);
    const int64_t N = c.dstate;
    Weights weights = {Tensor(parameter_dtype, {c.nheads}), Tensor(parameter_dtype, {N}), Tensor(parameter_dtype, {N}),
                       c.turn % 3 == 1 ? 0.8 : 1e-4, c.turn % 2};
    weights.dt_bias.fill_random(0.5, -2.0);
    weights.q.fill_random(0.3, 1.0);
    weights.k.fill_random(0.3, 1.0);
    x.input[kAdt].fill_random(2.0);
    x.input[kDt].fill_random(1.0);
    Tensor narrow[kMamba3Names];
    for (const Mamba3Name name : {kQBias, kKBias, kD, kMimoV, kMimoZ, kMimoOut, kNormWeight}) {
        narrow[name] = as_dtype(x.input[name], parameter_dtype);
        x.input[name] = as_dtype(narrow[name], MAMBA_FLOAT32);  // rounded
    }
    Mamba3Data y = prepared(c, x, weights);
    Tensor out = x.dout, expected = x.dout;
    MambaMamba3Step p = step_of(c, y, expected);
    if (!expect_ok(mamba_mamba3_step(&p))) {
        return;
    }
    p = step_of(c, x, out);
    p.parameter_dtype = p.weight_dtype = parameter_dtype;
    p.A_floor = static_cast<float>(weights.A_floor);
    p.A_softplus = weights.A_softplus;
    p.q_eps = 1e-5f;
    p.k_eps = 1e-3f;
    p.dt_bias = weights.dt_bias.data();
    p.q_weight = weights.q.data();
    p.k_weight = weights.k.data();
    const auto place = [&](const float*& pointer, Mamba3Name name) {
        pointer = pointer != nullptr ? static_cast<const float*>(narrow[name].data()) : nullptr;
    };
    place(p.scan.q_bias, kQBias);
    place(p.scan.k_bias, kKBias);
    place(p.scan.D, kD);
    place(p.scan.mimo_v, kMimoV);
    place(p.scan.mimo_z, kMimoZ);
    place(p.scan.mimo_out, kMimoOut);
    place(p.scan.norm_weight, kNormWeight);
    if (!expect_ok(mamba_mamba3_step(&p))) {
        return;
    }
    const auto compare = [](const char* name, const Tensor& found, const Tensor& want) {
        expect_close(name, found, 3e-5, [&](int64_t i, int64_t j, int64_t k, int64_t l) { return want.get(i, j, k, l); }, 0.1);
    };
    compare("out", out, expected);
    compare("angle", x.input[kAngleState], y.input[kAngleState]);
    compare("ssm", x.input[kSsmState], y.input[kSsmState]);
    compare("k", x.input[kKState], y.input[kKState]);
    compare("v", x.input[kVState], y.input[kVState]);
    p.dt_bias = nullptr;
    expect_error(mamba_mamba3_step(&p), MAMBA_ERROR_INVALID, "dt_bias is NULL");
}

static void test_table() {
    // batch, rank, nheads, headdim, ngroups, dstate, nangles
    const int64_t sizes[][7] = {{1, 1, 1, 1, 1, 1, 0},   {2, 1, 4, 5, 2, 9, 3},  {3, 1, 2, 64, 1, 128, 32},
                                {2, 4, 3, 33, 3, 20, 8}, {1, 33, 1, 5, 1, 6, 3}, {1, 4, 2, 70, 1, 132, 66},
                                {2, 8, 2, 16, 1, 64, 16}};
    int turn = 0;
    for (const auto& s : sizes) {
        for (int32_t dtype = MAMBA_FLOAT32; dtype <= MAMBA_BFLOAT16; ++dtype, turn += 2) {
            run_case({s[0], 1, s[1], s[2], s[3], s[4], s[5], s[6], MAMBA_FLOAT32, turn, {}}, dtype);
        }
        turn += 1;
    }
}

int main(int argc, char** argv) {
    return testing::run_tests(argc, argv, [] { test_table(); });
}
