// What comes behind the scan, row by row: D, norm, gate and output projection, and their gradients.
#pragma once

#include <math.h>

#include "mamba3/cpu/chunk.h"

namespace mamba {
namespace MAMBA_ISA {
namespace mamba3 {

inline int64_t z_offset(const MambaMamba3& p, const Chunk& chunk, int64_t head) {
    return chunk.row * p.z_batch_stride + chunk.start * p.z_len_stride + head * p.z_head_stride;
}

// 1 / rms of a row.
inline float row_rstd(const MambaMamba3& p, const float* row) {
    Vec squares = zero();
    for (int64_t column = 0; column < p.headdim; column += kLanes) {
        const Vec value = load(row + column);
        squares = fma(value, value, squares);
    }
    const double mean = static_cast<double>(sum(squares)) / static_cast<double>(p.headdim);
    return static_cast<float>(1.0 / ::sqrt(mean + static_cast<double>(p.norm_eps)));
}

// y: the scan's rows, overwritten by those of out: one a step with mimo_out. z: the chunk's steps.
inline void finish_rows(const MambaMamba3& p, const Mamba3Layout& layout, const Parameters& parameters, int steps,
                        const float* x, const float* z, float* y) {
    const int64_t pitch = layout.pitch_P;
    for (int step = 0; step < steps; ++step) {
        for (int64_t r = 0; r < p.rank; ++r) {
            const int64_t row = (step * p.rank + r) * pitch;
            const Vec D = set1(parameters.D);
            for (int64_t column = 0; column < p.headdim && p.D != nullptr; column += kLanes) {
                store(y + row + column, fma(D, load(x + row + column), load(y + row + column)));
            }
            const Vec rstd = set1(parameters.norm_weight != nullptr ? row_rstd(p, y + row) : 1.0f);
            for (int64_t column = 0; column < p.headdim; column += kLanes) {
                Vec value = load(y + row + column);
                if (parameters.norm_weight != nullptr) {
                    value = value * rstd * load(parameters.norm_weight + column);
                }
                if (p.z != nullptr) {
                    Vec gate = load(z + step * pitch + column);
                    if (parameters.mimo_z != nullptr) {
                        gate = gate * load(parameters.mimo_z + r * pitch + column);
                    }
                    value = value * (gate * sigmoid(gate));
                }
                float* to = y + row + column;
                if (parameters.mimo_out != nullptr) {
                    to = y + step * pitch + column;  // never ahead of the row that is read
                    value = value * load(parameters.mimo_out + r * pitch + column);
                    value = r > 0 ? value + load(to) : value;
                }
                store(to, value);
            }
        }
    }
}

// Sums of a head's parameters' gradients, in tiles as Parameters.
struct ParameterSums {
    float *q_bias, *k_bias;
    float *mimo_v, *mimo_z, *mimo_out;
    float* norm_weight;
    float* D;
};

inline ParameterSums carve_sums(const MambaMamba3& p, const Mamba3Layout& layout, Carver& carver) {
    ParameterSums s;
    const Parameters tiles = carve_parameters(p, layout, carver);
    s.q_bias = tiles.q_bias;
    s.k_bias = tiles.k_bias;
    s.mimo_v = tiles.mimo_v;
    s.mimo_z = tiles.mimo_z;
    s.mimo_out = tiles.mimo_out;
    s.norm_weight = tiles.norm_weight;
    s.D = carver.take(1);
    return s;
}

inline int64_t sum_floats(const MambaMamba3& p, const Mamba3Layout& layout) {
    Carver carver = {nullptr, 0};
    carve_sums(p, layout, carver);
    return carver.used;
}

// Whether the gradients need the scan's rows again.
inline bool needs_rows(const MambaMamba3& p) {
    return p.z != nullptr || p.norm_weight != nullptr || p.mimo_out != nullptr;
}

// From dout, one row a step with mimo_out, the gradient of the scan's rows, D's part in: dy. y: the scan's rows, if they are
// needed; D x is added to them. dz: the chunk's steps, written.
inline void finish_rows_backward(const MambaMamba3& p, const Mamba3Layout& layout, const Parameters& parameters, int steps,
                                 const float* x, const float* z, float* y, const float* dout, float* dy, float* dz,
                                 const ParameterSums& sums) {
    const int64_t pitch = layout.pitch_P;
    Vec dD = zero();
    for (int step = 0; step < steps; ++step) {
        for (int64_t r = 0; r < p.rank; ++r) {
            const int64_t row = (step * p.rank + r) * pitch;
            const float* gradient = parameters.mimo_out != nullptr ? dout + step * pitch : dout + row;
            const Vec D = set1(parameters.D);
            for (int64_t column = 0; column < p.headdim && p.D != nullptr && needs_rows(p); column += kLanes) {
                store(y + row + column, fma(D, load(x + row + column), load(y + row + column)));
            }
            const float root = parameters.norm_weight != nullptr ? row_rstd(p, y + row) : 1.0f;
            const Vec rstd = set1(root);
            Vec projected = zero();  // gradient of the normed row times the row
            for (int64_t column = 0; column < p.headdim; column += kLanes) {
                Vec d = load(gradient + column);
                if (needs_rows(p)) {
                    const Vec plain = load(y + row + column);
                    Vec value = plain;
                    if (parameters.norm_weight != nullptr) {
                        value = value * rstd * load(parameters.norm_weight + column);
                    }
                    Vec gate = set1(1.0f), before = zero(), slope = zero(), weight = set1(1.0f);
                    if (p.z != nullptr) {
                        before = load(z + step * pitch + column);
                        weight = parameters.mimo_z != nullptr ? load(parameters.mimo_z + r * pitch + column) : weight;
                        const Vec argument = before * weight, part = sigmoid(argument);
                        gate = argument * part;
                        slope = part * (set1(1.0f) + argument * (set1(1.0f) - part));
                    }
                    if (parameters.mimo_out != nullptr) {
                        float* total = sums.mimo_out + r * pitch + column;
                        store(total, fma(d, value * gate, load(total)));
                        d = d * load(parameters.mimo_out + r * pitch + column);
                    }
                    if (p.z != nullptr) {
                        const Vec dgate = d * value * slope;
                        float* total = dz + step * pitch + column;
                        store(total, r > 0 ? fma(dgate, weight, load(total)) : dgate * weight);
                        if (parameters.mimo_z != nullptr) {
                            float* sum_z = sums.mimo_z + r * pitch + column;
                            store(sum_z, fma(dgate, before, load(sum_z)));
                        }
                        d = d * gate;
                    }
                    if (parameters.norm_weight != nullptr) {
                        float* total = sums.norm_weight + column;
                        store(total, fma(d, plain * rstd, load(total)));
                        d = d * load(parameters.norm_weight + column);
                        projected = fma(d, plain, projected);
                    }
                }
                store(dy + row + column, d);
            }
            if (parameters.norm_weight != nullptr) {
                const double mean = static_cast<double>(sum(projected)) / static_cast<double>(p.headdim);
                const Vec share = set1(static_cast<float>(mean * static_cast<double>(root) * static_cast<double>(root)));
                for (int64_t column = 0; column < p.headdim; column += kLanes) {
                    store(dy + row + column, rstd * (load(dy + row + column) - load(y + row + column) * share));
                }
            }
            for (int64_t column = 0; column < p.headdim && p.D != nullptr; column += kLanes) {
                dD = fma(load(dy + row + column), load(x + row + column), dD);
            }
        }
    }
    *sums.D += sum(dD);
}

}  // namespace mamba3
}  // namespace MAMBA_ISA
}  // namespace mamba
