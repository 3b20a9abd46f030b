// mamba2_step of mamba_cpu: the convolution's update, the state's and the gated norm, one after the other, on rows of floats.
#include "causal_conv1d/cpu_step.h"
#include "common/cpu_runtime.h"
#include "mamba2_step/check.h"
#include "mamba2_step/cpu/kernels.h"

namespace mamba {
namespace {

// Where the step's parts lie in the scratch memory: zxBCdt (B, ...), x, B and C behind the convolution (B, I), the output (B, H
// P).
struct Mamba2StepScratch {
    float *zxBCdt, *conv, *out, *A;
    int64_t columns, conv_columns, out_columns;
};

int32_t update_state(const MambaMamba2Step& p, const Mamba2StepScratch& scratch) {
    const int64_t matrix = p.ngroups * p.dstate;
    MambaSelectiveStateUpdate update = {};
    update.run = p.run;
    update.batch = p.batch;
    update.seqlen = 1;
    update.nheads = p.nheads;
    update.headdim = p.headdim;
    update.dstate = p.dstate;
    update.ngroups = p.ngroups;
    update.state_dtype = p.state_dtype;
    update.x_dtype = update.BC_dtype = update.dt_dtype = update.A_dtype = MAMBA_FLOAT32;
    update.D_dtype = p.D_dtype;
    update.state = p.state;
    update.x = scratch.conv;
    update.dt = scratch.zxBCdt + 2 * (scratch.out_columns + matrix);
    update.A = scratch.A;
    update.B = scratch.conv + scratch.out_columns;
    update.C = scratch.conv + scratch.out_columns + matrix;
    update.D = p.D;
    update.z = p.norm_weight == nullptr && p.gate ? scratch.zxBCdt : nullptr;
    update.out = scratch.out;
    update.state_rows = p.batch;
    update.state_row_stride = p.state_batch_stride;
    update.state_head_stride = p.state_head_stride;
    update.state_dim_stride = p.state_dim_stride;
    update.state_dstate_stride = p.state_dstate_stride;
    update.x_batch_stride = update.B_batch_stride = update.C_batch_stride = scratch.conv_columns;
    update.dt_batch_stride = update.z_batch_stride = scratch.columns;
    update.out_batch_stride = scratch.out_columns;
    update.x_head_stride = update.z_head_stride = update.out_head_stride = p.headdim;
    update.x_dim_stride = update.z_dim_stride = update.out_dim_stride = 1;
    update.dt_head_stride = update.A_head_stride = 1;
    update.B_group_stride = update.C_group_stride = p.dstate;
    update.B_dstate_stride = update.C_dstate_stride = 1;
    update.D_head_stride = p.D_head_stride;
    update.D_dim_stride = p.D_dim_stride;
    return mamba_selective_state_update(&update);
}

int32_t normalise(const MambaMamba2Step& p, const Mamba2StepScratch& scratch) {
    MambaNorm norm = {};
    norm.run = p.run;
    norm.rows = p.batch;
    norm.ngroups = p.ngroups;
    norm.group_size = scratch.out_columns / p.ngroups;
    norm.is_rms_norm = 1;
    norm.norm_before_gate = p.norm_before_gate;
    norm.dtype = norm.other_dtype = MAMBA_FLOAT32;
    norm.weight_dtype = p.norm_weight_dtype;
    norm.eps = p.norm_eps;
    norm.x = norm.out = scratch.out;  // in place
    norm.z = scratch.zxBCdt;
    norm.weight = p.norm_weight;
    norm.x_row_stride = norm.out_row_stride = scratch.out_columns;
    norm.z_row_stride = scratch.columns;
    return mamba_norm_forward(&norm);
}

}  // namespace
}  // namespace mamba

using namespace mamba;

int32_t mamba_mamba2_step(const MambaMamba2Step* params) {
    const char* const function = "mamba2_step";
    int32_t status = check_mamba2_step(function, params);
    if (status != MAMBA_OK || mamba2_step_is_empty(*params)) {
        return status;
    }
    Isa isa;
    status = begin_call(function, params->run, &isa);
    if (status != MAMBA_OK) {
        return status;
    }
    const MambaMamba2Step& p = *params;
    Mamba2StepScratch scratch;
    scratch.out_columns = p.nheads * p.headdim;
    scratch.conv_columns = scratch.out_columns + 2 * p.ngroups * p.dstate;
    scratch.columns = scratch.out_columns + scratch.conv_columns + p.nheads;
    const Scratch memory(p.batch * (scratch.columns + scratch.conv_columns + scratch.out_columns) + p.nheads);
    if (memory.get() == nullptr) {
        return fail(MAMBA_ERROR_MEMORY, "%s: no memory for a step of batch=%lld", function, static_cast<long long>(p.batch));
    }
    scratch.zxBCdt = memory.get();
    scratch.conv = scratch.zxBCdt + p.batch * scratch.columns;
    scratch.out = scratch.conv + p.batch * scratch.conv_columns;
    scratch.A = scratch.out + p.batch * scratch.out_columns;
    const Mamba2StepKernels& kernels =
        kernels_of(isa, generic::mamba2_step_kernels, avx2::mamba2_step_kernels, avx512::mamba2_step_kernels);
    kernels.begin(p, scratch.zxBCdt, scratch.A);
    status = step_convolution(p, scratch.conv_columns, scratch.zxBCdt + scratch.out_columns, scratch.columns, scratch.conv,
                              scratch.conv_columns);
    status = status != MAMBA_OK ? status : update_state(p, scratch);
    status = status != MAMBA_OK || p.norm_weight == nullptr ? status : normalise(p, scratch);
    if (status == MAMBA_OK) {
        kernels.end(p, scratch.out);
    }
    return status;
}
