// The selective scan in double-precision loops, forward and backward, and the table row that describes a test case of it.
#pragma once

#include "tests/testing.h"

constexpr double kBefore = 0.75;  // what out and dz hold that are added to

struct ScanCase {
    int32_t dtype = MAMBA_FLOAT32;
    int64_t batch = 1, dim = 1, seqlen = 1, dstate = 1, ngroups = 1;
    bool variable_B = true, variable_C = true;
    bool z = true, D = true, bias = true, softplus = true;
    bool initial = false, last = true, seq_idx = false, out_again = false, reverse = false;
    bool add = false;  // with reverse: out and dz hold something before
    int64_t gap = 0;
    int32_t threads = 1;
};

// All tensors of a case. Inputs hold what the kernels read, so that rounding to the dtype is no error.
struct ScanData {
    ScanCase c;
    testing::Tensor u, delta, z, A, B, C, D, bias, initial, out, last, checkpoints;
    testing::Tensor dout, dlast, du, ddelta, dz, dA, dB, dC, dD, dbias, dinitial, workspace;
    std::vector<int32_t> seq_idx;

    explicit ScanData(const ScanCase& c_) : c(c_) {
        using testing::Tensor;
        const int64_t checkpoint_count = c.seqlen > 0 ? (c.seqlen - 1) / MAMBA_SCAN_CHECKPOINT : 0;
        const std::vector<int64_t> rows = {c.batch, c.dim, c.seqlen}, states = {c.batch, c.dim, c.dstate};
        const std::vector<int64_t> group_rows = {c.batch, c.ngroups, c.dstate, c.seqlen};
        u = Tensor(c.dtype, rows, c.gap);
        delta = Tensor(c.dtype, rows, c.gap, {1, 0, 2});
        z = Tensor(c.dtype, rows, c.gap);
        A = Tensor(MAMBA_FLOAT32, {c.dim, c.dstate});
        B = c.variable_B ? Tensor(c.dtype, group_rows, c.gap) : Tensor(MAMBA_FLOAT32, {c.dim, c.dstate});
        C = c.variable_C ? Tensor(c.dtype, group_rows, c.gap, {1, 0, 2, 3}) : Tensor(MAMBA_FLOAT32, {c.dim, c.dstate});
        D = Tensor(MAMBA_FLOAT32, {c.dim});
        bias = Tensor(MAMBA_FLOAT32, {c.dim});
        initial = Tensor(MAMBA_FLOAT32, states);
        out = Tensor(c.dtype, rows, c.gap);
        last = Tensor(MAMBA_FLOAT32, states);
        checkpoints = Tensor(MAMBA_FLOAT32, {c.batch, checkpoint_count, c.dim, c.dstate});
        dout = Tensor(c.dtype, rows, c.gap);
        dlast = Tensor(MAMBA_FLOAT32, states);
        u.fill_random(1.0);
        delta.fill_random(c.softplus ? 0.7 : 0.1, c.softplus ? 0.0 : 0.25);
        z.fill_random(1.5);
        A.fill_random(0.5);
        A.for_each([&](int64_t d, int64_t n, int64_t, int64_t) { A.set(-0.05 - fabs(A.get(d, n)), d, n); });
        B.fill_random(1.0);
        C.fill_random(1.0);
        D.fill_random(1.0);
        bias.fill_random(c.softplus ? 0.3 : 0.03, c.softplus ? -0.5 : 0.0);
        initial.fill_random(1.0);
        dout.fill_random(1.0);
        dlast.fill_random(1.0);
        for (int64_t b = 0; b < c.batch; ++b) {
            int32_t id = 3;
            for (int64_t t = 0; t < c.seqlen; ++t) {
                // dense changes now and then, and one exactly at a checkpoint
                id += t > 0 && (testing::random_below(t % 50 < 9 ? 2 : 30) == 0 || t == MAMBA_SCAN_CHECKPOINT);
                seq_idx.push_back(id);
            }
        }
    }

    MambaSelectiveScan forward() {
        MambaSelectiveScan p;
        memset(&p, 0, sizeof(p));
        p.run.num_threads = c.threads;
        p.batch = c.batch;
        p.dim = c.dim;
        p.seqlen = c.seqlen;
        p.dstate = c.dstate;
        p.ngroups = c.ngroups;
        p.segments = 1;
        p.dtype = c.dtype;
        p.delta_softplus = c.softplus;
        p.variable_B = c.variable_B;
        p.variable_C = c.variable_C;
        p.u = u.data();
        p.delta = delta.data();
        p.z = c.z ? z.data() : nullptr;
        p.A = A.floats();
        p.B = B.data();
        p.C = C.data();
        p.D = c.D ? D.floats() : nullptr;
        p.delta_bias = c.bias ? bias.floats() : nullptr;
        p.initial_state = c.initial ? initial.floats() : nullptr;
        p.seq_idx = c.seq_idx ? seq_idx.data() : nullptr;
        p.out = out.data();
        p.last_state = c.last ? last.floats() : nullptr;
        p.checkpoints = checkpoints.floats();
        p.u_batch_stride = u.stride[0];
        p.u_dim_stride = u.stride[1];
        p.delta_batch_stride = delta.stride[0];
        p.delta_dim_stride = delta.stride[1];
        p.z_batch_stride = z.stride[0];
        p.z_dim_stride = z.stride[1];
        p.B_batch_stride = B.stride[0];
        p.B_group_stride = B.stride[1];
        p.B_dstate_stride = B.stride[2];
        p.C_batch_stride = C.stride[0];
        p.C_group_stride = C.stride[1];
        p.C_dstate_stride = C.stride[2];
        p.out_batch_stride = out.stride[0];
        p.out_dim_stride = out.stride[1];
        p.reverse = c.reverse;
        p.add = c.add;
        if (c.add) {
            out.fill(kBefore);
        }
        return p;
    }

    MambaSelectiveScanBackward backward() {
        using testing::Tensor;
        MambaSelectiveScanBackward q;
        memset(&q, 0, sizeof(q));
        q.forward = forward();
        q.forward.last_state = nullptr;
        out = Tensor(c.dtype, {c.batch, c.dim, c.seqlen}, c.gap);
        q.forward.out = c.out_again ? out.data() : nullptr;
        MambaSelectiveScanPlan plan = {1, 1, 1, 0};
        testing::expect_ok(mamba_selective_scan_plan(&q.forward, 1, &plan));
        testing::expect(plan.forward_segments == 1 && plan.backward_segments == 1, "the CPU does not split the length");
        q.slots = plan.slots;
        workspace = Tensor(MAMBA_FLOAT32, {plan.backward_workspace / 4});
        q.forward.workspace = plan.backward_workspace > 0 ? workspace.floats() : nullptr;
        const std::vector<int64_t> rows = {c.batch, c.dim, c.seqlen}, states = {c.batch, c.dim, c.dstate};
        du = Tensor(c.dtype, rows, c.gap, {1, 0, 2});
        ddelta = Tensor(c.dtype, rows, c.gap);
        dz = Tensor(c.dtype, rows, 2 * c.gap, {1, 0, 2});
        if (c.add) {
            out.fill(kBefore);
            dz.fill(kBefore);
        }
        dA = dB = dC = Tensor(MAMBA_FLOAT32, {c.dim, c.dstate});
        const std::vector<int64_t> matrix = {c.batch, c.ngroups, c.dstate, c.seqlen};
        const int64_t gap = c.batch == 1 && c.dtype == MAMBA_FLOAT32 ? 0 : c.gap;
        if (c.variable_B) {
            dB = Tensor(c.dtype, matrix, gap);
        }
        if (c.variable_C) {
            dC = Tensor(c.dtype, matrix, gap);
        }
        dD = dbias = Tensor(MAMBA_FLOAT32, {c.dim});
        dinitial = Tensor(MAMBA_FLOAT32, states);
        q.dout = dout.data();
        q.dout_batch_stride = dout.stride[0];
        q.dout_dim_stride = dout.stride[1];
        q.dlast_state = c.last ? dlast.floats() : nullptr;
        q.du = du.data();
        q.ddelta = ddelta.data();
        q.dz = c.z ? dz.data() : nullptr;
        q.dA = dA.floats();
        q.dB = dB.data();
        q.dC = dC.data();
        q.dD = c.D ? dD.floats() : nullptr;
        q.ddelta_bias = c.bias ? dbias.floats() : nullptr;
        q.dinitial_state = c.initial ? dinitial.floats() : nullptr;
        q.du_batch_stride = du.stride[0];
        q.du_dim_stride = du.stride[1];
        q.ddelta_batch_stride = ddelta.stride[0];
        q.ddelta_dim_stride = ddelta.stride[1];
        q.dz_batch_stride = dz.stride[0];
        q.dz_dim_stride = dz.stride[1];
        q.dB_batch_stride = dB.stride[0];
        q.dB_group_stride = dB.stride[1];
        q.dB_dstate_stride = dB.stride[2];
        q.dC_batch_stride = dC.stride[0];
        q.dC_group_stride = dC.stride[1];
        q.dC_dstate_stride = dC.stride[2];
        return q;
    }
};

// What the loops below give; gradients by the chain rule of the loss sum(out dout) + sum(last dlast).
struct ScanReference {
    using Values = std::vector<double>;
    const ScanCase& c;
    Values out, last, checkpoints, du, ddelta, dz, dA, dB, dC, dD, dbias, dinitial;

    int64_t row(int64_t b, int64_t d, int64_t t) const { return (b * c.dim + d) * c.seqlen + t; }
    int64_t state(int64_t b, int64_t d, int64_t n) const { return (b * c.dim + d) * c.dstate + n; }
    int64_t parameter(int64_t d, int64_t n) const { return d * c.dstate + n; }
    int64_t group_of(int64_t d) const { return d / (c.dim / c.ngroups); }
    int64_t group(int64_t b, int64_t g, int64_t n, int64_t t) const {
        return ((b * c.ngroups + g) * c.dstate + n) * c.seqlen + t;
    }

    explicit ScanReference(const ScanData& x) : c(x.c) {
        const size_t rows = static_cast<size_t>(c.batch * c.dim * c.seqlen);
        const size_t states = static_cast<size_t>(c.batch * c.dim * c.dstate);
        const size_t groups = static_cast<size_t>(c.batch * c.ngroups * c.dstate * c.seqlen);
        out = du = ddelta = dz = Values(rows, 0.0);
        const size_t parameters = static_cast<size_t>(c.dim * c.dstate);
        last = dinitial = Values(states, 0.0);
        dA = Values(parameters, 0.0);
        checkpoints = Values(states * static_cast<size_t>(c.seqlen > 0 ? (c.seqlen - 1) / MAMBA_SCAN_CHECKPOINT : 0), 0.0);
        dB = Values(c.variable_B ? groups : parameters, 0.0);
        dC = Values(c.variable_C ? groups : parameters, 0.0);
        dD = dbias = Values(static_cast<size_t>(c.dim), 0.0);
        for (int64_t b = 0; b < c.batch; ++b) {
            for (int64_t d = 0; d < c.dim; ++d) {
                run_channel(x, b, d);
            }
        }
    }

    // Each value is read once for all states, or all steps: a tensor's index and dtype take longer than the arithmetic.
    void run_channel(const ScanData& x, int64_t b, int64_t d) {
        const int64_t L = c.seqlen, g = group_of(d);
        const auto place = [&](int64_t t) { return c.reverse ? L - 1 - t : t; };  // of a step in memory
        Values u(L), dt(L), slope(L), y(L), dy(L), h(L + 1), ddt(L, 0.0), a(L), B(L), C(L);
        std::vector<char> restarts(L);
        for (int64_t t = 0; t < L; ++t) {
            const double raw = x.delta.get(b, d, place(t)) + (c.bias ? x.bias.get(d) : 0.0);
            u[t] = x.u.get(b, d, place(t));
            dt[t] = c.softplus && raw <= 20 ? log1p(exp(raw)) : raw;
            slope[t] = c.softplus && raw <= 20 ? testing::sigmoid(raw) : 1.0;
            y[t] = c.D ? x.D.get(d) * u[t] : 0.0;
            const double z = c.z ? x.z.get(b, d, place(t)) : 0.0;
            dy[t] = x.dout.get(b, d, place(t)) * (c.z ? z * testing::sigmoid(z) : 1.0);
            restarts[t] = c.seq_idx && t > 0 && x.seq_idx[b * L + place(t)] != x.seq_idx[b * L + place(t - 1)];
        }
        for (int64_t n = 0; n < c.dstate; ++n) {
            const double A = x.A.get(d, n);
            h[0] = c.initial ? x.initial.get(b, d, n) : 0.0;
            for (int64_t t = 0; t < L; ++t) {
                a[t] = exp(dt[t] * A);
                B[t] = c.variable_B ? x.B.get(b, g, n, place(t)) : x.B.get(d, n);
                C[t] = c.variable_C ? x.C.get(b, g, n, place(t)) : x.C.get(d, n);
                h[t + 1] = a[t] * (restarts[t] ? 0.0 : h[t]) + dt[t] * B[t] * u[t];
                y[t] += C[t] * h[t + 1];
                if ((t + 1) % MAMBA_SCAN_CHECKPOINT == 0 && t + 1 < L) {
                    const int64_t chunk = t / MAMBA_SCAN_CHECKPOINT, chunks = (L - 1) / MAMBA_SCAN_CHECKPOINT;
                    checkpoints[((b * chunks + chunk) * c.dim + d) * c.dstate + n] = h[t + 1];
                }
            }
            last[state(b, d, n)] = h[L];
            double* const dB_row = dB.data() + (c.variable_B ? group(b, g, n, 0) : parameter(d, n));
            double* const dC_row = dC.data() + (c.variable_C ? group(b, g, n, 0) : parameter(d, n));
            double passed = c.last ? x.dlast.get(b, d, n) : 0.0;
            for (int64_t t = L - 1; t >= 0; --t) {
                const double dh = passed + C[t] * dy[t], before = restarts[t] ? 0.0 : h[t];
                dC_row[c.variable_C ? place(t) : 0] += dy[t] * h[t + 1];
                dB_row[c.variable_B ? place(t) : 0] += dh * dt[t] * u[t];
                du[row(b, d, place(t))] += dh * dt[t] * B[t];
                ddt[t] += dh * (u[t] * B[t] + A * a[t] * before);
                dA[parameter(d, n)] += dh * dt[t] * a[t] * before;
                passed = restarts[t] ? 0.0 : dh * a[t];
            }
            dinitial[state(b, d, n)] = passed;
        }
        for (int64_t t = 0; t < L; ++t) {
            const double z = c.z ? x.z.get(b, d, place(t)) : 0.0, s = testing::sigmoid(z);
            out[row(b, d, place(t))] = c.z ? y[t] * z * s : y[t];
            dz[row(b, d, place(t))] = x.dout.get(b, d, place(t)) * y[t] * s * (1.0 + z * (1.0 - s));
            du[row(b, d, place(t))] += c.D ? dy[t] * x.D.get(d) : 0.0;
            ddelta[row(b, d, place(t))] = ddt[t] * slope[t];
            dD[d] += dy[t] * u[t];
            dbias[d] += ddt[t] * slope[t];
        }
    }

    double loss(const ScanData& x) const {
        double sum = 0.0;
        x.out.for_each([&](int64_t b, int64_t d, int64_t t, int64_t) { sum += out[row(b, d, t)] * x.dout.get(b, d, t); });
        x.last.for_each([&](int64_t b, int64_t d, int64_t n, int64_t) {
            sum += c.last ? last[state(b, d, n)] * x.dlast.get(b, d, n) : 0.0;
        });
        return sum;
    }
};
