// expect: expected a ":"
#include <stdint.h>
#include <cuda_runtime.h>
int f(int x) { switch (x) { case 1 ... 3: return 1; } return 0; }
