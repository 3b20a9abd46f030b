// causal_conv1d_update of both libraries against double-precision loops: both kinds of state, all dtypes and layouts.
#include <algorithm>

#include "tests/testing.h"

using testing::begin_case;
using testing::expect;
using testing::expect_close;
using testing::expect_error;
using testing::expect_ok;
using testing::layout;
using testing::sigmoid;
using testing::Tensor;
using Values = std::vector<double>;

// Sums in float32; mamba_cuda's powers and quotients are approximate too.
static const double kArithmetic = testing::kCuda ? 4e-6 : 2e-6;

static void run_update_case(int turn, int64_t batch, int64_t dim, int64_t seqlen, int64_t state_len, int32_t dtype,
                            int32_t state_dtype, int32_t fixed_width = 0) {
    const int32_t width = fixed_width > 0 ? fixed_width : 2 + turn % 3;
    if (state_len < width - 1) {
        return;
    }
    const bool circular = turn % 2 != 0, indexed = turn % 5 < 2, silu = turn % 4 != 0, use_bias = turn % 7 != 0;
    const int64_t rows = batch + 2;
    begin_case("conv update %d dtype=%d/%d B=%d D=%d L=%d S=%d W=%d circular=%d indexed=%d silu=%d bias=%d", turn, dtype,
               state_dtype, static_cast<int>(batch), static_cast<int>(dim), static_cast<int>(seqlen),
               static_cast<int>(state_len), width, circular, indexed, silu, use_bias);
    Tensor x(dtype, {batch, dim, seqlen}, turn % 3, layout(turn % 3 == 0));
    Tensor out(dtype, {batch, dim, seqlen}, turn % 2, layout(turn % 3 == 1));
    Tensor state(state_dtype, {rows, dim, state_len}, turn % 2, layout(turn % 4 == 1));
    Tensor weight(turn % 2 ? MAMBA_FLOAT32 : dtype, {dim, width}), bias(MAMBA_FLOAT32, {dim});
    x.fill_random(1.0);
    state.fill_random(1.0);
    weight.fill_random(0.5);
    bias.fill_random(0.5);
    const Tensor before = state;
    Tensor want_state = state;
    Values want(static_cast<size_t>(batch * dim * seqlen), 0.0);
    testing::Memory<int32_t> lengths, indices;
    for (int64_t b = 0; b < batch; ++b) {
        lengths.push_back(static_cast<int32_t>(testing::random_below(50)));
        // a row that is not there: mamba_cpu refuses the call, mamba_cuda, which cannot look first, gives NaN
        const bool beyond = testing::kCuda && b == 2;
        indices.push_back(static_cast<int32_t>(b == 1 ? -1 : beyond ? rows : rows - 1 - b));
        const int64_t row = indexed ? indices[b] : b;
        if (row >= rows) {
            std::fill_n(want.begin() + b * dim * seqlen, dim * seqlen, NAN);
            continue;
        }
        for (int64_t d = 0; d < dim && row >= 0; ++d) {
            // what came before step t, t < 0 counting back through the state
            const auto input = [&](int64_t t) {
                const int64_t place = circular ? ((lengths[b] + t) % state_len + state_len) % state_len : state_len + t;
                return t >= 0 ? x.get(b, d, t) : before.get(row, d, place);
            };
            for (int64_t t = 0; t < seqlen; ++t) {
                double sum = use_bias ? bias.get(d) : 0.0;
                for (int lag = 0; lag < width; ++lag) {
                    sum += weight.get(d, width - 1 - lag) * input(t - lag);
                }
                want[(b * dim + d) * seqlen + t] = silu ? sum * sigmoid(sum) : sum;
                if (circular) {
                    want_state.set(x.get(b, d, t), row, d, (lengths[b] + t) % state_len);
                }
            }
            for (int64_t i = 0; i < state_len && !circular; ++i) {
                want_state.set(input(seqlen - state_len + i), row, d, i);
            }
        }
    }
    MambaCausalConv1dUpdate p;
    memset(&p, 0, sizeof(p));
    p.run.num_threads = 1 + turn % 3;
    p.batch = batch;
    p.dim = dim;
    p.seqlen = seqlen;
    p.state_len = state_len;
    p.width = width;
    p.silu = silu;
    p.dtype = dtype;
    p.state_dtype = state_dtype;
    p.weight_dtype = weight.dtype;
    p.bias_dtype = bias.dtype;
    p.x = x.data();
    p.conv_state = state.data();
    p.weight = weight.data();
    p.bias = use_bias ? bias.data() : nullptr;
    p.cache_seqlens = circular ? lengths.data() : nullptr;
    p.conv_state_indices = indexed ? indices.data() : nullptr;
    p.out = out.data();
    p.state_rows = rows;
    p.x_batch_stride = x.stride[0];
    p.x_dim_stride = x.stride[1];
    p.x_len_stride = x.stride[2];
    p.state_row_stride = state.stride[0];
    p.state_dim_stride = state.stride[1];
    p.state_len_stride = state.stride[2];
    p.out_batch_stride = out.stride[0];
    p.out_dim_stride = out.stride[1];
    p.out_len_stride = out.stride[2];
    if (expect_ok(mamba_causal_conv1d_update(&p))) {
        expect_close("out", out, kArithmetic,
                     [&](int64_t b, int64_t d, int64_t t, int64_t) { return want[(b * dim + d) * seqlen + t]; });
        expect(state.bytes == want_state.bytes, "conv_state is not the expected bytes");
    }
}

static void test_update() {
    int turn = 0;
    for (const int64_t dim : {1, 16, 19, 40}) {
        for (const int64_t seqlen : {1, 2, 5, 128, 300}) {
            for (const int64_t state_len : {1, 3, 4, 9, 100}) {
                for (int32_t dtype = MAMBA_FLOAT32; dtype <= MAMBA_BFLOAT16; ++dtype, ++turn) {
                    run_update_case(turn, 1 + turn % 4, dim, seqlen, state_len, dtype, turn % 4 ? dtype : MAMBA_FLOAT32);
                }
            }
        }
    }
    for (const int64_t dim : {64, 300}) {
        for (int32_t dtype = MAMBA_FLOAT32; dtype <= MAMBA_BFLOAT16; ++dtype, ++turn) {
            run_update_case(turn, 4, dim, 1 + turn % 3, 3 + turn % 2, dtype, turn % 4 ? dtype : MAMBA_FLOAT32);
        }
    }
    for (const int64_t dim : {2, 62, 258}) {  // vectors of neighbouring channels on CUDA
        for (const int64_t state_len : {3, 4}) {
            for (int32_t dtype = MAMBA_FLOAT32; dtype <= MAMBA_BFLOAT16; ++dtype, ++turn) {
                run_update_case(6 * turn, 5, dim, 1, state_len, dtype, dtype, 4);
            }
        }
    }
    // rounding of any float to the 16-bit types is checked where a float32 x enters a 16-bit state
    run_update_case(0, 3, 40, 70, 9, MAMBA_FLOAT32, MAMBA_FLOAT16);
    run_update_case(2, 3, 40, 70, 90, MAMBA_FLOAT32, MAMBA_BFLOAT16);
}

static void test_errors() {
    begin_case("conv update errors");
    float memory[16] = {};
    expect_error(mamba_causal_conv1d_update(nullptr), MAMBA_ERROR_INVALID, "params");
    MambaCausalConv1dUpdate u;
    memset(&u, 0, sizeof(u));
    u.run.num_threads = 1;
    u.batch = u.dim = u.seqlen = u.state_rows = 1;
    u.width = 4;
    u.state_len = 2;
    u.x = memory;
    u.weight = memory;
    u.conv_state = memory;
    u.out = memory;
    expect_error(mamba_causal_conv1d_update(&u), MAMBA_ERROR_INVALID, "state_len must be at least 3, got 2");
    if (!testing::kCuda) {
        u.state_len = 3;
        const int32_t beyond = 1;
        u.conv_state_indices = &beyond;
        expect_error(mamba_causal_conv1d_update(&u), MAMBA_ERROR_INVALID, "conv_state_indices[0]");
    }
}

int main(int argc, char** argv) {
    return testing::run_tests(argc, argv, [] {
        test_update();
        test_errors();
    });
}
