// expect: expected a "("
#include <stdint.h>
#include <cuda_runtime.h>
int f(int x) { int y; asm volatile("mov %1, %0" : "=r"(y) : "r"(x)); return y; }
