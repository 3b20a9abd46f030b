// selective_state_update of mamba_cpu against double-precision loops over a table of options.
#include "tests/testing.h"

using testing::begin_case;
using testing::expect;
using testing::expect_close;
using testing::expect_error;
using testing::expect_ok;
using testing::Tensor;

static const double kArithmetic = 2e-6;

struct StepCase {
    int64_t batch, nheads, headdim, dstate, ngroups;
    int32_t dtype, state_dtype;
    int turn;  // picks the options
};

static void set_strides(const Tensor& tensor, int64_t* first, int64_t* second, int64_t* third) {
    *first = tensor.stride[0];
    *second = tensor.stride[1];
    *third = tensor.stride[2];
}

static void run_case(const StepCase& c) {
    const int turn = c.turn;
    const bool indexed = turn % 5 < 2, use_z = turn % 3 != 0, use_D = turn % 4 != 1, use_bias = turn % 7 < 5;
    const bool softplus = turn % 2 == 0, per_head = turn % 3 == 1, gaps = turn % 4 == 2;
    const int64_t rows = c.batch + 2;
    begin_case("state update %d dtype=%d/%d B=%d H=%d P=%d N=%d G=%d", turn, c.dtype, c.state_dtype, static_cast<int>(c.batch),
               static_cast<int>(c.nheads), static_cast<int>(c.headdim), static_cast<int>(c.dstate),
               static_cast<int>(c.ngroups));
    const int32_t weights = turn % 2 ? c.dtype : MAMBA_FLOAT32;
    const std::vector<int64_t> heads = {c.batch, c.nheads, c.headdim};
    Tensor state(c.state_dtype, {rows, c.nheads, c.headdim, c.dstate}, gaps ? 3 : 0,
                 turn % 6 == 5 ? std::vector<int>{0, 1, 3, 2} : std::vector<int>{});
    Tensor x(c.dtype, heads, gaps ? 1 : 0), z(c.dtype, heads), out(c.dtype, heads, gaps ? 2 : 0, {2, 0, 1});
    Tensor dt(weights, heads), B(c.dtype, {c.batch, c.ngroups, c.dstate}, gaps ? 1 : 0);
    Tensor C(c.dtype, {c.batch, c.ngroups, c.dstate}, 0, {0, 2, 1});
    Tensor A(turn % 5 == 3 ? c.dtype : MAMBA_FLOAT32, {c.nheads, c.headdim, c.dstate});
    Tensor D(weights, {c.nheads, c.headdim}), bias(weights, {c.nheads, c.headdim});
    if (per_head) {  // one value a head, expanded over headdim (and dstate) as Mamba-2 does
        A = Tensor(A.dtype, {c.nheads, c.headdim, c.dstate});
        A.stride[0] = 1;
        A.stride[1] = A.stride[2] = 0;
        dt.stride[2] = bias.stride[1] = D.stride[1] = 0;
    }
    state.fill_random(1.0);
    x.fill_random(1.0);
    z.fill_random(1.0);
    dt.fill_random(0.5, softplus ? -0.5 : 0.8);
    A.fill_random(0.5);
    A.for_each([&](int64_t h, int64_t q, int64_t n, int64_t) {
        const double value = A.get(h, q, n);
        A.set(value < 0 ? value : -value, h, q, n);
    });
    B.fill_random(1.0);
    C.fill_random(1.0);
    D.fill_random(1.0);
    bias.fill_random(0.3);
    std::vector<int32_t> indices;
    for (int64_t b = 0; b < c.batch; ++b) {
        indices.push_back(static_cast<int32_t>(b == 1 ? -1 : rows - 1 - b));
    }

    const auto sigmoid = [](double v) { return 1.0 / (1.0 + exp(-v)); };
    Tensor want_state = state;
    std::vector<double> want(static_cast<size_t>(c.batch * c.nheads * c.headdim), 0.0);
    std::vector<double> states(want.size() * static_cast<size_t>(c.dstate));
    out.for_each([&](int64_t b, int64_t h, int64_t q, int64_t) {
        const int64_t row = indexed ? indices[b] : b, g = h / (c.nheads / c.ngroups);
        if (row < 0) {
            return;
        }
        double step = dt.get(b, h, q) + (use_bias ? bias.get(h, q) : 0.0);
        step = softplus && step <= 20 ? log1p(exp(step)) : step;
        double y = use_D ? D.get(h, q) * x.get(b, h, q) : 0.0;
        for (int64_t n = 0; n < c.dstate; ++n) {
            const double next = exp(step * A.get(h, q, n)) * state.get(row, h, q, n) + step * B.get(b, g, n) * x.get(b, h, q);
            y += C.get(b, g, n) * next;
            want_state.set(next, row, h, q, n);
        }
        want[(b * c.nheads + h) * c.headdim + q] = use_z ? y * z.get(b, h, q) * sigmoid(z.get(b, h, q)) : y;
    });

    MambaSelectiveStateUpdate p;
    memset(&p, 0, sizeof(p));
    p.run.num_threads = 1 + turn % 3;
    p.batch = c.batch;
    p.nheads = c.nheads;
    p.headdim = c.headdim;
    p.dstate = c.dstate;
    p.ngroups = c.ngroups;
    p.state_dtype = state.dtype;
    p.x_dtype = x.dtype;
    p.dt_dtype = dt.dtype;
    p.A_dtype = A.dtype;
    p.BC_dtype = B.dtype;
    p.D_dtype = D.dtype;
    p.dt_bias_dtype = bias.dtype;
    p.dt_softplus = softplus;
    p.state = state.data();
    p.x = x.data();
    p.dt = dt.data();
    p.A = A.data();
    p.B = B.data();
    p.C = C.data();
    p.D = use_D ? D.data() : nullptr;
    p.z = use_z ? z.data() : nullptr;
    p.dt_bias = use_bias ? bias.data() : nullptr;
    p.state_batch_indices = indexed ? indices.data() : nullptr;
    p.out = out.data();
    p.state_rows = rows;
    set_strides(state, &p.state_row_stride, &p.state_head_stride, &p.state_dim_stride);
    p.state_dstate_stride = state.stride[3];
    set_strides(x, &p.x_batch_stride, &p.x_head_stride, &p.x_dim_stride);
    set_strides(dt, &p.dt_batch_stride, &p.dt_head_stride, &p.dt_dim_stride);
    set_strides(A, &p.A_head_stride, &p.A_dim_stride, &p.A_dstate_stride);
    set_strides(B, &p.B_batch_stride, &p.B_group_stride, &p.B_dstate_stride);
    set_strides(C, &p.C_batch_stride, &p.C_group_stride, &p.C_dstate_stride);
    set_strides(z, &p.z_batch_stride, &p.z_head_stride, &p.z_dim_stride);
    set_strides(out, &p.out_batch_stride, &p.out_head_stride, &p.out_dim_stride);
    p.D_head_stride = D.stride[0];
    p.D_dim_stride = D.stride[1];
    p.dt_bias_head_stride = bias.stride[0];
    p.dt_bias_dim_stride = bias.stride[1];
    if (!expect_ok(mamba_selective_state_update(&p))) {
        return;
    }
    expect_close("out", out, kArithmetic,
                 [&](int64_t b, int64_t h, int64_t q, int64_t) { return want[(b * c.nheads + h) * c.headdim + q]; });
    // a 16-bit state may be rounded the other way where float32 and double lie on either side of a tie
    const double tie = c.state_dtype == MAMBA_FLOAT32 ? kArithmetic : testing::rounding(c.state_dtype);
    expect_close("state", state, tie,
                 [&](int64_t row, int64_t h, int64_t q, int64_t n) { return want_state.get(row, h, q, n); });
}

static void test_table() {
    // batch, nheads, headdim, dstate, ngroups: Mamba-1 has one head of all channels, Mamba-2 many of 64
    const int64_t sizes[][5] = {{1, 1, 1, 1, 1},    {2, 1, 33, 16, 1}, {3, 4, 16, 17, 2}, {2, 6, 8, 64, 3},
                                {1, 3, 64, 128, 1}, {4, 2, 5, 256, 1}, {2, 8, 31, 7, 8},  {1, 1, 100, 3, 1},
                                {2, 2, 20, 33, 1},  {0, 2, 4, 8, 1},   {2, 0, 4, 8, 1},   {2, 3, 0, 8, 1}};
    int turn = 0;
    for (const auto& size : sizes) {
        for (int32_t dtype = MAMBA_FLOAT32; dtype <= MAMBA_BFLOAT16; ++dtype) {
            for (int variant = 0; variant < 7; ++variant, ++turn) {
                run_case({size[0], size[1], size[2], size[3], size[4], dtype, variant % 2 ? MAMBA_FLOAT32 : dtype, turn});
            }
        }
    }
    for (int i = 0; i < 6; ++i) {  // enough work for several threads
        run_case({3, 8, 64, 128, 2, MAMBA_FLOAT32, MAMBA_FLOAT32, 100 + i});
        run_case({2, 1, 4096, 16, 1, MAMBA_BFLOAT16, MAMBA_FLOAT32, 100 + i});
    }
}

// An infinite input gives an infinite state and output, not a NaN out of the unused lanes of a short row.
static void test_infinity() {
    begin_case("state update of infinity");
    float state[3] = {0, 0, 0}, x = static_cast<float>(HUGE_VAL), dt = 1, A[3] = {-1, -1, -1}, BC[3] = {1, 1, 1}, out = 0;
    MambaSelectiveStateUpdate p;
    memset(&p, 0, sizeof(p));
    p.run.num_threads = 1;
    p.batch = p.nheads = p.headdim = p.ngroups = p.state_rows = 1;
    p.dstate = 3;
    p.state = state;
    p.x = &x;
    p.dt = &dt;
    p.A = A;
    p.B = p.C = BC;
    p.out = &out;
    p.state_dstate_stride = p.A_dstate_stride = p.B_dstate_stride = p.C_dstate_stride = 1;
    expect_ok(mamba_selective_state_update(&p));
    expect(isinf(out) && isinf(state[0]) && isinf(state[2]), "expected infinity");
}

static void test_errors() {
    begin_case("state update errors");
    float memory[64] = {};
    const int32_t rows[1] = {3};
    MambaSelectiveStateUpdate good;
    memset(&good, 0, sizeof(good));
    good.run.num_threads = 1;
    good.batch = good.nheads = good.headdim = good.dstate = good.ngroups = good.state_rows = 1;
    good.state = good.out = memory;
    good.x = good.dt = good.A = good.B = good.C = memory;
    MambaSelectiveStateUpdate p = good;
    const auto refuse = [&](const char* words, int32_t code = MAMBA_ERROR_INVALID) {
        expect_error(mamba_selective_state_update(&p), code, words);
        p = good;
    };
    expect_ok(mamba_selective_state_update(&p));
    expect_error(mamba_selective_state_update(nullptr), MAMBA_ERROR_INVALID, "params");
    p.dstate = 257;
    refuse("dstate must be in [1, 256], got 257", MAMBA_ERROR_UNSUPPORTED);
    p.dstate = 0;
    refuse("dstate");
    p.batch = -1;
    refuse("batch");
    p.ngroups = 2;
    refuse("ngroups");
    p.state_dtype = 9;
    refuse("state");
    p.BC_dtype = 9;
    refuse("B and C");
    p.run.num_threads = -1;
    refuse("num_threads");
    p.state = nullptr;
    refuse("state is NULL");
    p.C = nullptr;
    refuse("C is NULL");
    p.batch = 2;
    refuse("state_rows");
    p.state_batch_indices = rows;
    refuse("state_batch_indices[0] must be below state_rows=1, got 3");
}

int main(int argc, char** argv) {
    return testing::run_tests(argc, argv, [] {
        test_table();
        test_infinity();
        test_errors();
    });
}
