// expect: expected an expression
#include <stdint.h>
#include <cuda_runtime.h>
int f(int x) { void *p = &&a; goto *p; a: return x; }
