// The second derivative of selective_scan against differences of the double-precision loops' gradients.
#include "tests/scan_reference.h"

using testing::begin_case;
using testing::expect_close;
using testing::expect_ok;
using testing::Tensor;

// What moves is rounded to float32, which leaves 24 - 9 bits of a difference; the term of order kStep^2 is as small.
static const double kStep = 1.0 / 512;
static const double kDifferences = 1e-3;

struct DoubleBackwardData {
    ScanCase c;
    ScanData at;
    Tensor u, delta, A, B, C, initial, dout;  // tangents
    Tensor ddelta, out_tangent, last, du, ddelta_tangent, dA, dB, dC, dinitial;

    explicit DoubleBackwardData(const ScanCase& c_) : c(c_), at(c_) {
        const std::vector<int64_t> rows = {c.batch, c.dim, c.seqlen}, states = {c.batch, c.dim, c.dstate};
        u = delta = dout = ddelta = out_tangent = du = ddelta_tangent = Tensor(MAMBA_FLOAT32, rows);
        A = Tensor(MAMBA_FLOAT32, {c.dim, c.dstate});
        B = C = Tensor(MAMBA_FLOAT32, {c.batch, c.ngroups, c.dstate, c.seqlen});
        initial = last = dA = dinitial = Tensor(MAMBA_FLOAT32, states);
        for (Tensor* tangent : {&u, &delta, &A, &B, &C, &initial, &dout}) {
            tangent->fill_random(tangent == &delta || tangent == &A ? 0.1 : 1.0);
        }
    }

    // All inputs moved along their tangents.
    ScanData moved(double step) const {
        ScanData to = at;
        const auto move = [&](Tensor& x, const Tensor& tangent) {
            x.for_each([&](int64_t i, int64_t j, int64_t k, int64_t l) {
                x.set(x.get(i, j, k, l) + step * tangent.get(i, j, k, l), i, j, k, l);
            });
        };
        move(to.u, u);
        move(to.delta, delta);
        move(to.A, A);
        move(to.B, B);
        move(to.C, C);
        move(to.initial, initial);
        move(to.dout, dout);
        return to;
    }

    MambaSelectiveScanDoubleBackward call() {
        MambaSelectiveScanDoubleBackward q;
        memset(&q, 0, sizeof(q));
        q.forward = at.forward();
        q.forward.last_state = q.forward.checkpoints = nullptr;
        MambaSelectiveScanPlan plan = {1, 1, 1, 0};
        expect_ok(mamba_selective_scan_plan(&q.forward, 1, &plan));
        q.slots = plan.slots;
        dB = dC = Tensor(MAMBA_FLOAT32, {plan.slots, c.batch, c.ngroups * c.dstate, c.seqlen});
        dB.fill(0.0);
        dC.fill(0.0);
        q.dout = static_cast<const float*>(at.dout.data());
        q.dlast_state = c.last ? at.dlast.floats() : nullptr;
        q.u_tangent = u.floats();
        q.delta_tangent = delta.floats();
        q.A_tangent = A.floats();
        q.B_tangent = B.floats();
        q.C_tangent = C.floats();
        q.initial_state_tangent = c.initial ? initial.floats() : nullptr;
        q.dout_tangent = dout.floats();
        q.ddelta = ddelta.floats();
        q.out_tangent = out_tangent.floats();
        q.last_state_tangent = last.floats();
        q.du_tangent = du.floats();
        q.ddelta_tangent = ddelta_tangent.floats();
        q.dA_tangent = dA.floats();
        q.dB_tangent = dB.floats();
        q.dC_tangent = dC.floats();
        q.dinitial_state_tangent = dinitial.floats();
        return q;
    }
};

static void run_case(const ScanCase& c) {
    begin_case("double backward B=%d D=%d L=%d N=%d G=%d init=%d last=%d seq=%d reverse=%d threads=%d",
               static_cast<int>(c.batch), static_cast<int>(c.dim), static_cast<int>(c.seqlen), static_cast<int>(c.dstate),
               static_cast<int>(c.ngroups), c.initial, c.last, c.seq_idx, c.reverse, c.threads);
    DoubleBackwardData x(c);
    const MambaSelectiveScanDoubleBackward q = x.call();
    if (!expect_ok(mamba_selective_scan_double_backward(&q))) {
        return;
    }
    const ScanData above = x.moved(kStep), below = x.moved(-kStep);
    const ScanReference want(x.at), high(above), low(below);
    const auto slope = [&](const std::vector<double>& up, const std::vector<double>& down, int64_t at) {
        return (up[at] - down[at]) / (2 * kStep);
    };
    const auto rows = [&](const char* name, const Tensor& got, const std::vector<double>& up, const std::vector<double>& down) {
        expect_close(
            name, got, kDifferences,
            [&](int64_t b, int64_t d, int64_t t, int64_t) { return slope(up, down, want.row(b, d, t)); }, 1.0);
    };
    const auto states = [&](const char* name, const Tensor& got, const std::vector<double>& up,
                            const std::vector<double>& down) {
        expect_close(
            name, got, kDifferences,
            [&](int64_t b, int64_t d, int64_t n, int64_t) { return slope(up, down, want.state(b, d, n)); }, 1.0);
    };
    expect_close("out", x.at.out, kDifferences,
                 [&](int64_t b, int64_t d, int64_t t, int64_t) { return want.out[want.row(b, d, t)]; });
    expect_close("ddelta", x.ddelta, kDifferences,
                 [&](int64_t b, int64_t d, int64_t t, int64_t) { return want.ddelta[want.row(b, d, t)]; });
    rows("out_tangent", x.out_tangent, high.out, low.out);
    rows("du_tangent", x.du, high.du, low.du);
    rows("ddelta_tangent", x.ddelta_tangent, high.ddelta, low.ddelta);
    states("last_state_tangent", x.last, high.last, low.last);
    states("dinitial_state_tangent", x.dinitial, high.dinitial, low.dinitial);
    const auto sums = [&](const char* name, const Tensor& parts, std::vector<int64_t> size, const std::vector<double>& up,
                          const std::vector<double>& down) {
        Tensor got(MAMBA_FLOAT32, size);
        got.for_each([&](int64_t i, int64_t j, int64_t k, int64_t) {
            double sum = 0.0;
            for (int64_t part = 0; part < parts.size[0]; ++part) {
                sum += size.size() == 2 ? parts.get(part, i, j) : parts.get(part, i, j, k);
            }
            got.set(sum, i, j, k);
        });
        expect_close(name, got, kDifferences, [&](int64_t i, int64_t j, int64_t k, int64_t) {
            return slope(up, down, size.size() == 2 ? i * size[1] + j : (i * size[1] + j) * size[2] + k);
        });
    };
    sums("dA_tangent", x.dA, {c.dim, c.dstate}, high.dA, low.dA);
    sums("dB_tangent", x.dB, {c.batch, c.ngroups * c.dstate, c.seqlen}, high.dB, low.dB);
    sums("dC_tangent", x.dC, {c.batch, c.ngroups * c.dstate, c.seqlen}, high.dC, low.dC);
}

int main(int argc, char** argv) {
    return testing::run_tests(argc, argv, [] {
        // batch, dim, seqlen, dstate, ngroups: around the lanes, the tile of 64 steps and the states taken together
        const int64_t sizes[][5] = {{1, 1, 1, 1, 1},    {1, 16, 64, 16, 1},  {2, 17, 65, 16, 1}, {3, 5, 7, 3, 1},
                                    {2, 33, 130, 5, 1}, {1, 48, 129, 16, 3}, {2, 12, 70, 2, 4},  {1, 6, 200, 17, 6},
                                    {1, 3, 70, 256, 1}, {3, 50, 400, 16, 1}};
        for (const auto& size : sizes) {
            // the last size, for threads, takes longer than all others
            for (int bits = 0; bits < 16; bits += size[2] == 400 ? 7 : 1) {
                ScanCase c;
                c.batch = size[0];
                c.dim = size[1];
                c.seqlen = size[2];
                c.dstate = size[3];
                c.ngroups = size[4];
                c.z = c.D = c.bias = c.softplus = false;
                c.initial = bits & 1;
                c.last = bits & 2;
                c.seq_idx = bits & 4;
                c.reverse = bits & 8;
                c.threads = 1 + bits % 5;
                run_case(c);
            }
        }
        for (const auto& size : {std::vector<int64_t>{0, 4}, {2, 0}}) {
            ScanCase c;
            c.batch = size[0];
            c.dim = size[1];
            c.z = c.D = c.bias = c.softplus = false;
            run_case(c);
        }
    });
}
