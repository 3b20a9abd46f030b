// expect: must have a constant value
#include <stdint.h>
#include <cuda_runtime.h>
int f(int n) { int a[n]; a[0] = 1; return a[0]; }
