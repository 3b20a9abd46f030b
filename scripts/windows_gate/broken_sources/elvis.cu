// expect: expected an expression
#include <stdint.h>
#include <cuda_runtime.h>
int f(int x) { return x ?: 1; }
