// Mamba-3's scan and its decoding step of both libraries against double-precision loops over time.
#include "tests/mamba3_problem.h"

using testing::begin_case;
using testing::expect_close;
using testing::expect_error;
using testing::expect_ok;
using testing::Memory;
using testing::Tensor;

// Sums over a hundred steps, states and channels in float32; tensor cores take operands of 16 bits.
static double arithmetic(int32_t dtype) {
    return dtype == MAMBA_FLOAT32 || !testing::kCuda ? 3e-5 : 4 * testing::rounding(dtype);
}

// Gradients may be the small rest of large terms: behind a norm of one channel they are about zero. packed: got's second
// dimension are its steps, and those of no sequence are as they were.
static void expect_values(const char* name, const Tensor& got, double tolerance, const Values& want,
                          const Mamba3Case* packed = nullptr) {
    const auto at = [&](int64_t i, int64_t t, int64_t k, int64_t l) {
        const bool all = packed == nullptr || packed->bounds.empty();
        const bool written = all || (t >= packed->bounds.front() && t < packed->bounds.back());
        return written ? want(i, t, k, l) : static_cast<double>(NAN);
    };
    expect_close(name, got, tolerance, at, 0.1);
}

// Angles that differ by whole turns are the same, and none is beyond one.
static void expect_angle(const Tensor& got, const Values& want) {
    got.for_each([&](int64_t i, int64_t j, int64_t k, int64_t) {
        const double angle = got.get(i, j, k), off = remainder(angle - want(i, j, k), 2 * kPi);
        if (!(fabs(off) < 1e-5 && angle >= 0 && angle <= 2 * kPi + 1e-6)) {
            testing::report("angle[%d, %d, %d] is %.9g, off by %.3g", static_cast<int>(i), static_cast<int>(j),
                            static_cast<int>(k), angle, off);
        }
    });
}

static void expect_states(Tensor* states, double tolerance, const Values* want) {
    const char* names[] = {"angle", "ssm", "k", "v"};
    expect_angle(states[0], want[0]);
    for (int i = 1; i < 4; ++i) {
        expect_values(names[i], states[i], tolerance, want[i]);
    }
}

static void run_backward(const Mamba3Case& c, Mamba3Data& x, const MambaMamba3& forward, const Mamba3Truth& truth) {
    Tensor grad[kMamba3Names];
    for (int i = 0; i < kMamba3Names; ++i) {
        const Tensor& like = x.input[i];
        grad[i] = Tensor(like.dtype, {like.size[0], like.size[1], like.size[2], like.size[3]});
    }
    MambaMamba3Backward p;
    memset(&p, 0, sizeof(p));
    p.forward = forward;
    Memory<double> workspace(static_cast<size_t>(mamba_mamba3_backward_workspace(&forward) / 8 + 2));
    p.forward.workspace = workspace.data();
    p.dout = x.dout.data();
    set_strides(x.dout, &p.dout_batch_stride, &p.dout_len_stride, &p.dout_head_stride);
    p.dout_rank_stride = c.mimo_out() ? 0 : c.nheads * p.dout_head_stride;
    p.dv_step_stride = p.dz_step_stride = c.nheads * c.headdim;
    p.dtrap_step_stride = c.nheads;
    p.dangle_step_stride = (c.angles_of_heads() ? c.nheads : 1) * c.nangles;
    p.dfinal_angle = x.dfinal[0].floats();
    p.dfinal_ssm = x.dfinal[1].floats();
    p.dfinal_k = x.dfinal[2].floats();
    p.dfinal_v = x.dfinal[3].floats();
    p.dq = grad[kQ].data();
    p.dk = grad[kK].data();
    p.dv = grad[kV].data();
    p.dadt = grad[kAdt].data();
    p.ddt = grad[kDt].data();
    p.dtrap = grad[kTrap].data();
    p.dq_bias = grad[kQBias].floats();
    p.dk_bias = grad[kKBias].floats();
    p.dangles = grad[kAngles].data();
    p.dD = grad[kD].floats();
    p.dz = grad[kZ].data();
    p.dmimo_v = grad[kMimoV].floats();
    p.dmimo_z = grad[kMimoZ].floats();
    p.dmimo_out = grad[kMimoOut].floats();
    p.dnorm_weight = grad[kNormWeight].floats();
    p.dangle_state = grad[kAngleState].floats();
    p.dssm_state = grad[kSsmState].floats();
    p.dk_state = grad[kKState].floats();
    p.dv_state = grad[kVState].floats();
    const int32_t status = mamba_mamba3_backward(&p);
    const bool empty = c.sequences() == 0 || c.nheads == 0;
    if (testing::kCuda && c.rank > 16 && !empty) {
        expect_error(status, MAMBA_ERROR_UNSUPPORTED, "the rank must lie in 1..16");
        return;
    }
    if (!expect_ok(status) || empty) {
        return;  // empty: nothing is written
    }
    const char* names[] = {"dq",           "dk",           "dv",         "dadt",     "ddt",     "dtrap",   "dq_bias",
                           "dk_bias",      "dangles",      "dD",         "dz",       "dmimo_v", "dmimo_z", "dmimo_out",
                           "dnorm_weight", "dangle_state", "dssm_state", "dk_state", "dv_state"};
    const void* given[] = {p.dq,
                           p.dk,
                           p.dv,
                           p.dadt,
                           p.ddt,
                           p.dtrap,
                           p.dq_bias,
                           p.dk_bias,
                           p.dangles,
                           forward.D,
                           forward.z,
                           forward.mimo_v,
                           forward.mimo_z,
                           forward.mimo_out,
                           forward.norm_weight,
                           forward.angle_state,
                           forward.ssm_state,
                           forward.k_state,
                           forward.v_state};
    for (int i = 0; i < kMamba3Names; ++i) {
        const bool of_steps = i < kQBias || i == kAngles || i == kZ;
        if (given[i] != nullptr) {
            expect_values(names[i], grad[i], arithmetic(c.dtype), truth.grad[i], of_steps ? &c : nullptr);
        }
    }
}

// The scan again, a step after the other, with states of the dtype that the turn picks.
static void run_steps(const Mamba3Case& c, Mamba3Data& x, const MambaMamba3& scan, const Mamba3Truth& truth) {
    const int32_t narrow = c.turn % 4 == 0 ? c.dtype : static_cast<int32_t>(MAMBA_FLOAT32);
    Tensor states[4], out(c.dtype, {c.batch, c.seqlen, x.dout.size[2], c.headdim}, 3);
    for (int i = 0; i < 4; ++i) {
        const Tensor& like = x.input[kAngleState + i];
        states[i] = Tensor(i == 0 ? static_cast<int32_t>(MAMBA_FLOAT32) : narrow,
                           {like.size[0], like.size[1], like.size[2], like.size[3]});
        like.for_each([&](int64_t j, int64_t k, int64_t l, int64_t m) {
            states[i].set(c.has_states() ? like.get(j, k, l, m) : 0.0, j, k, l, m);
        });
    }
    MambaMamba3Step p;
    memset(&p, 0, sizeof(p));
    p.scan = scan;
    place_out(c, out, &p.scan);
    p.scan.seqlen = 1;
    p.scan.angle_state = p.scan.ssm_state = p.scan.k_state = p.scan.v_state = nullptr;
    p.ssm_dtype = p.k_dtype = p.v_dtype = narrow;
    p.state_angle = states[0].floats();
    p.state_ssm = states[1].data();
    p.state_k = states[2].data();
    p.state_v = states[3].data();
    const auto next = [](const void*& pointer, const Tensor& tensor) {
        if (pointer != nullptr) {
            pointer = static_cast<const char*>(pointer) + tensor.stride[1] * testing::element_size(tensor.dtype);
        }
    };
    for (int64_t t = 0; t < c.seqlen; ++t) {
        if (!expect_ok(mamba_mamba3_step(&p))) {
            return;
        }
        next(p.scan.q, x.input[kQ]);
        next(p.scan.k, x.input[kK]);
        next(p.scan.v, x.input[kV]);
        next(p.scan.adt, x.input[kAdt]);
        next(p.scan.dt, x.input[kDt]);
        next(p.scan.trap, x.input[kTrap]);
        next(p.scan.angles, x.input[kAngles]);
        next(p.scan.z, x.input[kZ]);
        p.scan.out = static_cast<char*>(p.scan.out) + out.stride[1] * testing::element_size(c.dtype);
    }
    // states that are stored in 16 bits lose half a unit a step, of which the last few count
    const double tolerance = narrow == MAMBA_FLOAT32 ? 3e-5 : 8 * testing::rounding(narrow);
    expect_values("out of steps", out, tolerance, truth.out);
    expect_states(states, tolerance, truth.final);
}

static void run_case(const Mamba3Case& c) {
    begin_case("mamba3 %d dtype=%d B=%d L=%d R=%d H=%d P=%d G=%d N=%d S=%d", c.turn, c.dtype, static_cast<int>(c.batch),
               static_cast<int>(c.seqlen), static_cast<int>(c.rank), static_cast<int>(c.nheads), static_cast<int>(c.headdim),
               static_cast<int>(c.ngroups), static_cast<int>(c.dstate), static_cast<int>(c.nangles));
    Mamba3Data x = make_data(c);
    const Mamba3Truth truth(c, x);
    const Memory<int32_t> seq_idx(x.seq_idx.begin(), x.seq_idx.end()), bounds(c.bounds.begin(), c.bounds.end());
    MambaMamba3 p = parameters(c, x, seq_idx, bounds);
    Tensor out = x.dout, final[4] = {x.dfinal[0], x.dfinal[1], x.dfinal[2], x.dfinal[3]};
    out.bytes.assign(out.bytes.size(), 0xff);
    MambaMamba3 forward = p;
    place_out(c, out, &forward);
    forward.final_angle = final[0].floats();
    forward.final_ssm = final[1].floats();
    forward.final_k = final[2].floats();
    forward.final_v = final[3].floats();
    Memory<double> workspace(static_cast<size_t>(mamba_mamba3_forward_workspace(&forward) / 8 + 2));
    forward.workspace = workspace.data();
    if (!expect_ok(mamba_mamba3_forward(&forward))) {
        return;
    }
    if (c.sequences() > 0 && c.nheads > 0) {
        expect_states(final, arithmetic(c.dtype), truth.final);
        expect_values("out", out, arithmetic(c.dtype), truth.out, &c);
    }
    run_backward(c, x, p, truth);
    if (c.bounds.empty() && !c.has_seq_idx() && c.sequences() > 0) {
        run_steps(c, x, p, truth);
    }
}

static void test_table() {
    // batch, seqlen, rank, nheads, headdim, ngroups, dstate, nangles
    const int64_t sizes[][8] = {{1, 1, 1, 1, 1, 1, 1, 0},      {2, 5, 1, 4, 5, 2, 9, 3},    {1, 70, 1, 2, 20, 1, 16, 8},
                                {2, 33, 2, 2, 8, 1, 12, 4},    {1, 20, 4, 3, 33, 3, 20, 8}, {1, 3, 33, 1, 5, 1, 6, 3},
                                {1, 17, 1, 1, 70, 1, 130, 32}, {0, 5, 2, 2, 4, 1, 4, 1},    {2, 5, 1, 0, 4, 1, 4, 1},
                                {2, 0, 3, 2, 4, 1, 4, 2}};
    const int32_t last = testing::kCuda ? 2 : 4;  // the emulator is slow
    int turn = 0;
    for (const auto& s : sizes) {
        for (int32_t dtype = MAMBA_FLOAT32; dtype <= MAMBA_BFLOAT16; ++dtype) {
            for (int variant = 0; variant < last; ++variant, ++turn) {
                run_case({s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], dtype, turn, {}});
            }
        }
    }
    for (turn = 0; turn < 6; ++turn) {  // packed: sequences of 0 and 1 steps among others, and steps of none
        const int32_t dtype = turn % 2 ? MAMBA_BFLOAT16 : MAMBA_FLOAT32;
        run_case({1, 50, turn % 3 + 1, 2, 8, 1, 16, 4, dtype, turn, {0, 17, 17, 18, 40, 45}});
    }
    if (!testing::kCuda) {  // enough work for several threads
        run_case({2, 150, 1, 4, 64, 2, 64, 16, MAMBA_FLOAT32, 101, {}});
        run_case({2, 80, 4, 4, 64, 1, 64, 32, MAMBA_FLOAT16, 104, {}});
    }
}

static void test_errors() {
    begin_case("mamba3 errors");
    const Mamba3Case c = {1, 4, 2, 2, 3, 1, 6, 2, MAMBA_FLOAT32, 0, {}};
    Mamba3Data x = make_data(c);
    const Memory<int32_t> none, falling = {0, 3, 2}, beyond = {0, 2, 5};
    MambaMamba3 good = parameters(c, x, none, none);
    Tensor out = x.dout;
    place_out(c, out, &good);
    Memory<double> workspace(static_cast<size_t>(mamba_mamba3_forward_workspace(&good) / 8 + 2));
    good.workspace = workspace.data();
    MambaMamba3 p = good;
    const auto refuse = [&](int32_t code, const char* words) {
        expect_error(mamba_mamba3_forward(&p), code, words);
        p = good;
    };
    expect_ok(mamba_mamba3_forward(&p));
    expect_error(mamba_mamba3_forward(nullptr), MAMBA_ERROR_INVALID, "params");
    expect_error(mamba_mamba3_backward(nullptr), MAMBA_ERROR_INVALID, "params");
    expect_error(mamba_mamba3_step(nullptr), MAMBA_ERROR_INVALID, "params");
    p.dstate = 257;
    refuse(MAMBA_ERROR_UNSUPPORTED, "dstate");
    p.headdim = 257;
    refuse(MAMBA_ERROR_UNSUPPORTED, "headdim");
    p.rank = 65;
    refuse(MAMBA_ERROR_UNSUPPORTED, "rank");
    p.ngroups = 3;
    refuse(MAMBA_ERROR_INVALID, "ngroups");
    p.nangles = 4;
    refuse(MAMBA_ERROR_INVALID, "an angle turns two of the dstate=6 entries, got nangles=4");
    p.sequences = 2;
    refuse(MAMBA_ERROR_INVALID, "sequences must be batch without cu_seqlens");
    p.dtype = 7;
    refuse(MAMBA_ERROR_INVALID, "q");
    p.k_bias = nullptr;
    refuse(MAMBA_ERROR_INVALID, "k_bias is NULL");
    p.v_state = nullptr;
    refuse(MAMBA_ERROR_INVALID, "v_state is NULL");
    if (!testing::kCuda) {  // which would have to synchronise to see them
        p.sequences = 2;
        p.cu_seqlens = falling.data();
        refuse(MAMBA_ERROR_INVALID, "sequence 1 is from 3 to 2");
        p.sequences = 2;
        p.cu_seqlens = beyond.data();
        refuse(MAMBA_ERROR_INVALID, "seqlen=4");
    }
    MambaMamba3Step step;
    memset(&step, 0, sizeof(step));
    step.scan = good;
    expect_error(mamba_mamba3_step(&step), MAMBA_ERROR_UNSUPPORTED, "seqlen");
    step.scan.seqlen = 1;
    expect_error(mamba_mamba3_step(&step), MAMBA_ERROR_INVALID, "a step has its own states");
    MambaMamba3Backward backward;
    memset(&backward, 0, sizeof(backward));
    backward.forward = good;
    expect_error(mamba_mamba3_backward(&backward), MAMBA_ERROR_INVALID, "dout is NULL");
}

int main(int argc, char** argv) {
    return testing::run_tests(argc, argv, [] {
        test_table();
        test_errors();
    });
}
