// expect: expected a type specifier
#include <stdint.h>
#include <cuda_runtime.h>
struct __attribute__((aligned(16))) S { float v[4]; };
__global__ void k(S *x) { x->v[0] = 1; }
