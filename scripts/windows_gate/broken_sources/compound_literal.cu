// expect: expected an expression
#include <stdint.h>
#include <cuda_runtime.h>
struct S { int a, b; };
S f() { return (S){1, 2}; }
