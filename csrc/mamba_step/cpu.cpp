// mamba_step of mamba_cpu: the convolution's update, the two projections and the state's update, one after the other, on rows
// of floats.
#include "linear/cpu.h"
#include "causal_conv1d/cpu_step.h"
#include "mamba_step/check.h"
#include "mamba_step/cpu/kernels.h"

namespace mamba {
namespace {

// Where the step's parts lie in the scratch memory.
struct StepScratch {
    float *xz, *x, *projected, *dt, *out, *A;  // x (B, D): behind the convolution
};

// A projection of one part of the scratch memory to another, for all of the batch.
Projection projection_of(const MambaMambaStep& p, const void* weight, const float* x, int64_t features, int64_t x_stride,
                         float* out, int64_t outputs) {
    Projection projection = {};
    projection.weight = weight;
    projection.x = x;
    projection.out = out;
    projection.rows = p.batch;
    projection.features = features;
    projection.outputs = projection.out_stride = outputs;
    projection.x_stride = x_stride;
    projection.weight_dtype = p.dtype;
    projection.x_dtype = projection.out_dtype = MAMBA_FLOAT32;
    return projection;
}

int32_t update_state(const MambaMambaStep& p, const StepScratch& scratch) {
    const int64_t outputs = p.dt_rank + 2 * p.dstate;
    MambaSelectiveStateUpdate update = {};
    update.run = p.run;
    update.batch = p.batch;
    update.seqlen = 1;
    update.nheads = update.ngroups = 1;
    update.headdim = p.dim;
    update.dstate = p.dstate;
    update.state_dtype = p.state_dtype;
    update.x_dtype = update.dt_dtype = update.A_dtype = update.BC_dtype = MAMBA_FLOAT32;
    update.D_dtype = p.D_dtype;
    update.dt_bias_dtype = p.dt_bias_dtype;
    update.dt_softplus = 1;
    update.state = p.state;
    update.x = scratch.x;
    update.dt = scratch.dt;
    update.A = scratch.A;
    update.B = scratch.projected + p.dt_rank;
    update.C = scratch.projected + p.dt_rank + p.dstate;
    update.D = p.D;
    update.z = scratch.xz + p.dim;
    update.dt_bias = p.dt_bias;
    update.out = scratch.out;
    update.state_rows = p.batch;
    update.state_row_stride = p.state_batch_stride;
    update.state_dim_stride = p.state_dim_stride;
    update.state_dstate_stride = p.state_dstate_stride;
    update.x_batch_stride = update.dt_batch_stride = p.dim;
    update.x_dim_stride = update.dt_dim_stride = update.z_dim_stride = update.out_dim_stride = 1;
    update.A_dim_stride = p.dstate;
    update.A_dstate_stride = update.B_dstate_stride = update.C_dstate_stride = 1;
    update.B_batch_stride = update.C_batch_stride = outputs;
    update.D_dim_stride = update.dt_bias_dim_stride = 1;
    update.z_batch_stride = 2 * p.dim;
    update.out_batch_stride = p.dim;
    return mamba_selective_state_update(&update);
}

int32_t no_memory(const char* function, const MambaMambaStep& p) {
    return fail(MAMBA_ERROR_MEMORY, "%s: no memory for a step of batch=%lld", function, static_cast<long long>(p.batch));
}

}  // namespace
}  // namespace mamba

using namespace mamba;

int64_t mamba_mamba_step_workspace(const MambaMambaStep* /*params*/) {
    return 0;
}

int32_t mamba_mamba_step(const MambaMambaStep* params) {
    const char* const function = "mamba_step";
    int32_t status = check_mamba_step(function, params);
    if (status != MAMBA_OK || mamba_step_is_empty(*params)) {
        return status;
    }
    Isa isa;
    status = begin_call(function, params->run, &isa);
    if (status != MAMBA_OK) {
        return status;
    }
    const MambaMambaStep& p = *params;
    const int64_t channels = p.batch * p.dim, outputs = p.dt_rank + 2 * p.dstate;
    const Scratch memory(5 * channels + p.batch * outputs + p.dim * p.dstate);
    if (memory.get() == nullptr) {
        return no_memory(function, p);
    }
    StepScratch scratch;
    scratch.xz = memory.get();
    scratch.x = scratch.xz + 2 * channels;
    scratch.dt = scratch.x + channels;
    scratch.out = scratch.dt + channels;
    scratch.projected = scratch.out + channels;
    scratch.A = scratch.projected + p.batch * outputs;
    const MambaStepKernels& kernels =
        kernels_of(isa, generic::mamba_step_kernels, avx2::mamba_step_kernels, avx512::mamba_step_kernels);
    kernels.begin(p, scratch.xz, scratch.A);
    status = step_convolution(p, p.dim, scratch.xz, 2 * p.dim, scratch.x, p.dim);
    if (status != MAMBA_OK) {
        return status;
    }
    Projection x_proj = projection_of(p, p.x_proj_weight, scratch.x, p.dim, p.dim, scratch.projected, outputs);
    const Projection dt_proj = projection_of(p, p.dt_proj_weight, scratch.projected, p.dt_rank, outputs, scratch.dt, p.dim);
    if (p.x_proj_scales != nullptr) {
        x_proj.weight_dtype = MAMBA_INT8;
        x_proj.scales = p.x_proj_scales;
    }
    if (!run_projection(p.run, isa, x_proj) || !run_projection(p.run, isa, dt_proj)) {
        return no_memory(function, p);
    }
    status = update_state(p, scratch);
    if (status == MAMBA_OK) {
        kernels.end(p, scratch.out);
    }
    return status;
}
