// The element-wise part of the CUDA backward scan: what a lane reads of a tile, and the gradients of u, delta and z.
#pragma once

#include "selective_scan/cuda/backward_tile.cuh"
#include "selective_scan/parts.h"

namespace mamba {

// Where the elements of a lane lie, also in dout.
template <typename T, class Layout>
struct BackwardRows : ElementRows<T, Layout> {
    const T* dout;

    __device__ __forceinline__ BackwardRows(const ScanBackward& q, const ScanBlock& block)
        : ElementRows<T, Layout>(q.forward, block) {
        dout = this->at(static_cast<const T*>(q.dout), block, q.dout_batch_stride, q.dout_dim_stride);
    }
};

// What a lane reads of one tile.
template <typename T, class Layout>
struct BackwardInputs {
    TileElements<T, Layout> u, delta, dout, z;

    template <Access kAccess>
    __device__ __forceinline__ void fetch(const BackwardRows<T, Layout>& rows, const ScanBackward& q, int64_t tile, int steps) {
        const MambaSelectiveScan& p = q.forward;
        u.template fetch<kAccess>(rows, rows.u, p.u_dim_stride, tile, steps);
        delta.template fetch<kAccess>(rows, rows.delta, p.delta_dim_stride, tile, steps);
        dout.template fetch<kAccess>(rows, rows.dout, q.dout_dim_stride, tile, steps);
        if (is_gated<Layout>(p)) {
            z.template fetch<kAccess>(rows, rows.z, p.z_dim_stride, tile, steps);
        }
    }
    __device__ __forceinline__ void mirror(bool gated) {
        u.mirror();
        delta.mirror();
        dout.mirror();
        if (gated) {
            z.mirror();
        }
    }
};

// Asks for the whole tile at that place to come into the L2 cache.
template <typename T, class Layout>
__device__ __forceinline__ void prefetch_inputs(const BackwardRows<T, Layout>& rows, const ScanBackward& q, int64_t tile) {
    const MambaSelectiveScan& p = q.forward;
    prefetch_elements(rows, rows.u, p.u_dim_stride, tile);
    prefetch_elements(rows, rows.delta, p.delta_dim_stride, tile);
    prefetch_elements(rows, rows.dout, q.dout_dim_stride, tile);
    if (is_gated<Layout>(p)) {
        prefetch_elements(rows, rows.z, p.z_dim_stride, tile);
    }
}

// The same for what out and dz hold, where they are added to. The addresses begin with an opaque number: found earlier, they
// would be spilled while the states run.
template <typename T, class Layout>
__device__ __forceinline__ void prefetch_sums(const BackwardRows<T, Layout>& rows, const ScanBackward& q,
                                              const ScanBlock& block, int64_t tile) {
    const MambaSelectiveScan& p = q.forward;
    const int64_t channel = opaque(static_cast<int>(rows.first_channel));
    const int64_t at = tile + rows.place;
    const auto prefetch = [&](const void* data, int64_t batch_stride, int64_t dim_stride) {
        if (data != nullptr) {
            prefetch_elements(rows, static_cast<const T*>(data) + block.batch * batch_stride + channel * dim_stride, dim_stride,
                              at);
        }
    };
    prefetch(p.out, p.out_batch_stride, p.out_dim_stride);
    prefetch(q.dz, q.dz_batch_stride, q.dz_dim_stride);
}

// dt and dy = dout silu(z) of the lane's elements; zero past the end, which leaves state and gradient as they are.
template <typename T, class Layout>
__device__ __forceinline__ void stage_time_and_gradient(float* dt_tile, float* dy_tile, const float* bias,
                                                        const BackwardInputs<T, Layout>& in,
                                                        const BackwardRows<T, Layout>& rows, const MambaSelectiveScan& p,
                                                        int steps) {
#pragma unroll
    for (int pass = 0; pass < Layout::kPasses; ++pass) {
        const int at = rows.row(pass) * Layout::kRow + rows.step;
        float dt[Layout::kVector], dy[Layout::kVector];
        in.delta.read(dt, pass);
        in.dout.read(dy, pass);
        time_steps<T>(dt, bias[rows.row(pass)], has_softplus<Layout>(p), rows.valid_steps(steps));
        if (is_gated<Layout>(p)) {
            float z[Layout::kVector];
            in.z.read(z, pass);
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
        const int at = rows.row(pass) * Layout::kRow + rows.step;
        float dt[Layout::kVector], x[Layout::kVector];
        read_row(dt, dt_tile + at);
        in.u.read(x, pass);
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
__device__ __forceinline__ void store_gradients(const ScanBackward& q, Shared& shared, const BackwardInputs<T, Layout>& in,
                                                const BackwardRows<T, Layout>& rows, const ScanBlock& block, int64_t tile,
                                                int steps, bool aligned) {
    const MambaSelectiveScan& p = q.forward;
#pragma unroll
    for (int pass = 0; pass < Layout::kPasses; ++pass) {
        const int at = rows.row(pass) * Layout::kRow + rows.step;
        const int valid = rows.valid(pass, steps);
        const int64_t channel = rows.channel(pass);
        const int64_t place = tile + rows.place;
        const float bias = shared.bias[rows.row(pass)];
        const float D = shared.D[rows.row(pass)];
        float u[Layout::kVector], dt[Layout::kVector], dy[Layout::kVector], Bg[Layout::kVector], Aq[Layout::kVector];
        in.u.read(u, pass);
        read_row(dt, shared.dt + at);
        read_row(dy, shared.dy + at);
        read_row(Bg, shared.Bg() + at);
        read_row(Aq, shared.Aq + at);
        float du[Layout::kVector], ddelta[Layout::kVector];
        float bias_sum = shared.bias_sum[pass][threadIdx.x];
        float D_sum = shared.D_sum[pass][threadIdx.x];
#pragma unroll
        for (int i = 0; i < Layout::kVector; ++i) {
            du[i] = fmaf(dt[i], Bg[i], D * dy[i]);
            ddelta[i] = fmaf(u[i], Bg[i], Aq[i] * kLn2);
            D_sum = fmaf(dy[i], u[i], D_sum);
        }
        if (has_softplus<Layout>(p)) {
            float raw[Layout::kVector];
            in.delta.read(raw, pass);
#pragma unroll
            for (int i = 0; i < Layout::kVector; ++i) {
                ddelta[i] *= sigmoid(raw[i] + bias);
            }
        }
        if (valid < Layout::kVector) {
#pragma unroll
            for (int i = 0; i < Layout::kVector; ++i) {
                ddelta[i] = i < valid ? ddelta[i] : 0.0f;
            }
        }
#pragma unroll
        for (int i = 0; i < Layout::kVector; ++i) {
            bias_sum += ddelta[i];
        }
        shared.bias_sum[pass][threadIdx.x] = bias_sum;
        shared.D_sum[pass][threadIdx.x] = D_sum;
        T* du_row = static_cast<T*>(q.du) + block.batch * q.du_batch_stride + channel * q.du_dim_stride;
        store_steps<T, Layout::kVector>(du_row + place, valid, Layout::kWhole || aligned, rows.reverse, du);
        T* ddelta_row = static_cast<T*>(q.ddelta) + block.batch * q.ddelta_batch_stride + channel * q.ddelta_dim_stride;
        store_steps<T, Layout::kVector>(ddelta_row + place, valid, Layout::kWhole || aligned, rows.reverse, ddelta);
        if (!is_gated<Layout>(p) && p.out == nullptr) {
            continue;
        }
        float y[Layout::kVector];
        read_row(y, shared.y + at);
#pragma unroll
        for (int i = 0; i < Layout::kVector; ++i) {
            y[i] = fmaf(D, u[i], y[i]);
        }
        if (is_gated<Layout>(p)) {
            float z[Layout::kVector], dz[Layout::kVector];
            in.z.read(z, pass);
            in.dout.read(dz, pass);
#pragma unroll
            for (int i = 0; i < Layout::kVector; ++i) {
                const float gate = sigmoid(z[i]);
                dz[i] *= y[i] * gate * fmaf(z[i], 1.0f - gate, 1.0f);
                y[i] *= z[i] * gate;
            }
            T* dz_row = static_cast<T*>(q.dz) + block.batch * q.dz_batch_stride + channel * q.dz_dim_stride;
            if (adds<Layout>(p)) {
                add_steps<T, Layout::kVector>(dz_row + place, valid, Layout::kWhole || aligned, rows.reverse, dz);
            }
            store_steps<T, Layout::kVector>(dz_row + place, valid, Layout::kWhole || aligned, rows.reverse, dz);
        }
        if (p.out != nullptr) {
            T* out_row = static_cast<T*>(p.out) + block.batch * p.out_batch_stride + channel * p.out_dim_stride;
            if (adds<Layout>(p)) {
                add_steps<T, Layout::kVector>(out_row + place, valid, Layout::kWhole || aligned, rows.reverse, y);
            }
            store_steps<T, Layout::kVector>(out_row + place, valid, Layout::kWhole || aligned, rows.reverse, y);
        }
    }
}

}  // namespace mamba
