// A problem of Mamba-3's scan: its tensors, and the parameters of a call with them. For the native tests.
#pragma once

#include "tests/mamba3_reference.h"

inline Mamba3Data make_data(const Mamba3Case& c) {
    const int turn = c.turn;
    const int64_t gap = turn % 3 == 1 ? 3 : 0, U = c.sequences(), heads = c.angles_of_heads() ? c.nheads : 1;
    const int32_t narrow = turn % 2 ? c.dtype : static_cast<int32_t>(MAMBA_FLOAT32), f32 = MAMBA_FLOAT32;
    const std::vector<int> heads_first = turn % 4 == 2 ? std::vector<int>{0, 2, 1, 3} : std::vector<int>{};
    const std::vector<int> by_head = turn % 2 ? std::vector<int>{0, 2, 1} : std::vector<int>{};
    const std::vector<int64_t> matrix = {c.batch, c.seqlen, c.rank * c.ngroups, c.dstate};
    const std::vector<int64_t> rows = {c.batch, c.seqlen, c.nheads, c.headdim}, steps = {c.batch, c.seqlen, c.nheads};
    const std::vector<int64_t> bias = {c.nheads, c.rank, c.dstate}, projection = {c.nheads, c.rank, c.headdim};
    Mamba3Data x;
    x.input[kQ] = testing::Tensor(c.dtype, matrix, gap);
    x.input[kK] = testing::Tensor(c.dtype, matrix, 0, heads_first);
    x.input[kV] = testing::Tensor(c.dtype, rows, gap, heads_first);
    x.input[kAdt] = testing::Tensor(f32, steps, gap, by_head);
    x.input[kDt] = testing::Tensor(narrow, steps, gap);
    x.input[kTrap] = testing::Tensor(c.dtype, steps, gap, by_head);
    x.input[kQBias] = x.input[kKBias] = testing::Tensor(f32, bias);
    x.input[kAngles] = testing::Tensor(narrow, {c.batch, c.seqlen, heads, c.nangles}, gap);
    x.input[kD] = testing::Tensor(f32, {c.nheads});
    x.input[kZ] = testing::Tensor(c.dtype, rows, gap);
    x.input[kMimoV] = x.input[kMimoZ] = x.input[kMimoOut] = testing::Tensor(f32, projection);
    x.input[kNormWeight] = testing::Tensor(f32, {c.nheads, c.headdim});
    x.input[kAngleState] = x.dfinal[0] = testing::Tensor(f32, {U, c.nheads, c.nangles});
    x.input[kSsmState] = x.dfinal[1] = testing::Tensor(f32, {U, c.nheads, c.headdim, c.dstate});
    x.input[kKState] = x.dfinal[2] = testing::Tensor(f32, {U, c.rank, c.nheads, c.dstate});
    x.input[kVState] = x.dfinal[3] = testing::Tensor(f32, {U, c.nheads, c.headdim});
    x.dout = testing::Tensor(c.dtype, {c.batch, c.seqlen, c.mimo_out() ? c.nheads : c.rank * c.nheads, c.headdim}, gap);
    for (testing::Tensor& tensor : x.input) {
        tensor.fill_random(0.7);
    }
    for (testing::Tensor& tensor : x.dfinal) {
        tensor.fill_random(0.3);
    }
    x.dout.fill_random(1.0);
    for (const Mamba3Name name : {kQBias, kKBias, kMimoV, kMimoZ, kMimoOut, kNormWeight}) {
        x.input[name].fill_random(0.3, 0.7);
    }
    x.input[kDt].for_each([&](int64_t b, int64_t t, int64_t h, int64_t) {
        x.input[kDt].set(0.05 + 0.2 * fabs(x.input[kDt].get(b, t, h)), b, t, h);
        x.input[kAdt].set(-0.3 * fabs(x.input[kAdt].get(b, t, h)), b, t, h);
    });
    x.input[kAngleState].for_each([&](int64_t u, int64_t h, int64_t i, int64_t) {
        x.input[kAngleState].set(fmod(fabs(4 * x.input[kAngleState].get(u, h, i)), 2 * kPi), u, h, i);
    });
    for (int64_t i = 0; i < c.batch * c.seqlen; ++i) {
        x.seq_idx.push_back(i == 0 ? 0 : x.seq_idx.back() + (testing::random_below(10) == 0 ? 1 : 0));
    }
    return x;
}

inline void set_strides(const testing::Tensor& tensor, int64_t* first, int64_t* second, int64_t* third) {
    *first = tensor.stride[0];
    *second = tensor.stride[1];
    *third = tensor.stride[2];
}

// Everything but the results. seq_idx and bounds lie where the library can read them.
inline MambaMamba3 parameters(const Mamba3Case& c, Mamba3Data& x, const testing::Memory<int32_t>& seq_idx,
                              const testing::Memory<int32_t>& bounds) {
    MambaMamba3 p;
    memset(&p, 0, sizeof(p));
    p.run.num_threads = 1 + c.turn % 3;
    p.batch = c.batch;
    p.seqlen = c.seqlen;
    p.rank = c.rank;
    p.nheads = c.nheads;
    p.headdim = c.headdim;
    p.ngroups = c.ngroups;
    p.dstate = c.dstate;
    p.nangles = c.nangles;
    p.sequences = c.sequences();
    p.dtype = c.dtype;
    p.adt_dtype = x.input[kAdt].dtype;
    p.dt_dtype = x.input[kDt].dtype;
    p.trap_dtype = x.input[kTrap].dtype;
    p.angle_dtype = x.input[kAngles].dtype;
    p.pairwise = c.pairwise();
    p.angles_of_heads = c.angles_of_heads();
    p.norm_eps = 1e-5f;
    p.q = x.input[kQ].data();
    p.k = x.input[kK].data();
    p.v = x.input[kV].data();
    p.adt = x.input[kAdt].data();
    p.dt = x.input[kDt].data();
    p.trap = x.input[kTrap].data();
    p.q_bias = x.input[kQBias].floats();
    p.k_bias = x.input[kKBias].floats();
    p.angles = x.input[kAngles].data();
    p.D = c.skip() ? x.input[kD].floats() : nullptr;
    p.z = c.gate() ? x.input[kZ].data() : nullptr;
    p.mimo_v = c.mimo_v() ? x.input[kMimoV].floats() : nullptr;
    p.mimo_z = c.mimo_v() && c.gate() ? x.input[kMimoZ].floats() : nullptr;
    p.mimo_out = c.mimo_out() ? x.input[kMimoOut].floats() : nullptr;
    p.norm_weight = c.norm() ? x.input[kNormWeight].floats() : nullptr;
    if (c.has_states()) {
        p.angle_state = x.input[kAngleState].floats();
        p.ssm_state = x.input[kSsmState].floats();
        p.k_state = x.input[kKState].floats();
        p.v_state = x.input[kVState].floats();
    }
    p.seq_idx = c.has_seq_idx() ? seq_idx.data() : nullptr;
    p.cu_seqlens = c.bounds.empty() ? nullptr : bounds.data();
    set_strides(x.input[kQ], &p.q_batch_stride, &p.q_len_stride, &p.q_group_stride);
    p.q_rank_stride = c.ngroups * p.q_group_stride;
    set_strides(x.input[kK], &p.k_batch_stride, &p.k_len_stride, &p.k_group_stride);
    p.k_rank_stride = c.ngroups * p.k_group_stride;
    set_strides(x.input[kV], &p.v_batch_stride, &p.v_len_stride, &p.v_head_stride);
    set_strides(x.input[kAdt], &p.adt_batch_stride, &p.adt_len_stride, &p.adt_head_stride);
    set_strides(x.input[kDt], &p.dt_batch_stride, &p.dt_len_stride, &p.dt_head_stride);
    set_strides(x.input[kTrap], &p.trap_batch_stride, &p.trap_len_stride, &p.trap_head_stride);
    set_strides(x.input[kAngles], &p.angle_batch_stride, &p.angle_len_stride, &p.angle_head_stride);
    set_strides(x.input[kZ], &p.z_batch_stride, &p.z_len_stride, &p.z_head_stride);
    return p;
}

inline void place_out(const Mamba3Case& c, testing::Tensor& out, MambaMamba3* p) {
    p->out = out.data();
    set_strides(out, &p->out_batch_stride, &p->out_len_stride, &p->out_head_stride);
    p->out_rank_stride = c.mimo_out() ? 0 : c.nheads * p->out_head_stride;
}
