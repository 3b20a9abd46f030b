// causal_conv1d of both libraries, forward and backward, against double-precision loops over a table of options.
#include "tests/testing.h"

using testing::begin_case;
using testing::expect_close;
using testing::expect_error;
using testing::expect_ok;
using testing::layout;
using testing::sigmoid;
using testing::Tensor;
using Values = std::vector<double>;

// Sums in float32; mamba_cuda's powers and quotients are approximate too.
static const double kArithmetic = testing::kCuda ? 4e-6 : 2e-6;

static const double kBefore = 0.75;  // what dx holds that is added to

struct ConvCase {
    int32_t dtype = MAMBA_FLOAT32, weight_dtype = MAMBA_FLOAT32, bias_dtype = MAMBA_FLOAT32;
    int64_t batch = 1, dim = 1, seqlen = 1;
    int32_t width = 4;
    bool silu = true, bias = true, seq_idx = false, initial = false, final = false;
    bool padding_first = false;  // with seq_idx, in every other row
    bool add = false;            // dx holds something before
    bool infinity = false;       // some of x are; forward only
    bool x_channels_last = false, out_channels_last = false, dout_transposed = false;
    int64_t gap = 0, lead = -1;
    int32_t threads = 1;
};

struct ConvData {
    ConvCase c;
    Tensor x, weight, bias, initial, final, out, dout, dx, dfinal, dinitial, dweight, dbias, workspace;
    testing::Memory<int32_t> seq_idx;

    explicit ConvData(const ConvCase& c_) : c(c_) {
        const std::vector<int64_t> rows = {c.batch, c.dim, c.seqlen}, states = {c.batch, c.dim, c.width - 1};
        x = Tensor(c.dtype, rows, c.gap, layout(c.x_channels_last), c.lead);
        out = Tensor(c.dtype, rows, c.gap, layout(c.out_channels_last), c.lead);
        weight = Tensor(c.weight_dtype, {c.dim, c.width});
        bias = Tensor(c.bias_dtype, {c.dim});
        initial = Tensor(c.dtype, states, c.gap, layout(!c.x_channels_last));
        final = Tensor(c.dtype, states, c.gap, layout(c.x_channels_last));
        dout = Tensor(c.dtype, rows, c.gap, layout(c.out_channels_last != c.dout_transposed), c.lead);
        dx = Tensor(c.dtype, rows, c.gap, layout(c.x_channels_last), c.lead);
        dfinal = Tensor(c.dtype, states);
        dinitial = Tensor(c.dtype, states);
        x.fill_random(1.0);
        weight.fill_random(0.5);
        bias.fill_random(0.5);
        initial.fill_random(1.0);
        dout.fill_random(1.0);
        dfinal.fill_random(1.0);
        for (int64_t t = 3; t < c.seqlen && c.infinity && c.batch * c.dim > 0; t += 37) {
            x.set(HUGE_VAL, c.batch - 1, c.dim / 2, t);
        }
        for (int64_t b = 0; b < c.batch; ++b) {
            int32_t id = c.padding_first && b % 2 == 0 ? 2 : 0;
            for (int64_t t = 0; t < c.seqlen; ++t) {
                id += t > 0 && (testing::random_below(t % 40 < 10 ? 2 : 25) == 0 || t == 128);
                seq_idx.push_back(id % 4 == 2 ? -1 - id : id);
            }
        }
    }

    MambaCausalConv1d forward() {
        MambaCausalConv1d p;
        memset(&p, 0, sizeof(p));
        p.run.num_threads = c.threads;
        p.batch = c.batch;
        p.dim = c.dim;
        p.seqlen = c.seqlen;
        p.width = c.width;
        p.silu = c.silu;
        p.dtype = c.dtype;
        p.weight_dtype = c.weight_dtype;
        p.bias_dtype = c.bias_dtype;
        p.x = x.data();
        p.weight = weight.data();
        p.bias = c.bias ? bias.data() : nullptr;
        p.seq_idx = c.seq_idx ? seq_idx.data() : nullptr;
        p.initial_states = c.initial ? initial.data() : nullptr;
        p.out = out.data();
        p.final_states = c.final ? final.data() : nullptr;
        p.x_batch_stride = x.stride[0];
        p.x_dim_stride = x.stride[1];
        p.x_len_stride = x.stride[2];
        p.out_batch_stride = out.stride[0];
        p.out_dim_stride = out.stride[1];
        p.out_len_stride = out.stride[2];
        p.initial_batch_stride = initial.stride[0];
        p.initial_dim_stride = initial.stride[1];
        p.initial_len_stride = initial.stride[2];
        p.final_batch_stride = final.stride[0];
        p.final_dim_stride = final.stride[1];
        p.final_len_stride = final.stride[2];
        return p;
    }

    MambaCausalConv1dBackward backward() {
        MambaCausalConv1dBackward q;
        memset(&q, 0, sizeof(q));
        q.forward = forward();
        const int64_t bytes = mamba_causal_conv1d_backward_workspace(&q.forward);
        workspace = Tensor(MAMBA_FLOAT32, {bytes / 4});
        q.workspace = bytes > 0 ? workspace.data() : nullptr;
        dweight = Tensor(q.forward.weight_dtype, {c.dim, c.width});
        dbias = Tensor(q.forward.bias_dtype, {c.dim});
        q.dout = dout.data();
        q.dx = dx.data();
        q.dout_batch_stride = dout.stride[0];
        q.dout_dim_stride = dout.stride[1];
        q.dout_len_stride = dout.stride[2];
        q.dx_batch_stride = dx.stride[0];
        q.dx_dim_stride = dx.stride[1];
        q.dx_len_stride = dx.stride[2];
        q.add = c.add;
        if (c.add) {
            dx.fill(kBefore);
        }
        q.dfinal_states = c.final ? dfinal.data() : nullptr;
        q.dinitial_states = c.initial ? dinitial.data() : nullptr;
        q.dweight = dweight.data();
        q.dbias = c.bias ? dbias.data() : nullptr;
        return q;
    }

    // Input t of a row; t < 0 lies in the initial states.
    double input(int64_t b, int64_t d, int64_t t) const {
        return t >= 0 ? x.get(b, d, t) : c.initial && t >= 1 - c.width ? initial.get(b, d, c.width - 1 + t) : 0.0;
    }
    // Inputs before step 0 are of its sequence.
    bool same_sequence(int64_t b, int64_t s, int64_t t) const {
        return !c.seq_idx || seq_idx[b * c.seqlen + (s < 0 ? 0 : s)] == seq_idx[b * c.seqlen + t];
    }
    bool is_padding(int64_t b, int64_t t) const { return c.seq_idx && seq_idx[b * c.seqlen + t] < 0; }
    double before_activation(int64_t b, int64_t d, int64_t t) const {
        if (is_padding(b, t)) {
            return 0.0;
        }
        double sum = c.bias ? bias.get(d) : 0.0;
        for (int lag = 0; lag < c.width; ++lag) {
            sum += same_sequence(b, t - lag, t) ? weight.get(d, c.width - 1 - lag) * input(b, d, t - lag) : 0.0;
        }
        return sum;
    }
};

static void run_case(const ConvCase& c) {
    begin_case(
        "conv dtype=%d/%d/%d B=%d D=%d L=%d W=%d silu=%d bias=%d seq=%d%d init=%d final=%d inf=%d layout=%d%d%d gap=%d lead=%d "
        "threads=%d",
        c.dtype, c.weight_dtype, c.bias_dtype, static_cast<int>(c.batch), static_cast<int>(c.dim), static_cast<int>(c.seqlen),
        c.width, c.silu, c.bias, c.seq_idx, c.padding_first, c.initial, c.final, c.infinity, c.x_channels_last,
        c.out_channels_last, c.dout_transposed, static_cast<int>(c.gap), static_cast<int>(c.lead), c.threads);
    ConvData x(c);
    const MambaCausalConv1d p = x.forward();
    if (!expect_ok(mamba_causal_conv1d_forward(&p))) {
        return;
    }
    const int64_t L = c.seqlen, history = c.width - 1;
    const auto at = [&](int64_t b, int64_t d, int64_t t) { return (b * c.dim + d) * (L + history) + history + t; };
    Values dx(static_cast<size_t>(c.batch * c.dim * (L + history)), 0.0), dweight(static_cast<size_t>(c.dim * c.width), 0.0);
    Values dbias(static_cast<size_t>(c.dim), 0.0);
    expect_close("out", x.out, kArithmetic, [&](int64_t b, int64_t d, int64_t t, int64_t) {
        const double sum = x.before_activation(b, d, t);
        return c.silu ? sum * sigmoid(sum) : sum;
    });
    if (c.final) {
        expect_close("final_states", x.final, 0.0,
                     [&](int64_t b, int64_t d, int64_t i, int64_t) { return x.input(b, d, L - history + i); });
    }
    if (c.infinity) {
        return;
    }
    x.out.for_each([&](int64_t b, int64_t d, int64_t t, int64_t) {
        if (x.is_padding(b, t)) {
            return;
        }
        const double sum = x.before_activation(b, d, t), s = sigmoid(sum);
        const double grad = x.dout.get(b, d, t) * (c.silu ? s * (1.0 + sum * (1.0 - s)) : 1.0);
        for (int lag = 0; lag < c.width; ++lag) {
            if (x.same_sequence(b, t - lag, t)) {
                dx[at(b, d, t - lag)] += grad * x.weight.get(d, history - lag);
                dweight[d * c.width + history - lag] += grad * x.input(b, d, t - lag);
            }
        }
        dbias[d] += grad;
    });
    x.dfinal.for_each([&](int64_t b, int64_t d, int64_t i, int64_t) {
        dx[at(b, d, L - history + i)] += c.final ? x.dfinal.get(b, d, i) : 0.0;
    });

    const MambaCausalConv1dBackward q = x.backward();
    if (!expect_ok(mamba_causal_conv1d_backward(&q))) {
        return;
    }
    const double before = c.add ? kBefore : 0.0;
    expect_close("dx", x.dx, kArithmetic, [&](int64_t b, int64_t d, int64_t t, int64_t) { return before + dx[at(b, d, t)]; });
    if (c.initial) {
        expect_close("dinitial_states", x.dinitial, kArithmetic,
                     [&](int64_t b, int64_t d, int64_t i, int64_t) { return dx[at(b, d, i - history)]; });
    }
    const double terms = sqrt(static_cast<double>(c.batch * L + 1));
    const auto wanted = [&](int64_t d, int64_t w, int64_t, int64_t) { return dweight[d * c.width + w]; };
    expect_close("dweight", x.dweight, kArithmetic, wanted, terms);
    if (c.bias) {
        expect_close("dbias", x.dbias, kArithmetic, [&](int64_t d, int64_t, int64_t, int64_t) { return dbias[d]; }, terms);
    }
}

static void test_table() {
    // odd sizes; whole warps, vectors and tiles of time and channels, and one more or less; many short rows; nothing
    const int64_t sizes[][3] = {{1, 1, 1},    {3, 5, 2},     {2, 8, 3},     {2, 3, 200},  {4, 20, 63},  {2, 16, 64},
                                {1, 17, 65},  {1, 48, 66},   {9, 2, 129},   {1, 33, 130}, {1, 31, 131}, {1, 132, 257},
                                {1, 18, 300}, {2, 12, 512},  {1, 8, 520},   {1, 6, 1029}, {2, 4, 2048}, {300, 8, 3},
                                {1, 260, 24}, {130, 4, 257}, {260, 4, 130}, {0, 4, 9},    {2, 0, 9},    {2, 19, 0}};
    int turn = 0;
    for (const auto& size : sizes) {
        for (int32_t dtype = MAMBA_FLOAT32; dtype <= MAMBA_BFLOAT16; ++dtype) {
            for (int layouts = 0; layouts < 4; ++layouts) {
                const bool large = size[0] * size[1] * size[2] > 5000;
                for (int variant = large ? layouts : 0; variant < (large ? layouts + 1 : 4); ++variant, ++turn) {
                    ConvCase c;
                    c.dtype = dtype;
                    c.weight_dtype = turn % 2 ? dtype : MAMBA_FLOAT32;
                    c.bias_dtype = turn % 3 ? c.weight_dtype : MAMBA_BFLOAT16;
                    c.batch = size[0];
                    c.dim = size[1];
                    c.seqlen = size[2];
                    c.width = 2 + (turn + turn / 3) % 3;
                    c.silu = turn % 5 != 0;
                    c.bias = turn % 7 != 0;
                    c.x_channels_last = layouts == 1 || layouts == 3;
                    c.out_channels_last = layouts == 1 || (layouts == 2 && turn % 2 == 0);
                    c.dout_transposed = turn % 8 == 5;
                    c.gap = layouts != 2 ? 0 : turn % 3 == 0 ? 8 : 3;
                    c.lead = variant == 1 ? 1 : variant == 2 ? 8 : 0;
                    c.seq_idx = variant == 2;
                    c.initial = variant == 3 || (variant == 1 && turn % 3 == 0) || (variant == 2 && turn / 4 % 2 == 0);
                    c.padding_first = turn / 8 % 2 == 0;
                    c.final = variant == 3 || (variant == 0 && turn % 3 == 1);
                    c.infinity = variant == 0 && turn % 16 == 0;
                    c.add = turn % 3 == 2;
                    c.threads = 1 + turn % 3;
                    run_case(c);
                }
            }
        }
    }
}

// What most models ask for, which mamba_cuda has kernels of their own for: rows that fill warps, and begin and end anywhere.
static void test_width_4() {
    int turn = 0;
    for (const int64_t seqlen : {128, 256, 517, 1024, 2047, 2048, 3073, 4099}) {
        for (int32_t dtype = MAMBA_FLOAT32; dtype <= MAMBA_BFLOAT16; ++dtype) {
            for (int variant = 0; variant < 6; ++variant, ++turn) {
                ConvCase c;
                c.dtype = dtype;
                c.weight_dtype = c.bias_dtype = turn % 2 == 0 ? dtype : (dtype + 1) % 3;
                c.batch = 1 + turn % 2;
                c.dim = variant % 4 == 1 ? 8 : 3;
                c.seqlen = seqlen;
                c.bias = turn % 5 != 0;
                c.x_channels_last = c.out_channels_last = variant % 4 == 1;
                c.seq_idx = variant >= 4;
                c.gap = variant == 3 ? 16 : 0;
                c.lead = variant == 2 ? 3 : 0;
                c.initial = variant == 5;
                c.final = variant < 4 && turn % 4 == 1;
                c.infinity = variant < 4 && turn % 7 == 3;
                c.add = turn % 3 != 0;
                run_case(c);
            }
        }
    }
}

static void test_many_threads() {
    ConvCase c;  // enough work for several threads, and too few blocks of channels for them
    c.threads = 6;
    c.batch = 5;
    c.dim = 24;
    c.seqlen = 5000;
    run_case(c);
    c.seq_idx = true;
    c.x_channels_last = true;
    run_case(c);
}

static void test_errors() {
    begin_case("conv errors");
    ConvCase c;
    c.dim = 6;
    c.seqlen = 20;
    c.bias = false;
    ConvData x(c);
    const MambaCausalConv1d good = x.forward();
    MambaCausalConv1d p = good;
    const auto refuse = [&](const char* words, int32_t code = MAMBA_ERROR_INVALID) {
        expect_error(mamba_causal_conv1d_forward(&p), code, words);
        p = good;
    };
    expect_error(mamba_causal_conv1d_forward(nullptr), MAMBA_ERROR_INVALID, "params");
    expect_error(mamba_causal_conv1d_backward(nullptr), MAMBA_ERROR_INVALID, "params");
    p.width = 5;
    refuse("width must be in [2, 4], got 5", MAMBA_ERROR_UNSUPPORTED);
    p.width = 1;
    refuse("width");
    p.dim = -2;
    refuse("dim must be at least 0, got -2");
    p.dtype = 7;
    refuse("x");
    p.weight_dtype = -1;
    refuse("weight");
    if (!testing::kCuda) {
        p.run.num_threads = 0;
        refuse("num_threads");
    }
    p.x = nullptr;
    refuse("x is NULL");
    p.out = nullptr;
    refuse("out is NULL");
    p.weight = nullptr;
    refuse("weight is NULL");
    p.seq_idx = x.seq_idx.data();
    p.final_states = x.final.data();
    refuse("seq_idx cannot be given together with final_states");
    MambaCausalConv1dBackward q = x.backward();
    q.forward.seq_idx = x.seq_idx.data();
    q.dfinal_states = x.dfinal.data();
    expect_error(mamba_causal_conv1d_backward(&q), MAMBA_ERROR_INVALID, "seq_idx cannot be given together with dfinal_states");
    q = x.backward();
    q.workspace = q.workspace == nullptr ? x.out.data() : nullptr;
    expect_error(mamba_causal_conv1d_backward(&q), MAMBA_ERROR_INVALID, "workspace must");
    q = x.backward();
    q.dx = nullptr;
    expect_error(mamba_causal_conv1d_backward(&q), MAMBA_ERROR_INVALID, "dx");
}

int main(int argc, char** argv) {
    return testing::run_tests(argc, argv, [] {
        test_table();
        test_width_4();
        test_many_threads();
        test_errors();
    });
}
