/* Loads a kernel library as Python's ctypes does, calls it through the C ABI and compares with stored reference values:
 *     self_test.exe FOLDER\mamba_cpu.dll
 *     self_test.exe FOLDER\mamba_cuda.dll     (where there is no GPU: the error that says so is what must come back)
 * Prints one line a check that fails, and the number of checks; returns 0 when all is well. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <windows.h>

#include "mamba_kernels.h"
#include "self_test_values.h"

#define TOLERANCE 2e-5 /* what float32 sums of up to 2800 terms lose, as a part of the largest value of the result */

static HMODULE library;
static int checks, failures;

static void check(int good, const char* what, const char* detail) {
    ++checks;
    if (!good) {
        ++failures;
        printf("FAIL %s: %s\n", what, detail);
    }
}

static void* function(const char* name) {
    void* address = (void*)GetProcAddress(library, name);
    if (address == NULL) {
        printf("FAIL %s is not exported\n", name);
        exit(1);
    }
    return address;
}

static const char* last_error(void) {
    const char* (*call)(void) = function("mamba_last_error");
    return call();
}

/* Calls int32_t name(const void* params). */
static int32_t call(const char* name, const void* params) {
    int32_t (*entry)(const void*) = function(name);
    return entry(params);
}

static void check_call(const char* name, const void* params) {
    const int32_t status = call(name, params);
    check(status == MAMBA_OK, name, status == MAMBA_OK ? "" : last_error());
}

/* ---- values ---------------------------------------------------------------------------------------------------------- */

static float* empty(int64_t count) {
    float* data = malloc(count * sizeof(float));
    if (data == NULL) {
        printf("FAIL out of memory\n");
        exit(1);
    }
    memset(data, 0xff, count * sizeof(float)); /* NaN: an element that is not written is seen */
    return data;
}

/* A workspace: its first address is a multiple of 64. */
static void* aligned(int64_t bytes) {
    const uintptr_t data = (uintptr_t)empty(bytes / 4 + 17);
    return (void*)((data + 63) / 64 * 64);
}

/* The inputs, as reference_values.py makes them. */
static float* made(int64_t seed, int64_t count, double shift) {
    float* data = empty(count);
    for (int64_t i = 0; i < count; ++i) {
        const float value = (float)((double)((i * 7919 + seed * 104729) % 2003) / 1001.0 - 1.0);
        data[i] = (float)(value + shift);
    }
    return data;
}

/* The samples of one result. */
static void expect(const char* name, const float* got, int64_t count, const double* want) {
    double largest = 0, worst = 0;
    char detail[160] = "";
    for (int k = 0; k < SAMPLES; ++k) {
        largest = fmax(largest, fabs(want[k]));
    }
    for (int k = 0; k < SAMPLES; ++k) {
        const int64_t at = k * (count - 1) / (SAMPLES - 1);
        if (!(fabs(got[at] - want[k]) <= TOLERANCE * largest)) {
            snprintf(detail, sizeof(detail), "element %lld is %.9g, expected %.9g", (long long)at, got[at], want[k]);
            worst = 1;
        }
    }
    check(worst == 0, name, detail);
}

/* ---- the operations -------------------------------------------------------------------------------------------------- */

static MambaSelectiveScan scan_problem(int64_t batch, int64_t dim, int64_t length, int64_t groups, int64_t dstate,
                                       int threads) {
    MambaSelectiveScan p;
    memset(&p, 0, sizeof(p));
    p.run.num_threads = threads;
    p.batch = batch, p.dim = dim, p.seqlen = length, p.dstate = dstate, p.ngroups = groups;
    p.dtype = MAMBA_FLOAT32;
    p.delta_softplus = p.variable_B = p.variable_C = 1;
    p.u = made(1, batch * dim * length, 0);
    p.delta = made(2, batch * dim * length, 0);
    p.A = made(3, dim * dstate, -1.5);
    p.B = made(4, batch * groups * dstate * length, 0);
    p.C = made(5, batch * groups * dstate * length, 0);
    p.D = made(6, dim, 0);
    p.z = made(7, batch * dim * length, 0);
    p.delta_bias = made(8, dim, 0);
    p.initial_state = made(9, batch * dim * dstate, 0);
    p.out = empty(batch * dim * length);
    p.last_state = empty(batch * dim * dstate);
    p.checkpoints = empty(batch * ((length - 1) / MAMBA_SCAN_CHECKPOINT + 1) * dim * dstate);
    p.u_dim_stride = p.delta_dim_stride = p.z_dim_stride = p.out_dim_stride = length;
    p.u_batch_stride = p.delta_batch_stride = p.z_batch_stride = p.out_batch_stride = dim * length;
    p.B_dstate_stride = p.C_dstate_stride = length;
    p.B_group_stride = p.C_group_stride = dstate * length;
    p.B_batch_stride = p.C_batch_stride = groups * dstate * length;
    p.segments = 1;
    return p;
}

static void test_scan(void) {
    const int64_t batch = 2, dim = 20, length = 70, groups = 2, dstate = 5;
    int32_t (*plan_scan)(const MambaSelectiveScan*, int32_t, MambaSelectiveScanPlan*) = function("mamba_selective_scan_plan");
    MambaSelectiveScan p = scan_problem(batch, dim, length, groups, dstate, 1);
    MambaSelectiveScanBackward b;
    MambaSelectiveScanPlan plan;
    memset(&plan, 0, sizeof(plan));
    check(plan_scan(&p, 0, &plan) == MAMBA_OK, "mamba_selective_scan_plan", last_error());
    p.segments = plan.forward_segments;
    p.workspace = empty(p.segments * 2 * batch * dim * dstate);
    check_call("mamba_selective_scan_forward", &p);
    expect("scan out", p.out, batch * dim * length, scan_out);
    expect("scan last_state", p.last_state, batch * dim * dstate, scan_last_state);

    memset(&b, 0, sizeof(b));
    b.forward = p;
    b.forward.segments = plan.backward_segments;
    b.forward.workspace = empty(plan.backward_workspace / 4);
    b.dout = made(10, batch * dim * length, 0);
    b.dout_batch_stride = dim * length, b.dout_dim_stride = length;
    b.dlast_state = made(11, batch * dim * dstate, 0);
    b.slots = plan.slots;
    b.du = empty(batch * dim * length);
    b.ddelta = empty(batch * dim * length);
    b.dz = empty(batch * dim * length);
    b.du_batch_stride = b.ddelta_batch_stride = b.dz_batch_stride = dim * length;
    b.du_dim_stride = b.ddelta_dim_stride = b.dz_dim_stride = length;
    b.dB_dstate_stride = b.dC_dstate_stride = length;
    b.dB_group_stride = b.dC_group_stride = dstate * length;
    b.dB_batch_stride = b.dC_batch_stride = groups * dstate * length;
    b.dA = empty(dim * dstate);
    b.dB = empty(batch * groups * dstate * length);
    b.dC = empty(batch * groups * dstate * length);
    b.dD = empty(dim);
    b.ddelta_bias = empty(dim);
    b.dinitial_state = empty(batch * dim * dstate);
    check_call("mamba_selective_scan_backward", &b);
    expect("scan du", b.du, batch * dim * length, scan_du);
    expect("scan ddelta", b.ddelta, batch * dim * length, scan_ddelta);
    expect("scan dz", b.dz, batch * dim * length, scan_dz);
    expect("scan dA", b.dA, dim * dstate, scan_dA);
    expect("scan dB", b.dB, batch * groups * dstate * length, scan_dB);
    expect("scan dC", b.dC, batch * groups * dstate * length, scan_dC);
    expect("scan dD", b.dD, dim, scan_dD);
    expect("scan ddelta_bias", b.ddelta_bias, dim, scan_ddelta_bias);
    expect("scan dinitial_state", b.dinitial_state, batch * dim * dstate, scan_dinitial_state);
}

/* Enough work to start threads: their number changes no bit. */
static void test_threads(void) {
    const int64_t batch = 2, dim = 256, length = 1024, dstate = 16;
    MambaSelectiveScan one = scan_problem(batch, dim, length, 1, dstate, 1), four = one;
    four.run.num_threads = 4;
    four.out = empty(batch * dim * length);
    check_call("mamba_selective_scan_forward", &one);
    check_call("mamba_selective_scan_forward", &four);
    check(memcmp(one.out, four.out, batch * dim * length * sizeof(float)) == 0, "threads", "four give another result than one");
}

static void test_conv(void) {
    const int64_t batch = 2, dim = 20, length = 37, width = 4;
    MambaCausalConv1d p;
    MambaCausalConv1dBackward b;
    MambaCausalConv1dUpdate u;
    int64_t (*workspace_bytes)(const MambaCausalConv1d*) = function("mamba_causal_conv1d_backward_workspace");
    memset(&p, 0, sizeof(p));
    p.run.num_threads = 1;
    p.batch = batch, p.dim = dim, p.seqlen = length, p.width = width, p.silu = 1;
    p.x = made(21, batch * dim * length, 0);
    p.weight = made(22, dim * width, 0);
    p.bias = made(23, dim, 0);
    p.out = empty(batch * dim * length);
    p.x_batch_stride = p.out_batch_stride = dim * length;
    p.x_dim_stride = p.out_dim_stride = length;
    p.x_len_stride = p.out_len_stride = 1;
    check_call("mamba_causal_conv1d_forward", &p);
    expect("conv out", p.out, batch * dim * length, conv_out);

    memset(&b, 0, sizeof(b));
    b.forward = p;
    b.dout = made(24, batch * dim * length, 0);
    b.dx = empty(batch * dim * length);
    b.dout_batch_stride = b.dx_batch_stride = dim * length;
    b.dout_dim_stride = b.dx_dim_stride = length;
    b.dout_len_stride = b.dx_len_stride = 1;
    b.workspace = workspace_bytes(&p) > 0 ? empty(workspace_bytes(&p) / 4) : NULL;
    b.dweight = empty(dim * width);
    b.dbias = empty(dim);
    check_call("mamba_causal_conv1d_backward", &b);
    expect("conv dx", b.dx, batch * dim * length, conv_dx);
    expect("conv dweight", b.dweight, dim * width, conv_dweight);
    expect("conv dbias", b.dbias, dim, conv_dbias);

    memset(&u, 0, sizeof(u));
    u.run.num_threads = 1;
    u.batch = batch, u.dim = dim, u.seqlen = 1, u.state_len = width - 1, u.width = width, u.silu = 1, u.state_rows = batch;
    u.x = made(25, batch * dim, 0);
    u.conv_state = made(26, batch * dim * (width - 1), 0);
    u.weight = p.weight, u.bias = p.bias;
    u.out = empty(batch * dim);
    u.x_batch_stride = u.out_batch_stride = dim;
    u.x_dim_stride = u.x_len_stride = u.out_dim_stride = u.out_len_stride = 1;
    u.state_row_stride = dim * (width - 1), u.state_dim_stride = width - 1, u.state_len_stride = 1;
    check_call("mamba_causal_conv1d_update", &u);
    expect("conv update out", u.out, batch * dim, conv_update_out);
    expect("conv update state", u.conv_state, batch * dim * (width - 1), conv_update_state);
}

static void test_state_update(void) {
    const int64_t batch = 3, heads = 2, headdim = 20, dstate = 16, rows = heads * headdim;
    MambaSelectiveStateUpdate p;
    memset(&p, 0, sizeof(p));
    p.run.num_threads = 1;
    p.batch = batch, p.seqlen = 1, p.nheads = heads, p.headdim = headdim, p.dstate = dstate, p.ngroups = 1;
    p.dt_softplus = 1;
    p.state = made(31, batch * rows * dstate, 0);
    p.x = made(32, batch * rows, 0);
    p.dt = made(33, batch * rows, 0);
    p.A = made(34, rows * dstate, -1.5);
    p.B = made(35, batch * dstate, 0);
    p.C = made(36, batch * dstate, 0);
    p.D = made(37, rows, 0);
    p.z = made(38, batch * rows, 0);
    p.dt_bias = made(39, rows, 0);
    p.out = empty(batch * rows);
    p.state_rows = batch;
    p.state_row_stride = rows * dstate, p.state_head_stride = headdim * dstate;
    p.state_dim_stride = dstate, p.state_dstate_stride = 1;
    p.A_head_stride = headdim * dstate, p.A_dim_stride = dstate, p.A_dstate_stride = 1;
    p.B_batch_stride = p.B_group_stride = p.C_batch_stride = p.C_group_stride = dstate;
    p.B_dstate_stride = p.C_dstate_stride = 1;
    p.x_batch_stride = p.dt_batch_stride = p.z_batch_stride = p.out_batch_stride = rows;
    p.x_head_stride = p.dt_head_stride = p.z_head_stride = p.out_head_stride = headdim;
    p.x_dim_stride = p.dt_dim_stride = p.z_dim_stride = p.out_dim_stride = 1;
    p.D_head_stride = p.dt_bias_head_stride = headdim;
    p.D_dim_stride = p.dt_bias_dim_stride = 1;
    check_call("mamba_selective_state_update", &p);
    expect("state update out", p.out, batch * rows, update_out);
    expect("state update state", p.state, batch * rows * dstate, update_state);
}

static void test_ssd(void) {
    const int64_t batch = 2, length = 70, heads = 4, headdim = 20, groups = 2, dstate = 5, row = heads * headdim;
    const int64_t states = batch * heads * headdim * dstate;
    int64_t (*forward_workspace)(const MambaSsd*) = function("mamba_ssd_forward_workspace");
    int64_t (*backward_workspace)(const MambaSsd*) = function("mamba_ssd_backward_workspace");
    MambaSsd p;
    MambaSsdBackward b;
    memset(&p, 0, sizeof(p));
    p.run.num_threads = 1;
    p.batch = batch, p.seqlen = length, p.nheads = heads, p.headdim = headdim, p.ngroups = groups, p.dstate = dstate;
    p.dt_softplus = 1;
    p.dt_max = INFINITY;
    p.x = made(41, batch * length * row, 0);
    p.dt = made(42, batch * length * heads, 0);
    p.A = made(43, heads, -1.5);
    p.B = made(44, batch * length * groups * dstate, 0);
    p.C = made(45, batch * length * groups * dstate, 0);
    p.D = made(46, heads, 0);
    p.dt_bias = made(47, heads, 0);
    p.initial_state = made(48, states, 0);
    p.out = empty(batch * length * row);
    p.final_state = empty(states);
    p.x_batch_stride = p.out_batch_stride = length * row;
    p.x_len_stride = p.out_len_stride = row;
    p.x_head_stride = p.out_head_stride = headdim;
    p.dt_batch_stride = length * heads, p.dt_len_stride = heads, p.dt_head_stride = 1;
    p.B_batch_stride = p.C_batch_stride = length * groups * dstate;
    p.B_len_stride = p.C_len_stride = groups * dstate;
    p.B_group_stride = p.C_group_stride = dstate;
    p.D_head_stride = 1;
    p.workspace = aligned(forward_workspace(&p));
    check_call("mamba_ssd_forward", &p);
    expect("ssd out", p.out, batch * length * row, ssd_out);
    expect("ssd final_state", p.final_state, states, ssd_final_state);

    memset(&b, 0, sizeof(b));
    b.forward = p;
    b.forward.workspace = aligned(backward_workspace(&p));
    b.dout = made(49, batch * length * row, 0);
    b.dfinal_state = made(50, states, 0);
    b.dx = empty(batch * length * row);
    b.ddt = empty(batch * length * heads);
    b.dA = empty(heads);
    b.dB = empty(batch * length * groups * dstate);
    b.dC = empty(batch * length * groups * dstate);
    b.dD = empty(heads);
    b.ddt_bias = empty(heads);
    b.dinitial_state = empty(states);
    b.dout_batch_stride = b.dx_batch_stride = length * row;
    b.dout_len_stride = b.dx_len_stride = row;
    b.dout_head_stride = b.dx_head_stride = headdim;
    b.ddt_batch_stride = length * heads, b.ddt_len_stride = heads, b.ddt_head_stride = 1;
    b.dB_batch_stride = b.dC_batch_stride = length * groups * dstate;
    b.dB_len_stride = b.dC_len_stride = groups * dstate;
    b.dB_group_stride = b.dC_group_stride = dstate;
    check_call("mamba_ssd_backward", &b);
    expect("ssd dx", b.dx, batch * length * row, ssd_dx);
    expect("ssd ddt", b.ddt, batch * length * heads, ssd_ddt);
    expect("ssd dA", b.dA, heads, ssd_dA);
    expect("ssd dB", b.dB, batch * length * groups * dstate, ssd_dB);
    expect("ssd dC", b.dC, batch * length * groups * dstate, ssd_dC);
    expect("ssd dD", b.dD, heads, ssd_dD);
    expect("ssd ddt_bias", b.ddt_bias, heads, ssd_ddt_bias);
    expect("ssd dinitial_state", b.dinitial_state, states, ssd_dinitial_states);
}

static void test_norm(void) {
    const int64_t rows = 6, row = 40;
    int64_t (*workspace)(const MambaNorm*) = function("mamba_norm_backward_workspace");
    MambaNorm p;
    MambaNormBackward b;
    MambaSwiglu s;
    memset(&p, 0, sizeof(p));
    p.run.num_threads = 1;
    p.rows = rows, p.ngroups = 2, p.group_size = row / 2, p.is_rms_norm = 1;
    p.eps = 1e-5f;
    p.x = made(61, rows * row, 0);
    p.weight = made(62, row, 0);
    p.z = made(63, rows * row, 0);
    p.out = empty(rows * row);
    p.rstd = empty(rows * 2);
    p.x_row_stride = p.z_row_stride = p.out_row_stride = row;
    check_call("mamba_norm_forward", &p);
    expect("norm out", p.out, rows * row, norm_out);

    memset(&b, 0, sizeof(b));
    b.forward = p;
    b.dout = made(64, rows * row, 0);
    b.dx = empty(rows * row);
    b.dz = empty(rows * row);
    b.dweight = empty(row);
    b.workspace = aligned(workspace(&p));
    b.dout_row_stride = b.dx_row_stride = b.dz_row_stride = row;
    check_call("mamba_norm_backward", &b);
    expect("norm dx", b.dx, rows * row, norm_dx);
    expect("norm dz", b.dz, rows * row, norm_dz);
    expect("norm dweight", b.dweight, row, norm_dweight);

    memset(&s, 0, sizeof(s));
    s.run.num_threads = 1;
    s.rows = rows, s.width = row / 2;
    s.xy = made(65, rows * row, 0);
    s.dout = made(66, rows * row / 2, 0);
    s.out = empty(rows * row / 2);
    s.dxy = empty(rows * row);
    s.xy_row_stride = s.dxy_row_stride = row;
    s.dout_row_stride = s.out_row_stride = row / 2;
    check_call("mamba_swiglu_forward", &s);
    expect("swiglu out", s.out, rows * row / 2, swiglu_out);
    check_call("mamba_swiglu_backward", &s);
    expect("swiglu dxy", s.dxy, rows * row, swiglu_dxy);
}

/* ---- the library ----------------------------------------------------------------------------------------------------- */

static MambaLibraryInfo test_library(void) {
    const struct {
        const char* name;
        int64_t size;
    } structs[] = {
        {"MambaRun", sizeof(MambaRun)},
        {"MambaSelectiveScan", sizeof(MambaSelectiveScan)},
        {"MambaSelectiveScanPlan", sizeof(MambaSelectiveScanPlan)},
        {"MambaSelectiveScanBackward", sizeof(MambaSelectiveScanBackward)},
        {"MambaCausalConv1d", sizeof(MambaCausalConv1d)},
        {"MambaCausalConv1dBackward", sizeof(MambaCausalConv1dBackward)},
        {"MambaCausalConv1dUpdate", sizeof(MambaCausalConv1dUpdate)},
        {"MambaSelectiveStateUpdate", sizeof(MambaSelectiveStateUpdate)},
        {"MambaSsd", sizeof(MambaSsd)},
        {"MambaSsdBackward", sizeof(MambaSsdBackward)},
        {"MambaNorm", sizeof(MambaNorm)},
        {"MambaNormBackward", sizeof(MambaNormBackward)},
        {"MambaSwiglu", sizeof(MambaSwiglu)},
        {"MambaLibraryInfo", sizeof(MambaLibraryInfo)},
    };
    int64_t (*struct_size)(const char*) = function("mamba_struct_size");
    int32_t (*library_info)(MambaLibraryInfo*) = function("mamba_library_info");
    MambaLibraryInfo info;
    memset(&info, 0, sizeof(info));
    for (size_t i = 0; i < sizeof(structs) / sizeof(structs[0]); ++i) {
        check(struct_size(structs[i].name) == structs[i].size, structs[i].name, "has another size in the library");
    }
    check(library_info(&info) == MAMBA_OK, "mamba_library_info", last_error());
    check(info.abi_version == MAMBA_ABI_VERSION, "ABI version", "is another one in the library");
    check(call("mamba_selective_scan_forward", NULL) == MAMBA_ERROR_INVALID, "NULL", "is not refused as an invalid argument");
    return info;
}

static void test_cuda_without_driver(void) {
    MambaSelectiveScan p = scan_problem(1, 4, 8, 1, 4, 1);
    const int32_t status = call("mamba_selective_scan_forward", &p);
    check(status == MAMBA_ERROR_DRIVER, "a scan without a driver", "does not return MAMBA_ERROR_DRIVER");
    check(strstr(last_error(), "CUDA error 35") != NULL || strstr(last_error(), "CUDA error 100") != NULL,
          "a scan without a driver", last_error());
    printf("a scan without a driver returns %d: %s\n", (int)status, last_error());
}

int main(int count, char** words) {
    MambaLibraryInfo info;
    library = count == 2 ? LoadLibraryA(words[1]) : NULL;
    if (library == NULL) {
        printf("FAIL %s cannot be loaded (Windows error %lu)\n", count == 2 ? words[1] : "(no file)", GetLastError());
        return 1;
    }
    info = test_library();
    if (info.is_cuda) {
        printf("mamba_cuda: CUDA runtime %d, driver %d\n", (int)info.cuda_runtime_version, (int)info.cuda_driver_version);
        test_cuda_without_driver();
    } else {
        printf("mamba_cpu: %s\n", info.isa);
        test_scan();
        test_threads();
        test_conv();
        test_state_update();
        test_ssd();
        test_norm();
    }
    printf("%d checks, %d failures\n", checks, failures);
    return failures == 0 ? 0 : 1;
}
