// expect: unknown type name 'ssize_t'
#include <stdint.h>
ssize_t f(ssize_t x) {
    return x;
}
