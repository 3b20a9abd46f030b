// selective_state_update of both libraries against double-precision loops over a table of options.
#include "tests/testing.h"

using testing::begin_case;
using testing::expect;
using testing::expect_close;
using testing::expect_error;
using testing::expect_ok;
using testing::Memory;
using testing::sigmoid;
using testing::Tensor;

// Sums in float32; mamba_cuda's powers and quotients are approximate too.
static const double kArithmetic = testing::kCuda ? 4e-6 : 2e-6;

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
    const bool softplus = turn % 2 == 0, per_head = turn % 3 == 1, reversed = turn % 8 == 5;
    const int64_t gap = turn % 4 == 2 ? 3 : turn % 8 == 7 ? 8 : 0;  // the second keeps vectors aligned
    const int64_t rows = c.batch + 2;
    begin_case("state update %d dtype=%d/%d B=%d H=%d P=%d N=%d G=%d", turn, c.dtype, c.state_dtype, static_cast<int>(c.batch),
               static_cast<int>(c.nheads), static_cast<int>(c.headdim), static_cast<int>(c.dstate),
               static_cast<int>(c.ngroups));
    const int32_t weights = turn % 2 ? c.dtype : MAMBA_FLOAT32;
    const std::vector<int64_t> heads = {c.batch, c.nheads, c.headdim}, groups = {c.batch, c.ngroups, c.dstate};
    const auto order = [](bool other, const std::vector<int>& dims) { return other ? dims : std::vector<int>{}; };
    const std::vector<int> order3 = order(reversed, {2, 1, 0});
    Tensor state(c.state_dtype, {rows, c.nheads, c.headdim, c.dstate}, gap,
                 reversed ? std::vector<int>{3, 2, 1, 0} : order(turn % 6 == 4, {0, 1, 3, 2}));
    Tensor x(c.dtype, heads, gap, order3), z(c.dtype, heads), out(c.dtype, heads, gap, order(turn % 3 == 2, {2, 0, 1}));
    Tensor dt(weights, heads, gap, order3), B(c.dtype, groups, gap, order3),
        C(c.dtype, groups, 0, order(turn % 5 == 4, {0, 2, 1}));
    Tensor A(turn % 5 == 3 ? c.dtype : MAMBA_FLOAT32, {c.nheads, c.headdim, c.dstate}, 0, order3);
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
    if (softplus && !per_head && turn % 8 == 6 && c.batch * c.nheads * c.headdim > 2) {  // far into both ends of softplus
        dt.set(30.0, c.batch - 1, c.nheads - 1, c.headdim - 1);
        dt.set(-25.0, 0, 0, 0);
    }
    B.fill_random(1.0);
    C.fill_random(1.0);
    D.fill_random(1.0);
    bias.fill_random(0.3);
    Memory<int32_t> indices;
    for (int64_t b = 0; b < c.batch; ++b) {
        // a row that is not there: mamba_cpu refuses the call, mamba_cuda, which cannot look first, gives NaN
        const bool beyond = testing::kCuda && b == 2;
        indices.push_back(static_cast<int32_t>(b == 1 ? -1 : beyond ? rows : rows - 1 - b));
    }

    Tensor want_state = state;
    std::vector<double> want(static_cast<size_t>(c.batch * c.nheads * c.headdim), 0.0);
    out.for_each([&](int64_t b, int64_t h, int64_t q, int64_t) {
        const int64_t row = indexed ? indices[b] : b, g = h / (c.nheads / c.ngroups);
        if (row < 0 || row >= rows) {
            want[(b * c.nheads + h) * c.headdim + q] = row < 0 ? 0.0 : NAN;
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
    p.seqlen = 1;
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
    const int64_t sizes[][5] = {{1, 1, 1, 1, 1},   {2, 1, 33, 16, 1}, {3, 4, 16, 17, 2}, {2, 6, 8, 64, 3},   {1, 3, 64, 128, 1},
                                {4, 2, 5, 256, 1}, {2, 8, 31, 7, 8},  {1, 1, 100, 3, 1}, {2, 2, 20, 33, 1},  {1, 300, 1, 16, 2},
                                {9, 4, 8, 16, 2},  {3, 1, 17, 20, 1}, {2, 4, 4, 255, 4}, {130, 1, 12, 8, 1}, {1, 8, 64, 130, 1},
                                {2, 5, 1, 12, 5},  {0, 2, 4, 8, 1},   {2, 0, 4, 8, 1},   {2, 3, 0, 8, 1}};
    int turn = 0;
    for (const auto& size : sizes) {
        for (int32_t dtype = MAMBA_FLOAT32; dtype <= MAMBA_BFLOAT16; ++dtype) {
            for (int variant = 0; variant < 7; ++variant, ++turn) {
                run_case({size[0], size[1], size[2], size[3], size[4], dtype, variant % 2 ? MAMBA_FLOAT32 : dtype, turn});
            }
        }
    }
    for (int variant = 0; variant < 8;
         ++variant, ++turn) {  // the usual model's sizes, and batches of which a warp takes several
        const int32_t dtype = variant % 2 ? MAMBA_BFLOAT16 : MAMBA_FLOAT16,
                      state_dtype = variant % 4 < 2 ? MAMBA_FLOAT32 : dtype;
        run_case({9, 1, 64, 16, 1, dtype, state_dtype, 2 * turn + 1});
        run_case({5, 3, 16, 128, 3, dtype, state_dtype, 2 * turn + 1});
        run_case({2, 1, 8, 256, 1, dtype, state_dtype, 2 * turn + 1});
        run_case({4500, 1, 8, 17, 1, dtype, state_dtype, turn});
        run_case({7000, 1, 4, 64, 1, dtype, state_dtype, 2 * turn + 1});
    }
    for (int i = 0; i < 6; ++i) {  // enough work for several threads
        run_case({3, 8, 64, 128, 2, MAMBA_FLOAT32, MAMBA_FLOAT32, 100 + i});
        run_case({2, 1, 4096, 16, 1, MAMBA_BFLOAT16, MAMBA_FLOAT32, 100 + i});
    }
}

// Several steps in one call give what as many calls give, and copies of the states between them.
static void test_steps(int64_t dstate, bool scalar_A) {
    const int64_t batch = 3, steps = 5, heads = 2, headdim = 13, rows = 7;
    begin_case("state update, several steps, N=%d", static_cast<int>(dstate));
    const auto random = [](std::vector<int64_t> sizes, double scale) {
        Tensor tensor(MAMBA_FLOAT32, sizes);
        tensor.fill_random(scale);
        return tensor;
    };
    Tensor state = random({rows, heads, headdim, dstate}, 1.0), x = random({batch, steps, heads, headdim}, 1.0),
           dt = random({batch, steps, heads, headdim}, 0.3), z = random({batch, steps, heads, headdim}, 1.0),
           A = random({heads, headdim, dstate}, 0.3), B = random({batch, steps, heads, dstate}, 1.0),
           C = random({batch, steps, heads, dstate}, 1.0), D = random({heads, headdim}, 1.0);
    Tensor out(MAMBA_FLOAT32, {batch, steps, heads, headdim}), want_out = out, old = state, want = state;
    Tensor copies(MAMBA_FLOAT32, {batch * steps, heads, headdim, dstate});
    if (scalar_A) {
        A.stride[2] = 0;
    }
    Memory<int32_t> from, to;
    for (const int32_t row : {5, -1, 0}) {  // the second is padding
        from.push_back(row);
    }
    for (const int32_t row : {2, 3, -1}) {  // the third is stored nowhere
        to.push_back(row);
    }
    MambaSelectiveStateUpdate p;
    memset(&p, 0, sizeof(p));
    p.run.num_threads = 2;
    p.batch = batch, p.seqlen = steps, p.nheads = p.ngroups = heads, p.headdim = headdim, p.dstate = dstate;
    p.state_rows = rows;
    p.dt_softplus = 1;
    p.state = state.data(), p.x = x.data(), p.dt = dt.data(), p.z = z.data(), p.A = A.data();
    p.B = B.data(), p.C = C.data(), p.D = D.data(), p.out = out.data(), p.step_states = copies.data();
    p.state_batch_indices = from.data(), p.dst_state_batch_indices = to.data();
    set_strides(state, &p.state_row_stride, &p.state_head_stride, &p.state_dim_stride);
    set_strides(A, &p.A_head_stride, &p.A_dim_stride, &p.A_dstate_stride);
    set_strides(x, &p.x_batch_stride, &p.x_len_stride, &p.x_head_stride);
    set_strides(B, &p.B_batch_stride, &p.B_len_stride, &p.B_group_stride);
    p.state_dstate_stride = p.x_dim_stride = p.B_dstate_stride = p.D_dim_stride = p.step_states_dstate_stride = 1;
    p.dt_batch_stride = p.z_batch_stride = p.out_batch_stride = p.x_batch_stride;
    p.dt_len_stride = p.z_len_stride = p.out_len_stride = p.x_len_stride;
    p.dt_head_stride = p.z_head_stride = p.out_head_stride = p.x_head_stride;
    p.dt_dim_stride = p.z_dim_stride = p.out_dim_stride = 1;
    p.C_batch_stride = p.B_batch_stride, p.C_len_stride = p.B_len_stride, p.C_group_stride = p.B_group_stride;
    p.C_dstate_stride = 1;
    p.D_head_stride = headdim;
    p.step_states_batch_stride = steps * copies.stride[0], p.step_states_len_stride = copies.stride[0];
    p.step_states_head_stride = copies.stride[1], p.step_states_dim_stride = copies.stride[2];
    if (!expect_ok(mamba_selective_state_update(&p))) {
        return;
    }
    MambaSelectiveStateUpdate step = p;
    step.seqlen = 1;
    step.state = want.data();
    step.step_states = nullptr;
    step.dst_state_batch_indices = nullptr;
    for (int64_t t = 0; t < steps; ++t) {
        step.x = x.floats() + t * p.x_len_stride, step.dt = dt.floats() + t * p.dt_len_stride;
        step.z = z.floats() + t * p.z_len_stride, step.out = want_out.floats() + t * p.out_len_stride;
        step.B = B.floats() + t * p.B_len_stride, step.C = C.floats() + t * p.C_len_stride;
        expect_ok(mamba_selective_state_update(&step));
        for (int64_t b = 0; b < batch; b += 2) {
            for (int64_t h = 0; h < heads; ++h) {
                for (int64_t q = 0; q < headdim; ++q) {
                    for (int64_t n = 0; n < dstate; ++n) {
                        const double found = copies.get(b * steps + t, h, q, n), wanted = want.get(from[b], h, q, n);
                        expect(fabs(found - wanted) < 1e-5 * (1 + fabs(wanted)), "a copy of a state differs");
                    }
                }
            }
        }
    }
    expect_close("out", out, kArithmetic, [&](int64_t b, int64_t t, int64_t h, int64_t q) { return want_out.get(b, t, h, q); });
    expect_close("state", state, kArithmetic, [&](int64_t row, int64_t h, int64_t q, int64_t n) {
        return row == 2 ? want.get(5, h, q, n) : old.get(row, h, q, n);
    });
}

// An infinite input gives an infinite state and output, not a NaN out of the unused lanes of a short row.
static void test_infinity() {
    begin_case("state update of infinity");
    Memory<float> state(3, 0.0f), x(1, static_cast<float>(HUGE_VAL)), dt(1, 1.0f), A(3, -1.0f), BC(3, 1.0f), out(1, 0.0f);
    MambaSelectiveStateUpdate p;
    memset(&p, 0, sizeof(p));
    p.run.num_threads = 1;
    p.batch = p.seqlen = p.nheads = p.headdim = p.ngroups = p.state_rows = 1;
    p.dstate = 3;
    p.state = state.data();
    p.x = x.data();
    p.dt = dt.data();
    p.A = A.data();
    p.B = p.C = BC.data();
    p.out = out.data();
    p.state_dstate_stride = p.A_dstate_stride = p.B_dstate_stride = p.C_dstate_stride = 1;
    expect_ok(mamba_selective_state_update(&p));
    expect(isinf(out[0]) && isinf(state[0]) && isinf(state[2]), "expected infinity");
}

static void test_errors() {
    begin_case("state update errors");
    Memory<float> memory(64, 0.0f);
    MambaSelectiveStateUpdate good;
    memset(&good, 0, sizeof(good));
    good.run.num_threads = 1;
    good.batch = good.seqlen = good.nheads = good.headdim = good.dstate = good.ngroups = good.state_rows = 1;
    good.state = good.out = memory.data();
    good.x = good.dt = good.A = good.B = good.C = memory.data();
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
    p.seqlen = 0;
    refuse("seqlen");
    p.ngroups = 2;
    refuse("ngroups");
    p.state_dtype = 9;
    refuse("state");
    p.BC_dtype = 9;
    refuse("B and C");
    p.state = nullptr;
    refuse("state is NULL");
    p.C = nullptr;
    refuse("C is NULL");
    p.batch = 2;
    refuse("state_rows");
    if (!testing::kCuda) {
        p.run.num_threads = -1;
        refuse("num_threads");
        const int32_t beyond = 3;
        p.state_batch_indices = &beyond;
        refuse("state_batch_indices[0] must be below state_rows=1, got 3");
        p.dst_state_batch_indices = &beyond;
        refuse("dst_state_batch_indices[0] must be below state_rows=1, got 3");
    }
}

int main(int argc, char** argv) {
    return testing::run_tests(argc, argv, [] {
        test_table();
        for (const int64_t dstate : {5, 8, 16, 128, 256}) {
            test_steps(dstate, false);
            test_steps(dstate, true);
        }
        test_infinity();
        test_errors();
    });
}
