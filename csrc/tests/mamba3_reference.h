// Mamba-3's scan in double, step by step, and its gradients: for the native tests.
#pragma once

#include "tests/testing.h"

static const double kPi = 3.14159265358979323846;

// A problem: sizes, and what turns make of it.
struct Mamba3Case {
    int64_t batch, seqlen, rank, nheads, headdim, ngroups, dstate, nangles;
    int32_t dtype;
    int turn;                     // picks the options
    std::vector<int32_t> bounds;  // of packed sequences

    int64_t sequences() const { return bounds.empty() ? batch : static_cast<int64_t>(bounds.size()) - 1; }
    bool has_states() const { return turn % 2 == 0; }
    bool has_seq_idx() const { return bounds.empty() && turn % 5 == 3; }
    bool pairwise() const { return turn % 2 == rank % 2; }
    bool angles_of_heads() const { return turn % 3 == 1; }
    bool mimo_v() const { return turn % 4 != 0; }  // and mimo_z, where there is a gate
    bool mimo_out() const { return turn % 3 != 2; }
    bool gate() const { return turn % 4 != 2; }
    bool norm() const { return turn % 3 == 0; }
    bool skip() const { return turn % 4 != 3; }
};

// By index, in double; indices as those of Tensor.
struct Values {
    int64_t size[4] = {0, 0, 0, 0};
    std::vector<double> all;

    Values() = default;
    explicit Values(const testing::Tensor& like) {
        for (int i = 0; i < 4; ++i) {
            size[i] = like.size[i];
        }
        all.assign(static_cast<size_t>(size[0] * size[1] * size[2] * size[3]), 0.0);
    }
    size_t index(int64_t i, int64_t j, int64_t k, int64_t l) const {
        return static_cast<size_t>(((i * size[1] + j) * size[2] + k) * size[3] + l);
    }
    double& operator()(int64_t i, int64_t j = 0, int64_t k = 0, int64_t l = 0) { return all[index(i, j, k, l)]; }
    double operator()(int64_t i, int64_t j = 0, int64_t k = 0, int64_t l = 0) const { return all[index(i, j, k, l)]; }
};

// The inputs, or their gradients: of q, k (B, L, R G, N) to norm_weight (H, P), and of the states.
enum Mamba3Name {
    kQ,
    kK,
    kV,
    kAdt,
    kDt,
    kTrap,
    kQBias,
    kKBias,
    kAngles,
    kD,
    kZ,
    kMimoV,
    kMimoZ,
    kMimoOut,
    kNormWeight,
    kAngleState,
    kSsmState,
    kKState,
    kVState,
    kMamba3Names
};

struct Mamba3Data {
    testing::Tensor input[kMamba3Names], dout, dfinal[4];  // dout (B, L, H, P), without mimo_out (B, L, R H, P)
    std::vector<int32_t> seq_idx;
};

// What the kernels should give.
struct Mamba3Truth {
    Values out, final[4], grad[kMamba3Names];

    Mamba3Truth(const Mamba3Case& c_, const Mamba3Data& x_) : out(x_.dout), c(c_), x(x_) {
        for (int i = 0; i < kMamba3Names; ++i) {
            grad[i] = Values(x.input[i]);
        }
        for (int i = 0; i < 4; ++i) {
            final[i] = Values(x.dfinal[i]);
        }
        for (int64_t u = 0; u < c.sequences(); ++u) {
            for (int64_t h = 0; h < c.nheads; ++h) {
                run_head(u, h);
            }
        }
    }

 private:
    const Mamba3Case& c;
    const Mamba3Data& x;

    using Vector = std::vector<double>;

    // What a step leaves for the next one, or a gradient of that: (S), (P, N), (R, N), (P).
    struct State {
        Vector angle, h, k, v;
    };
    // What backward needs of a step: its results, and the state before it (zero after a restart).
    struct Step {
        State before, after;
        Vector q, sum;  // (R, N); before the decay, (P, N)
        bool restarts;
    };

    int64_t group(int64_t r, int64_t h) const { return r * c.ngroups + h / (c.nheads / c.ngroups); }
    int64_t angle_head(int64_t h) const { return c.angles_of_heads() ? h : 0; }
    double get(Mamba3Name name, bool given, int64_t h, int64_t i, int64_t j) const {
        return given ? x.input[name].get(h, i, j) : 1.0;
    }
    State zeros() const {
        const auto sized = [](int64_t count) { return Vector(static_cast<size_t>(count), 0.0); };
        return {sized(c.nangles), sized(c.headdim * c.dstate), sized(c.rank * c.dstate), sized(c.headdim)};
    }
    // Calls visit(name, index in State's vector, its value, place in the states' tensors) of a sequence's and head's state.
    template <typename State_, typename Visit>
    void each_of(State_& state, int64_t u, int64_t h, Visit visit) const {
        for (int64_t i = 0; i < c.nangles; ++i) {
            visit(0, state.angle[i], u, h, i, 0);
        }
        for (int64_t i = 0; i < c.headdim * c.dstate; ++i) {
            visit(1, state.h[i], u, h, i / c.dstate, i % c.dstate);
        }
        for (int64_t i = 0; i < c.rank * c.dstate; ++i) {
            visit(2, state.k[i], u, i / c.dstate, h, i % c.dstate);
        }
        for (int64_t i = 0; i < c.headdim; ++i) {
            visit(3, state.v[i], u, h, i, 0);
        }
    }
    int64_t first_of_pair(int64_t i) const { return c.pairwise() ? 2 * i : i; }
    int64_t second_of_pair(int64_t i) const { return c.pairwise() ? 2 * i + 1 : i + c.dstate / 2; }

    // Of q or k: bias added and turned, (R, N).
    Vector turned(Mamba3Name matrix, Mamba3Name bias, int64_t b, int64_t t, int64_t h, const Vector& angle) const {
        Vector rows(static_cast<size_t>(c.rank * c.dstate));
        for (int64_t r = 0; r < c.rank; ++r) {
            double* row = rows.data() + r * c.dstate;
            for (int64_t n = 0; n < c.dstate; ++n) {
                row[n] = x.input[matrix].get(b, t, group(r, h), n) + x.input[bias].get(h, r, n);
            }
            for (int64_t i = 0; i < c.nangles; ++i) {
                const double first = row[first_of_pair(i)], second = row[second_of_pair(i)];
                row[first_of_pair(i)] = first * cos(angle[i]) - second * sin(angle[i]);
                row[second_of_pair(i)] = first * sin(angle[i]) + second * cos(angle[i]);
            }
        }
        return rows;
    }
    // Its gradient: into q or k, bias and the angle.
    void turn_back(Mamba3Name matrix, Mamba3Name bias, int64_t b, int64_t t, int64_t h, const State& state, const Vector& rows,
                   Vector drows, Vector* dangle) {
        for (int64_t r = 0; r < c.rank; ++r) {
            const double* row = rows.data() + r * c.dstate;
            double* drow = drows.data() + r * c.dstate;
            for (int64_t i = 0; i < c.nangles; ++i) {
                const int64_t a = first_of_pair(i), e = second_of_pair(i);
                const double da = drow[a], de = drow[e];
                (*dangle)[i] += de * row[a] - da * row[e];
                drow[a] = da * cos(state.angle[i]) + de * sin(state.angle[i]);
                drow[e] = de * cos(state.angle[i]) - da * sin(state.angle[i]);
            }
            for (int64_t n = 0; n < c.dstate; ++n) {
                grad[matrix](b, t, group(r, h), n) += drow[n];
                grad[bias](h, r, n) += drow[n];
            }
        }
    }

    void run_head(int64_t u, int64_t h) {
        const int64_t b = c.bounds.empty() ? u : 0;
        const int64_t begin = c.bounds.empty() ? 0 : c.bounds[u], end = c.bounds.empty() ? c.seqlen : c.bounds[u + 1];
        State state = zeros();
        if (c.has_states()) {
            each_of(state, u, h, [&](int name, double& value, int64_t i, int64_t j, int64_t k, int64_t l) {
                value = x.input[kAngleState + name].get(i, j, k, l);
            });
        }
        std::vector<Step> steps;
        for (int64_t t = begin; t < end; ++t) {
            Step step;
            step.restarts = c.has_seq_idx() && t > 0 && x.seq_idx[b * c.seqlen + t] != x.seq_idx[b * c.seqlen + t - 1];
            step.before = step.restarts ? zeros() : state;
            forward(b, t, h, &step);
            state = step.after;
            steps.push_back(step);
        }
        each_of(state, u, h,
                [&](int name, double& value, int64_t i, int64_t j, int64_t k, int64_t l) { final[name](i, j, k, l) = value; });
        State dstate = zeros();
        each_of(dstate, u, h, [&](int name, double& value, int64_t i, int64_t j, int64_t k, int64_t l) {
            value = x.dfinal[name].get(i, j, k, l);
        });
        for (int64_t t = end - 1; t >= begin; --t) {
            const Step& step = steps[static_cast<size_t>(t - begin)];
            backward(b, t, h, step, &dstate);
            dstate = step.restarts ? zeros() : dstate;
        }
        if (c.has_states()) {
            each_of(dstate, u, h, [&](int name, double& value, int64_t i, int64_t j, int64_t k, int64_t l) {
                grad[kAngleState + name](i, j, k, l) = value;
            });
        }
    }

    void forward(int64_t b, int64_t t, int64_t h, Step* step) {
        const int64_t P = c.headdim, N = c.dstate;
        const double dt = x.input[kDt].get(b, t, h), decay = exp(x.input[kAdt].get(b, t, h));
        const double lam = testing::sigmoid(x.input[kTrap].get(b, t, h));
        State& after = step->after;
        after = step->before;
        for (int64_t i = 0; i < c.nangles; ++i) {
            after.angle[i] += kPi * tanh(x.input[kAngles].get(b, t, angle_head(h), i)) * dt;
        }
        step->q = turned(kQ, kQBias, b, t, h, after.angle);
        after.k = turned(kK, kKBias, b, t, h, after.angle);
        for (int64_t p = 0; p < P; ++p) {
            after.v[p] = x.input[kV].get(b, t, h, p);
            for (int64_t n = 0; n < N; ++n) {
                double enters = 0.0, entered = 0.0;
                for (int64_t r = 0; r < c.rank; ++r) {
                    const double weight = get(kMimoV, c.mimo_v(), h, r, p);
                    enters += weight * after.v[p] * after.k[r * N + n];
                    entered += weight * step->before.v[p] * step->before.k[r * N + n];
                }
                after.h[p * N + n] = step->before.h[p * N + n] + (1 - lam) * dt * entered;
                step->sum.push_back(after.h[p * N + n]);
                after.h[p * N + n] = decay * after.h[p * N + n] + lam * dt * enters;
            }
        }
        for (int64_t r = 0; r < c.rank; ++r) {
            const Row row = output(b, t, h, r, *step);
            for (int64_t p = 0; p < P; ++p) {
                if (c.mimo_out()) {
                    out(b, t, h, p) += x.input[kMimoOut].get(h, r, p) * row.gated[p];
                } else {
                    out(b, t, r * c.nheads + h, p) = row.gated[p];
                }
            }
        }
    }

    // y, its norm, and what is gated, of one row.
    struct Row {
        Vector y, normed, gated;
        double rstd = 1.0;
    };
    double gate_of(int64_t b, int64_t t, int64_t h, int64_t r, int64_t p) const {
        return get(kMimoZ, c.mimo_v(), h, r, p) * x.input[kZ].get(b, t, h, p);
    }
    Row output(int64_t b, int64_t t, int64_t h, int64_t r, const Step& step) const {
        const int64_t P = c.headdim, N = c.dstate;
        Row row;
        double squares = 0.0;
        for (int64_t p = 0; p < P; ++p) {
            double y = c.skip() ? x.input[kD].get(h) * get(kMimoV, c.mimo_v(), h, r, p) * step.after.v[p] : 0.0;
            for (int64_t n = 0; n < N; ++n) {
                y += step.after.h[p * N + n] * step.q[r * N + n];
            }
            row.y.push_back(y);
            squares += y * y;
        }
        row.rstd = c.norm() ? 1.0 / sqrt(squares / static_cast<double>(P) + 1e-5) : 1.0;
        for (int64_t p = 0; p < P; ++p) {
            row.normed.push_back(row.y[p] * row.rstd * (c.norm() ? x.input[kNormWeight].get(h, p) : 1.0));
            const double z = c.gate() ? gate_of(b, t, h, r, p) : 0.0;
            row.gated.push_back(row.normed[p] * (c.gate() ? z * testing::sigmoid(z) : 1.0));
        }
        return row;
    }

    // dy of one row, with the gradients of what comes behind y.
    Vector output_backward(int64_t b, int64_t t, int64_t h, int64_t r, const Row& row) {
        const int64_t P = c.headdim;
        Vector dy(static_cast<size_t>(P));
        double product = 0.0;
        for (int64_t p = 0; p < P; ++p) {
            double d = c.mimo_out() ? x.dout.get(b, t, h, p) : x.dout.get(b, t, r * c.nheads + h, p);
            if (c.mimo_out()) {
                grad[kMimoOut](h, r, p) += d * row.gated[p];
                d *= x.input[kMimoOut].get(h, r, p);
            }
            if (c.gate()) {
                const double z = gate_of(b, t, h, r, p), s = testing::sigmoid(z);
                const double dz = d * row.normed[p] * s * (1 + z * (1 - s));
                grad[kZ](b, t, h, p) += dz * get(kMimoZ, c.mimo_v(), h, r, p);
                grad[kMimoZ](h, r, p) += dz * x.input[kZ].get(b, t, h, p);
                d *= z * s;
            }
            if (c.norm()) {
                grad[kNormWeight](h, p) += d * row.y[p] * row.rstd;
                d *= x.input[kNormWeight].get(h, p);
                product += d * row.y[p];
            }
            dy[p] = d;
        }
        for (int64_t p = 0; c.norm() && p < P; ++p) {
            dy[p] = row.rstd * (dy[p] - row.y[p] * row.rstd * row.rstd * product / static_cast<double>(P));
        }
        return dy;
    }

    // d: the gradient of the state after this step, in; of that before it, out.
    void backward(int64_t b, int64_t t, int64_t h, const Step& step, State* d) {
        const int64_t P = c.headdim, N = c.dstate;
        const double dt = x.input[kDt].get(b, t, h), decay = exp(x.input[kAdt].get(b, t, h));
        const double lam = testing::sigmoid(x.input[kTrap].get(b, t, h));
        State before = zeros();
        Vector dq(static_cast<size_t>(c.rank * N), 0.0), drows(static_cast<size_t>(c.rank * P), 0.0);
        for (int64_t r = 0; r < c.rank; ++r) {
            const Vector dy = output_backward(b, t, h, r, output(b, t, h, r, step));
            for (int64_t p = 0; p < P; ++p) {
                if (c.skip()) {
                    grad[kD](h) += dy[p] * get(kMimoV, c.mimo_v(), h, r, p) * step.after.v[p];
                    drows[r * P + p] += dy[p] * x.input[kD].get(h);
                }
                for (int64_t n = 0; n < N; ++n) {
                    d->h[p * N + n] += dy[p] * step.q[r * N + n];
                    dq[r * N + n] += dy[p] * step.after.h[p * N + n];
                }
            }
        }
        double dgamma = 0.0, dnu = 0.0, ddecay = 0.0;
        for (int64_t i = 0; i < P * N; ++i) {
            ddecay += d->h[i] * step.sum[i];
            before.h[i] = decay * d->h[i];
        }
        for (int64_t r = 0; r < c.rank; ++r) {
            for (int64_t p = 0; p < P; ++p) {
                const double weight = get(kMimoV, c.mimo_v(), h, r, p);
                double enters = 0.0, entered = 0.0;
                for (int64_t n = 0; n < N; ++n) {
                    enters += d->h[p * N + n] * step.after.k[r * N + n];
                    entered += before.h[p * N + n] * step.before.k[r * N + n];
                    d->k[r * N + n] += lam * dt * d->h[p * N + n] * weight * step.after.v[p];
                    before.k[r * N + n] += (1 - lam) * dt * before.h[p * N + n] * weight * step.before.v[p];
                }
                dgamma += enters * weight * step.after.v[p];
                dnu += entered * weight * step.before.v[p];
                const double dx = drows[r * P + p] + lam * dt * enters, dw = (1 - lam) * dt * entered;
                d->v[p] += weight * dx;
                before.v[p] += weight * dw;
                grad[kMimoV](h, r, p) += dx * step.after.v[p] + dw * step.before.v[p];
            }
        }
        turn_back(kQ, kQBias, b, t, h, step.after, step.q, dq, &d->angle);
        turn_back(kK, kKBias, b, t, h, step.after, step.after.k, d->k, &d->angle);
        double ddt = lam * dgamma + (1 - lam) * dnu;
        for (int64_t i = 0; i < c.nangles; ++i) {
            const double slope = tanh(x.input[kAngles].get(b, t, angle_head(h), i));
            grad[kAngles](b, t, angle_head(h), i) += kPi * (1 - slope * slope) * dt * d->angle[i];
            ddt += kPi * slope * d->angle[i];
        }
        before.angle = d->angle;
        grad[kAdt](b, t, h) = ddecay * decay;
        grad[kDt](b, t, h) = ddt;
        grad[kTrap](b, t, h) = lam * (1 - lam) * dt * (dgamma - dnu);
        for (int64_t p = 0; p < P; ++p) {
            grad[kV](b, t, h, p) = d->v[p];
        }
        *d = before;
    }
};
