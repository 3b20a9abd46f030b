// mamba3_inputs of both libraries, forward and backward, against double precision, over sizes, strides and dtypes.
#include "tests/testing.h"

using testing::begin_case;
using testing::expect_close;
using testing::expect_error;
using testing::expect_ok;
using testing::Memory;
using testing::Tensor;

namespace {

struct Sizes {
    int64_t rows, matrices, dstate, nheads;
};

double sigmoid(double x) {
    return 1 / (1 + exp(-x));
}

struct Rate {
    double value, slope;
};

Rate rate_of(const MambaMamba3Inputs& p, double a) {
    const double tail = 1 / (1 - a), floor = static_cast<double>(p.A_floor);
    const Rate rate = p.A_softplus != 0 ? Rate{log1p(exp(a)), sigmoid(a)} : a < 0 ? Rate{tail, tail * tail} : Rate{1 + a, 1};
    return rate.value < floor ? Rate{floor, 0} : rate;
}

// A row of the projection holds k, q, dt and a, in this order.
struct Problem {
    Sizes sizes;
    MambaMamba3Inputs p;
    Tensor x, weight[2], dt_bias;          // of k and q
    Tensor dmatrix[2], ddt_out, dadt_out;  // what is given to backward

    int64_t columns() const { return sizes.matrices * sizes.dstate; }  // of k, and of q

    double get(int of_q, int64_t row, int64_t column) const { return x.get(row, of_q * columns() + column); }
    double dt_of(int64_t row, int64_t head) const { return x.get(row, 2 * columns() + head) + dt_bias.get(head); }
    Rate rate(int64_t row, int64_t head) const { return rate_of(p, x.get(row, 2 * columns() + sizes.nheads + head)); }
    // 1 / rms of the row of N that the column is in.
    double rstd(int of_q, int64_t row, int64_t column) const {
        double squares = 0;
        for (int64_t n = 0; n < sizes.dstate; ++n) {
            const double value = get(of_q, row, column / sizes.dstate * sizes.dstate + n);
            squares += value * value;
        }
        return 1 / sqrt(squares / static_cast<double>(sizes.dstate) + static_cast<double>(of_q != 0 ? p.q_eps : p.k_eps));
    }
    double dnormed(int of_q, int64_t row, int64_t column) const {
        return dmatrix[of_q].get(row, column / sizes.dstate, column % sizes.dstate) * weight[of_q].get(column % sizes.dstate);
    }
    double dx(int64_t row, int64_t column) const {
        if (column >= 2 * columns()) {
            const int64_t head = (column - 2 * columns()) % sizes.nheads;
            const bool of_dt = column < 2 * columns() + sizes.nheads;
            return of_dt ? ddt(row, head) : -log1p(exp(dt_of(row, head))) * dadt_out.get(row, head) * rate(row, head).slope;
        }
        const int of_q = column >= columns() ? 1 : 0;
        const int64_t own = column - of_q * columns(), first = own / sizes.dstate * sizes.dstate;
        const double scale = rstd(of_q, row, own);
        double along = 0;
        for (int64_t n = 0; n < sizes.dstate; ++n) {
            along += dnormed(of_q, row, first + n) * get(of_q, row, first + n) * scale;
        }
        return scale * (dnormed(of_q, row, own) - get(of_q, row, own) * scale * along / static_cast<double>(sizes.dstate));
    }
    double ddt(int64_t row, int64_t head) const {
        return (ddt_out.get(row, head) - rate(row, head).value * dadt_out.get(row, head)) * sigmoid(dt_of(row, head));
    }
    double dweight(int of_q, int64_t n) const {
        double sum = 0;
        for (int64_t row = 0; row < sizes.rows; ++row) {
            for (int64_t matrix = 0; matrix < sizes.matrices; ++matrix) {
                const int64_t column = matrix * sizes.dstate + n;
                sum += dmatrix[of_q].get(row, matrix, n) * get(of_q, row, column) * rstd(of_q, row, column);
            }
        }
        return sum;
    }
    double ddt_bias(int64_t head) const {
        double sum = 0;
        for (int64_t row = 0; row < sizes.rows; ++row) {
            sum += ddt(row, head);
        }
        return sum;
    }
};

void run_case(const Sizes& sizes, int32_t dtype, int turn) {
    begin_case("mamba3_inputs %d dtype=%d rows=%d matrices=%d N=%d H=%d", turn, dtype, static_cast<int>(sizes.rows),
               static_cast<int>(sizes.matrices), static_cast<int>(sizes.dstate), static_cast<int>(sizes.nheads));
    const int64_t rows = sizes.rows, matrices = sizes.matrices, N = sizes.dstate, H = sizes.nheads;
    const int64_t columns = 2 * matrices * N + 2 * H, to_vectors = (8 - columns % 8) % 8;
    const int64_t gap = turn % 3 == 0 ? 3 : turn % 3 == 1 ? to_vectors : 0, size = dtype == MAMBA_FLOAT32 ? 4 : 2;
    Problem problem;
    problem.sizes = sizes;
    MambaMamba3Inputs& p = problem.p;
    memset(&p, 0, sizeof(p));
    problem.x = Tensor(dtype, {rows, columns}, gap, {}, 0);
    problem.x.fill_random(1.0);
    problem.dt_bias = Tensor(MAMBA_FLOAT32, {H});
    problem.dt_bias.fill_random(1.0, -2.0);
    Tensor out[2], dweight[2];
    for (int of_q = 0; of_q < 2; ++of_q) {
        const int32_t weight_dtype = of_q == turn % 2 ? dtype : MAMBA_FLOAT32;
        problem.weight[of_q] = Tensor(weight_dtype, {N});
        problem.weight[of_q].fill_random(1.0, 1.0);
        dweight[of_q] = Tensor(weight_dtype, {N});
        problem.dmatrix[of_q] = Tensor(dtype, {rows, matrices, N});
        problem.dmatrix[of_q].fill_random(1.0);
        out[of_q] = Tensor(dtype, {rows, matrices, N});
    }
    problem.ddt_out = Tensor(MAMBA_FLOAT32, {rows, H});
    problem.dadt_out = Tensor(MAMBA_FLOAT32, {rows, H});
    problem.ddt_out.fill_random(1.0);
    problem.dadt_out.fill_random(1.0);
    Tensor dt_out(MAMBA_FLOAT32, {rows, H}), adt_out(MAMBA_FLOAT32, {rows, H}), dx(dtype, {rows, columns}, gap, {}, 0);
    Tensor ddt_bias(MAMBA_FLOAT32, {H});

    p.run.num_threads = 1 + turn % 3;
    p.rows = rows;
    p.matrices = matrices;
    p.dstate = N;
    p.nheads = H;
    p.dtype = dtype;
    p.k_weight_dtype = problem.weight[0].dtype;
    p.q_weight_dtype = problem.weight[1].dtype;
    p.A_softplus = turn % 2;
    p.A_floor = 0.371f;  // which no activation of a 16-bit number equals
    p.q_eps = 1e-5f;
    p.k_eps = 1e-2f;
    const auto part = [&](Tensor& whole, int64_t column) {
        return static_cast<void*>(static_cast<unsigned char*>(whole.data()) + column * size);
    };
    p.k = problem.x.data();
    p.q = part(problem.x, matrices * N);
    p.dt = part(problem.x, 2 * matrices * N);
    p.a = part(problem.x, 2 * matrices * N + H);
    p.k_weight = problem.weight[0].data();
    p.q_weight = problem.weight[1].data();
    p.dt_bias = problem.dt_bias.floats();
    p.k_out = out[0].data();
    p.q_out = out[1].data();
    p.dt_out = dt_out.floats();
    p.adt_out = adt_out.floats();
    p.row_stride = problem.x.stride[0];
    if (!expect_ok(mamba_mamba3_inputs_forward(&p))) {
        return;
    }
    const char* const names[] = {"k_out", "q_out"};
    const char* const weights[] = {"dk_weight", "dq_weight"};
    for (int of_q = 0; of_q < 2; ++of_q) {
        expect_close(names[of_q], out[of_q], 4e-6, [&](int64_t row, int64_t matrix, int64_t n, int64_t) {
            const int64_t column = matrix * N + n;
            return problem.get(of_q, row, column) * problem.rstd(of_q, row, column) * problem.weight[of_q].get(n);
        });
    }
    expect_close("dt_out", dt_out, 4e-6,
                 [&](int64_t row, int64_t head, int64_t, int64_t) { return log1p(exp(problem.dt_of(row, head))); });
    expect_close("adt_out", adt_out, 4e-6, [&](int64_t row, int64_t head, int64_t, int64_t) {
        return -problem.rate(row, head).value * log1p(exp(problem.dt_of(row, head)));
    });

    MambaMamba3InputsBackward q;
    memset(&q, 0, sizeof(q));
    q.forward = p;
    Memory<float> workspace(static_cast<size_t>(mamba_mamba3_inputs_backward_workspace(&p) / 4 + 1));
    q.workspace = workspace.data();
    q.dk_out = problem.dmatrix[0].data();
    q.dq_out = problem.dmatrix[1].data();
    q.ddt_out = problem.ddt_out.floats();
    q.dadt_out = problem.dadt_out.floats();
    q.dk = dx.data();
    q.dq = part(dx, matrices * N);
    q.ddt = part(dx, 2 * matrices * N);
    q.da = part(dx, 2 * matrices * N + H);
    q.dk_weight = dweight[0].data();
    q.dq_weight = dweight[1].data();
    q.ddt_bias = ddt_bias.floats();
    q.drow_stride = dx.stride[0];
    if (!expect_ok(mamba_mamba3_inputs_backward(&q))) {
        return;
    }
    expect_close("dx", dx, 2e-5, [&](int64_t row, int64_t column, int64_t, int64_t) { return problem.dx(row, column); });
    for (int of_q = 0; of_q < 2; ++of_q) {
        expect_close(weights[of_q], dweight[of_q], 2e-5,
                     [&](int64_t n, int64_t, int64_t, int64_t) { return problem.dweight(of_q, n); });
    }
    expect_close("ddt_bias", ddt_bias, 2e-5, [&](int64_t head, int64_t, int64_t, int64_t) { return problem.ddt_bias(head); });
}

void test_errors() {
    begin_case("mamba3_inputs errors");
    MambaMamba3Inputs p;
    memset(&p, 0, sizeof(p));
    p.rows = p.matrices = p.dstate = p.nheads = 1;
    p.run.num_threads = 1;
    expect_error(mamba_mamba3_inputs_forward(&p), MAMBA_ERROR_INVALID, "q is NULL");
    p.rows = 0;
    expect_ok(mamba_mamba3_inputs_forward(&p));
    p.dstate = 257;
    expect_error(mamba_mamba3_inputs_forward(&p), MAMBA_ERROR_UNSUPPORTED, "dstate must be in [1, 256], got 257");
    expect_error(mamba_mamba3_inputs_backward(nullptr), MAMBA_ERROR_INVALID, "params is NULL");
}

void test_table() {
    const Sizes table[] = {{37, 1, 128, 64}, {50, 3, 7, 5}, {5, 8, 256, 300}, {33, 2, 20, 70}, {64, 4, 64, 24}, {1, 1, 1, 1}};
    int turn = 0;
    for (const Sizes& sizes : table) {
        for (int32_t dtype = MAMBA_FLOAT32; dtype <= MAMBA_BFLOAT16; ++dtype, ++turn) {
            run_case(sizes, dtype, turn);
            run_case(sizes, dtype, ++turn);
        }
    }
}

}  // namespace

int main(int argc, char** argv) {
    return testing::run_tests(argc, argv, [] {
        test_table();
        test_errors();
    });
}
