// The element-wise part of the CUDA forward scan: what a lane reads of a tile, and the results.
#pragma once

#include "selective_scan/cuda/forward_tile.cuh"

namespace mamba {

// What exists of a tile, and how it can be read.
struct TileExtent {
    int steps = 0;
    bool whole = false;   // all of the tile's steps, channels and states exist
    bool inside = false;  // see vectors_within
};

// all_exist: the block's channels and each slice's states; neighbours: see inputs_have_neighbours.
template <class Layout>
__device__ __forceinline__ TileExtent tile_extent(const MambaSelectiveScan& p, const ScanBlock& block, int64_t first_step,
                                                  bool all_exist, bool neighbours) {
    TileExtent extent;
    const int64_t left = block.end - first_step;
    extent.steps = Layout::kWhole || left > Layout::kTile ? Layout::kTile : static_cast<int>(left);
    extent.whole = extent.steps == Layout::kTile && all_exist;
    extent.inside = vectors_within<Layout>(first_step, p.seqlen, neighbours);
    return extent;
}

// Asks for a tile's elements to come into the L2 cache.
template <typename T, class Layout>
__device__ __forceinline__ void prefetch_tile(const ElementRows<T, Layout>& rows, const MambaSelectiveScan& p,
                                              const ScanBlock& block, int64_t first_step) {
    const int most = is_reverse<Layout>(p) ? Layout::kVector - 1 : 0;  // then memory's first one must exist
    if (first_step + rows.step + most < block.end) {
        prefetch_elements(rows, rows.u, p.u_dim_stride, place_of<Layout>(p, first_step, Layout::kTile));
        prefetch_elements(rows, rows.delta, p.delta_dim_stride, place_of<Layout>(p, first_step, Layout::kTile));
    }
}

// y becomes y + D u, times silu(z). other: u, whose registers z takes.
template <typename T, class Layout>
__device__ __forceinline__ void skip_and_gate(float (&y)[Layout::kVector], float (&other)[Layout::kVector], float D,
                                              const TileElements<T, Layout>& z, int pass, bool skips, bool gated) {
#pragma unroll
    for (int i = 0; i < Layout::kVector; ++i) {
        y[i] = skips ? fmaf(D, other[i], y[i]) : y[i];
    }
    if (gated) {
        z.read(other, pass);
#pragma unroll
        for (int i = 0; i < Layout::kVector; ++i) {
            y[i] *= silu(other[i]);
        }
    }
}

// A tile's elements on their way into registers. place: the tile's in a row of memory.
template <typename T, class Layout, bool kCarryOnly>
struct ForwardInputs {
    StagedTile<T, Layout> B, C;
    TileElements<T, Layout> u, delta, z;

    // All but z, which fetch_gate fetches.
    __device__ __forceinline__ void fetch(const MambaSelectiveScan& p, const ElementRows<T, Layout>& rows,
                                          const MatrixRows<T, Layout>& matrix_rows, int64_t place, const TileExtent& extent,
                                          bool aligned) {
        with_access<Layout>(aligned, extent.whole, extent.inside, [&](auto access) {
            delta.template fetch<decltype(access)::kAccess>(rows, rows.delta, p.delta_dim_stride, place, extent.steps);
            u.template fetch<decltype(access)::kAccess>(rows, rows.u, p.u_dim_stride, place, extent.steps);
            fetch_BC<decltype(access)::kAccess>(B, C, p, matrix_rows, 0, place, extent.steps, true, !kCarryOnly);
        });
    }
    // B and C of a later slice.
    __device__ __forceinline__ void fetch_slice(const MambaSelectiveScan& p, const MatrixRows<T, Layout>& matrix_rows,
                                                int first_state, int64_t place, const TileExtent& extent, bool aligned) {
        with_access<Layout>(aligned, extent.whole, extent.inside, [&](auto access) {
            fetch_BC<decltype(access)::kAccess>(B, C, p, matrix_rows, first_state, place, extent.steps);
        });
    }
    __device__ __forceinline__ void fetch_gate(const MambaSelectiveScan& p, const ElementRows<T, Layout>& rows, int64_t place,
                                               const TileExtent& extent, bool aligned) {
        with_access<Layout>(aligned, extent.whole, extent.inside, [&](auto access) {
            z.template fetch<decltype(access)::kAccess>(rows, rows.z, p.z_dim_stride, place, extent.steps);
        });
    }

    // dt and dt * u of the warp's own rows. Steps past the end get dt = 0 and x = 0, which leaves the state as it is.
    __device__ __forceinline__ void stage(ForwardShared<T, Layout, kCarryOnly>& tile, const float* bias,
                                          const ElementRows<T, Layout>& rows, const MambaSelectiveScan& p, int steps) {
        if (is_reverse<Layout>(p)) {
            delta.mirror();
            u.mirror();
        }
#pragma unroll
        for (int pass = 0; pass < Layout::kPasses; ++pass) {
            const int at = rows.row(pass) * Layout::kRow + rows.step;
            float dt[Layout::kVector], x[Layout::kVector];
            delta.read(dt, pass);
            u.read(x, pass);
            time_steps<T>(dt, bias[rows.row(pass)], has_softplus<Layout>(p), rows.valid_steps(steps));
#pragma unroll
            for (int i = 0; i < Layout::kVector; ++i) {
                x[i] *= dt[i];
            }
            write_row(tile.dt + at, dt);
            write_row(tile.x + at, x);
        }
    }

    // The results, of sums over states that other lanes of the warp have stored.
    __device__ __forceinline__ void finish(const ForwardShared<T, Layout, kCarryOnly>& tile, const float* D,
                                           const ElementRows<T, Layout>& rows, const MambaSelectiveScan& p, T* out,
                                           int64_t place, int steps, bool aligned) {
        const bool gated = is_gated<Layout>(p);
        __syncwarp();
        if (gated && is_reverse<Layout>(p)) {
            z.mirror();
        }
#pragma unroll
        for (int pass = 0; pass < Layout::kPasses; ++pass) {
            const float skip = D[rows.row(pass)];
            float y[Layout::kVector], other[Layout::kVector];
            read_row(y, tile.y + rows.row(pass) * Layout::kRow + rows.step);
            u.read(other, pass);
            skip_and_gate(y, other, skip, z, pass, Layout::kMamba || p.D != nullptr, gated);
            T* const to = out + place + pass * Layout::kPassRows * p.out_dim_stride;
            if (adds<Layout>(p)) {
                add_steps<T, Layout::kVector>(to, rows.valid(pass, steps), Layout::kWhole || aligned, rows.reverse, y);
            }
            store_steps<T, Layout::kVector>(to, rows.valid(pass, steps), Layout::kWhole || aligned, rows.reverse, y);
        }
    }
};

}  // namespace mamba
