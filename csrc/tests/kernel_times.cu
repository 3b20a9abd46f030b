// Prints kernel times of causal_conv1d and selective_state_update beside the copy bandwidth measured in the same run.
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "mamba_kernels.h"

static void check_cuda(cudaError_t error, const char* what) {
    if (error != cudaSuccess) {
        printf("CUDA failed: %s: %s\n", what, cudaGetErrorString(error));
        exit(1);
    }
}

static __global__ void fill_kernel(uint16_t* data, int64_t count) {
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
         i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
        const uint32_t bits = static_cast<uint32_t>(i) * 2654435761u ^ static_cast<uint32_t>(i >> 7) * 40503u;
        data[i] = static_cast<uint16_t>((bits & 0x80ff) | 0x3f00);  // 0.5 to 2 and their negatives, as bfloat16
    }
}

static void* random_buffer(int64_t bytes) {
    void* data = nullptr;
    check_cuda(cudaMalloc(&data, static_cast<size_t>(bytes)), "malloc");
    fill_kernel<<<1024, 256>>>(static_cast<uint16_t*>(data), bytes / 2);
    check_cuda(cudaGetLastError(), "fill");
    return data;
}

// The stream that the timed calls use: the legacy default stream cannot be captured.
static cudaStream_t timing_stream() {
    static cudaStream_t stream = nullptr;
    if (stream == nullptr) {
        check_cuda(cudaStreamCreate(&stream), "stream");
    }
    return stream;
}

// Median milliseconds of one call, from 25 replays of a graph that holds `calls` of them.
template <typename Params>
static double median_time(int32_t (*function)(const Params*), Params* params, int sets, int calls) {
    const cudaStream_t stream = timing_stream();
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t start, stop;
    check_cuda(cudaEventCreate(&start), "event");
    check_cuda(cudaEventCreate(&stop), "event");
    check_cuda(cudaDeviceSynchronize(), "before capture");
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
    for (int i = 0; i < calls; ++i) {
        if (function(&params[i % sets]) != MAMBA_OK) {
            printf("%s\n", mamba_last_error());
            exit(1);
        }
    }
    check_cuda(cudaStreamEndCapture(stream, &graph), "capture");
    check_cuda(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
    float times[25];
    for (int i = -3; i < 25; ++i) {
        check_cuda(cudaEventRecord(start, stream), "record");
        check_cuda(cudaGraphLaunch(exec, stream), "launch");
        check_cuda(cudaEventRecord(stop, stream), "record");
        check_cuda(cudaEventSynchronize(stop), "synchronize");
        float time = 0.0f;
        check_cuda(cudaEventElapsedTime(&time, start, stop), "elapsed");
        int place = i;
        for (; place > 0 && times[place - 1] > time; --place) {
            times[place] = times[place - 1];
        }
        times[place < 0 ? 0 : place] = time;
    }
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaEventDestroy(start);
    cudaEventDestroy(stop);
    return times[12] / calls;
}

static double copy_bandwidth() {
    const int64_t bytes = static_cast<int64_t>(1) << 30;
    void* from = random_buffer(bytes);
    void* to = random_buffer(bytes);
    cudaEvent_t start, stop;
    check_cuda(cudaEventCreate(&start), "event");
    check_cuda(cudaEventCreate(&stop), "event");
    float best = 1e30f;
    for (int i = 0; i < 10; ++i) {
        cudaEventRecord(start);
        cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice);
        cudaEventRecord(stop);
        check_cuda(cudaEventSynchronize(stop), "copy");
        float time = 0.0f;
        cudaEventElapsedTime(&time, start, stop);
        best = time < best ? time : best;
    }
    cudaFree(from);
    cudaFree(to);
    return 2.0 * static_cast<double>(bytes) / best * 1e-6;
}

static void time_conv(int64_t B, int64_t L, int64_t D, bool channel_last, bool sequences, double copy) {
    const int64_t bytes = B * L * D * 2;
    void* x = random_buffer(bytes);
    void* out = random_buffer(bytes);
    void* dout = random_buffer(bytes);
    void* weight = random_buffer(D * 4 * 2);
    void* bias = random_buffer(D * 2);
    void* seq_idx = nullptr;  // one sequence, which the kernels cannot know
    check_cuda(cudaMalloc(&seq_idx, static_cast<size_t>(B * L * 4)), "malloc");
    check_cuda(cudaMemset(seq_idx, 0, static_cast<size_t>(B * L * 4)), "memset");
    MambaCausalConv1dBackward q = {};
    MambaCausalConv1d& p = q.forward;
    p.run.stream = timing_stream();
    p.batch = B;
    p.dim = D;
    p.seqlen = L;
    p.width = 4;
    p.silu = 1;
    p.dtype = p.weight_dtype = p.bias_dtype = MAMBA_BFLOAT16;
    p.x = x;
    p.weight = weight;
    p.bias = bias;
    p.seq_idx = sequences ? static_cast<int32_t*>(seq_idx) : nullptr;
    p.out = out;
    p.x_batch_stride = p.out_batch_stride = L * D;
    p.x_dim_stride = p.out_dim_stride = channel_last ? 1 : L;
    p.x_len_stride = p.out_len_stride = channel_last ? D : 1;
    q.dout = dout;
    q.dx = out;
    q.dout_batch_stride = q.dx_batch_stride = p.x_batch_stride;
    q.dout_dim_stride = q.dx_dim_stride = p.x_dim_stride;
    q.dout_len_stride = q.dx_len_stride = p.x_len_stride;
    const int64_t workspace = mamba_causal_conv1d_backward_workspace(&p);
    q.workspace = workspace > 0 ? random_buffer(workspace) : nullptr;
    q.dweight = random_buffer(D * 4 * 4);
    q.dbias = random_buffer(D * 4);
    const double forward = median_time(mamba_causal_conv1d_forward, &p, 1, 4);
    const double backward = median_time(mamba_causal_conv1d_backward, &q, 1, 4);
    printf("conv %s B%lld L%lld D%lld bf16%s: forward %.4f ms (%.2f of copy), backward %.4f ms (%.2f of copy)\n",
           channel_last ? "channel-last" : "time-last   ", static_cast<long long>(B), static_cast<long long>(L),
           static_cast<long long>(D), sequences ? " seq_idx" : "", forward,
           static_cast<double>(2 * bytes) / forward * 1e-6 / copy, backward,
           static_cast<double>(3 * bytes) / backward * 1e-6 / copy);
    void* const buffers[] = {x, out, dout, weight, bias, seq_idx, q.dweight, q.dbias, q.workspace};
    for (void* buffer : buffers) {
        cudaFree(buffer);
    }
}

static void time_state_update(int64_t B, int64_t D, int64_t N, int32_t state_dtype, double copy) {
    const int64_t bytes = B * D * N * (state_dtype == MAMBA_FLOAT32 ? 4 : 2);
    const int sets = static_cast<int>(bytes * 8 > (static_cast<int64_t>(1) << 28) ? 8 : 16);
    MambaSelectiveStateUpdate p[16] = {};
    void* x = random_buffer(B * D * 2);
    void* A = random_buffer(D * N * 4);
    for (int i = 0; i < sets; ++i) {
        MambaSelectiveStateUpdate& s = p[i];
        s.run.stream = timing_stream();
        s.batch = s.state_rows = B;
        s.seqlen = 1;
        s.nheads = s.ngroups = 1;
        s.headdim = D;
        s.dstate = N;
        s.state_dtype = state_dtype;
        s.x_dtype = s.dt_dtype = s.BC_dtype = MAMBA_BFLOAT16;
        s.A_dtype = s.D_dtype = s.dt_bias_dtype = MAMBA_FLOAT32;
        s.dt_softplus = 1;
        s.state = random_buffer(bytes);
        s.x = s.dt = s.z = x;
        s.A = A;
        s.B = s.C = x;
        s.D = s.dt_bias = A;
        s.out = random_buffer(B * D * 2);
        s.state_row_stride = D * N;
        s.state_dim_stride = s.A_dim_stride = N;
        s.state_dstate_stride = s.A_dstate_stride = s.B_dstate_stride = s.C_dstate_stride = 1;
        s.B_batch_stride = s.C_batch_stride = N;
        s.x_batch_stride = s.dt_batch_stride = s.z_batch_stride = s.out_batch_stride = D;
        s.x_dim_stride = s.dt_dim_stride = s.z_dim_stride = s.out_dim_stride = s.D_dim_stride = s.dt_bias_dim_stride = 1;
    }
    const double time = median_time(mamba_selective_state_update, p, sets, 160);
    printf("state update B%lld D%lld N%lld state dtype %d: %.2f us (%.2f of copy)\n", static_cast<long long>(B),
           static_cast<long long>(D), static_cast<long long>(N), static_cast<int>(state_dtype), time * 1e3,
           static_cast<double>(2 * bytes) / time * 1e-6 / copy);
    for (int i = 0; i < sets; ++i) {
        cudaFree(p[i].state);
        cudaFree(p[i].out);
    }
    cudaFree(x);
    cudaFree(A);
}

int main() {
    const double copy = copy_bandwidth();
    printf("copy bandwidth %.0f GB/s\n", copy);
    for (int channel_last = 0; channel_last < 2; ++channel_last) {
        time_conv(8, 2048, 4096, channel_last != 0, false, copy);
        time_conv(1, 16384, 4096, channel_last != 0, false, copy);
        time_conv(1, 131072, 1536, channel_last != 0, false, copy);
        time_conv(64, 512, 1536, channel_last != 0, false, copy);
        time_conv(8, 2048, 4096, channel_last != 0, true, copy);
    }
    time_conv(8, 2047, 4096, false, false, copy);
    time_conv(256, 64, 4096, false, false, copy);
    time_state_update(1, 4096, 16, MAMBA_FLOAT32, copy);
    time_state_update(128, 4096, 16, MAMBA_FLOAT32, copy);
    time_state_update(128, 4096, 16, MAMBA_BFLOAT16, copy);
    time_state_update(16, 8192, 128, MAMBA_FLOAT32, copy);
    return 0;
}
