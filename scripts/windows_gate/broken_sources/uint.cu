// expect: "__global__" does not apply here
#include <stdint.h>
#include <cuda_runtime.h>
__global__ void k(uint *x) { x[0] = 1; }
