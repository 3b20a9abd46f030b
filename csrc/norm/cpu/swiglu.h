// SwiGLU on the CPU, both directions.
#pragma once

#include "norm/cpu/row.h"

namespace mamba {
namespace MAMBA_ISA {

template <typename T>
void swiglu_rows(const MambaSwiglu& p, bool backward, int64_t begin, int64_t end) {
    const int64_t x_begin = p.gate_last ? p.width : 0, y_begin = p.gate_last ? 0 : p.width;
    for (int64_t row = begin; row < end; ++row) {
        const T* xy = row_at<const T>(p.xy, row, p.xy_row_stride, 0);
        const T* dout = backward ? row_at<const T>(p.dout, row, p.dout_row_stride, 0) : nullptr;
        T* dxy = backward ? row_at<T>(p.dxy, row, p.dxy_row_stride, 0) : nullptr;
        T* out = row_at<T>(p.out, row, p.out_row_stride, 0);
        for (int64_t i = 0; i < p.width; i += kLanes) {
            const Vec x = load_row(xy + x_begin, i, p.width), y = load_row(xy + y_begin, i, p.width);
            Vec slope = zero();
            const Vec gate = backward ? silu(x, slope) : silu(x);
            if (out != nullptr) {
                store_row(out, i, p.width, gate * y);
            }
            if (backward) {
                const Vec gradient = load_row(dout, i, p.width);
                store_row(dxy + x_begin, i, p.width, gradient * y * slope);
                store_row(dxy + y_begin, i, p.width, gradient * gate);
            }
        }
    }
}

inline void swiglu(const MambaSwiglu& p, bool backward, int64_t begin, int64_t end) {
    with_type(p.dtype,
              [&](auto type) MAMBA_INLINE_LAMBDA { swiglu_rows<typename decltype(type)::type>(p, backward, begin, end); });
}

inline void swiglu_forward(const MambaSwiglu& p, int64_t begin, int64_t end) {
    swiglu(p, false, begin, end);
}
inline void swiglu_backward(const MambaSwiglu& p, int64_t begin, int64_t end) {
    swiglu(p, true, begin, end);
}

}  // namespace MAMBA_ISA
}  // namespace mamba
