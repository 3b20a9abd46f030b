// The element-wise part of the CUDA backward scan: what a lane reads of a tile, and the gradients of u, delta and z.
#pragma once

#include "selective_scan/cuda/backward_tile.cuh"

namespace mamba {

// Where the elements of a lane lie in the tensors, in a tile that begins at step 0.
template <typename T, class Layout>
struct BackwardRows {
    const T* u[Layout::kPasses];
    const T* delta[Layout::kPasses];
    const T* dout[Layout::kPasses];
    const T* z[Layout::kPasses];
    bool exists[Layout::kPasses];
    int64_t channel[Layout::kPasses];
    int tile_row[Layout::kPasses];  // row in the block's tiles
    int step;                       // first step of the lane in a tile
};

template <typename T, class Layout>
__device__ __forceinline__ BackwardRows<T, Layout> backward_rows(const MambaSelectiveScanBackward& q, const ScanBlock& block) {
    const MambaSelectiveScan& p = q.forward;
    const int lane = threadIdx.x % 32;
    BackwardRows<T, Layout> rows;
    rows.step = lane % Layout::kRowLanes * Layout::kVector;
#pragma unroll
    for (int pass = 0; pass < Layout::kPasses; ++pass) {
        const int row = threadIdx.x / 32 * Layout::kWarpChannels + pass * Layout::kPassRows + lane / Layout::kRowLanes;
        const int64_t channel = block.first_channel + (row < block.channels ? row : 0);
        rows.tile_row[pass] = row;
        rows.channel[pass] = channel;
        rows.exists[pass] = row < block.channels;
        rows.u[pass] = static_cast<const T*>(p.u) + block.batch * p.u_batch_stride + channel * p.u_dim_stride + rows.step;
        rows.delta[pass] =
            static_cast<const T*>(p.delta) + block.batch * p.delta_batch_stride + channel * p.delta_dim_stride + rows.step;
        rows.dout[pass] =
            static_cast<const T*>(q.dout) + block.batch * q.dout_batch_stride + channel * q.dout_dim_stride + rows.step;
        rows.z[pass] = static_cast<const T*>(p.z) + block.batch * p.z_batch_stride + channel * p.z_dim_stride + rows.step;
    }
    return rows;
}

// What a lane reads of one tile.
template <typename T, class Layout>
struct BackwardInputs {
    Packed<T, Layout::kVector> u[Layout::kPasses];
    Packed<T, Layout::kVector> delta[Layout::kPasses];
    Packed<T, Layout::kVector> dout[Layout::kPasses];
    Packed<T, Layout::kVector> z[Layout::kPasses];
};

template <typename T, class Layout, bool kAligned>
__device__ __forceinline__ void fetch_inputs(BackwardInputs<T, Layout>& in, const BackwardRows<T, Layout>& rows,
                                             int64_t first_step, int steps, bool with_z) {
    int valid[Layout::kPasses];
#pragma unroll
    for (int pass = 0; pass < Layout::kPasses; ++pass) {
        valid[pass] = rows.exists[pass] ? steps - rows.step : 0;
    }
    fetch_rows<T, Layout, kAligned>(in.u, rows.u, first_step, valid);
    fetch_rows<T, Layout, kAligned>(in.delta, rows.delta, first_step, valid);
    fetch_rows<T, Layout, kAligned>(in.dout, rows.dout, first_step, valid);
    if (with_z) {
        fetch_rows<T, Layout, kAligned>(in.z, rows.z, first_step, valid);
    }
}

// Asks for the whole tile at `first_step` to come into the L2 cache.
template <typename T, class Layout>
__device__ __forceinline__ void prefetch_inputs(const BackwardRows<T, Layout>& rows, int64_t first_step, bool with_z) {
#pragma unroll
    for (int pass = 0; pass < Layout::kPasses; ++pass) {
        if (rows.exists[pass]) {
            prefetch_to_L2(rows.u[pass] + first_step);
            prefetch_to_L2(rows.delta[pass] + first_step);
            prefetch_to_L2(rows.dout[pass] + first_step);
            if (with_z) {
                prefetch_to_L2(rows.z[pass] + first_step);
            }
        }
    }
}

// dt and dy = dout silu(z) of the lane's elements; zero past the end, which leaves state and gradient as they are.
template <typename T, class Layout>
__device__ __forceinline__ void stage_time_and_gradient(float* dt_tile, float* dy_tile, const BackwardInputs<T, Layout>& in,
                                                        const BackwardRows<T, Layout>& rows, const MambaSelectiveScan& p,
                                                        int steps) {
#pragma unroll
    for (int pass = 0; pass < Layout::kPasses; ++pass) {
        const int at = rows.tile_row[pass] * Layout::kRow + rows.step;
        const float bias = p.delta_bias != nullptr ? p.delta_bias[rows.channel[pass]] : 0.0f;
        float dt[Layout::kVector], dy[Layout::kVector];
        unpack<T, Layout::kVector>(in.delta[pass], dt);
        unpack<T, Layout::kVector>(in.dout[pass], dy);
        time_steps(dt, bias, p.delta_softplus, steps - rows.step);
        if (p.z != nullptr) {
            float z[Layout::kVector];
            unpack<T, Layout::kVector>(in.z[pass], z);
#pragma unroll
            for (int i = 0; i < Layout::kVector; ++i) {
                dy[i] *= silu(z[i]);
            }
        }
        write_row(dt_tile + at, dt);
        write_row(dy_tile + at, dy);
    }
}

// dt * u of the lane's elements.
template <typename T, class Layout>
__device__ __forceinline__ void stage_input(float* x_tile, const float* dt_tile, const BackwardInputs<T, Layout>& in,
                                            const BackwardRows<T, Layout>& rows) {
#pragma unroll
    for (int pass = 0; pass < Layout::kPasses; ++pass) {
        const int at = rows.tile_row[pass] * Layout::kRow + rows.step;
        float dt[Layout::kVector], x[Layout::kVector];
        read_row(dt, dt_tile + at);
        unpack<T, Layout::kVector>(in.u[pass], x);
#pragma unroll
        for (int i = 0; i < Layout::kVector; ++i) {
            x[i] *= dt[i];
        }
        write_row(x_tile + at, x);
    }
}

// The gradients of u, delta and z, and out again where it is asked for. The inputs were read again for this: they are in the
// cache, and registers are scarce while the states run.
template <typename T, class Layout, class Shared>
__device__ __forceinline__ void store_gradients(const MambaSelectiveScanBackward& q, const Shared& shared,
                                                const BackwardInputs<T, Layout>& in, const BackwardRows<T, Layout>& rows,
                                                const ScanBlock& block, int64_t first_step, int steps, bool aligned,
                                                float (&bias_sum)[Layout::kPasses], float (&D_sum)[Layout::kPasses]) {
    const MambaSelectiveScan& p = q.forward;
#pragma unroll
    for (int pass = 0; pass < Layout::kPasses; ++pass) {
        const int at = rows.tile_row[pass] * Layout::kRow + rows.step;
        const int valid = rows.exists[pass] ? steps - rows.step : 0;
        const int64_t channel = rows.channel[pass];
        const int64_t step = first_step + rows.step;
        const float bias = p.delta_bias != nullptr ? p.delta_bias[channel] : 0.0f;
        const float D = p.D != nullptr ? p.D[channel] : 0.0f;
        float u[Layout::kVector], dt[Layout::kVector], dy[Layout::kVector], Bg[Layout::kVector], Aq[Layout::kVector];
        unpack<T, Layout::kVector>(in.u[pass], u);
        read_row(dt, shared.dt + at);
        read_row(dy, shared.dy + at);
        read_row(Bg, shared.Bg + at);
        read_row(Aq, shared.Aq + at);
        float du[Layout::kVector], ddelta[Layout::kVector];
#pragma unroll
        for (int i = 0; i < Layout::kVector; ++i) {
            du[i] = fmaf(dt[i], Bg[i], D * dy[i]);
            ddelta[i] = fmaf(u[i], Bg[i], Aq[i] * kLn2);
            D_sum[pass] = fmaf(dy[i], u[i], D_sum[pass]);
        }
        if (p.delta_softplus) {
            float raw[Layout::kVector];
            unpack<T, Layout::kVector>(in.delta[pass], raw);
#pragma unroll
            for (int i = 0; i < Layout::kVector; ++i) {
                ddelta[i] *= sigmoid(raw[i] + bias);
            }
        }
#pragma unroll
        for (int i = 0; i < Layout::kVector; ++i) {
            bias_sum[pass] += i < valid ? ddelta[i] : 0.0f;
        }
        T* du_row = static_cast<T*>(q.du) + block.batch * q.du_batch_stride + channel * q.du_dim_stride;
        store_steps<T, Layout::kVector>(du_row + step, valid, aligned, du);
        T* ddelta_row = static_cast<T*>(q.ddelta) + block.batch * q.ddelta_batch_stride + channel * q.ddelta_dim_stride;
        store_steps<T, Layout::kVector>(ddelta_row + step, valid, aligned, ddelta);
        if (p.z == nullptr && p.out == nullptr) {
            continue;
        }
        float y[Layout::kVector];
        read_row(y, shared.y + at);
#pragma unroll
        for (int i = 0; i < Layout::kVector; ++i) {
            y[i] = fmaf(D, u[i], y[i]);
        }
        if (p.z != nullptr) {
            float z[Layout::kVector], dz[Layout::kVector];
            unpack<T, Layout::kVector>(in.z[pass], z);
            unpack<T, Layout::kVector>(in.dout[pass], dz);
#pragma unroll
            for (int i = 0; i < Layout::kVector; ++i) {
                const float gate = sigmoid(z[i]);
                dz[i] *= y[i] * gate * fmaf(z[i], 1.0f - gate, 1.0f);
                y[i] *= z[i] * gate;
            }
            T* dz_row = static_cast<T*>(q.dz) + block.batch * q.dz_batch_stride + channel * q.dz_dim_stride;
            store_steps<T, Layout::kVector>(dz_row + step, valid, aligned, dz);
        }
        if (p.out != nullptr) {
            T* out_row = static_cast<T*>(p.out) + block.batch * p.out_batch_stride + channel * p.out_dim_stride;
            store_steps<T, Layout::kVector>(out_row + step, valid, aligned, y);
        }
    }
}

}  // namespace mamba
