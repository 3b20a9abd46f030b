// expect: expected an expression
#include <stdint.h>
#include <cuda_runtime.h>
int f(int x) { return ({ int y = x; y + 1; }); }
