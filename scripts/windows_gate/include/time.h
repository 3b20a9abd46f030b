#pragma once
#include <corecrt.h>
typedef long clock_t;
#define CLOCKS_PER_SEC 1000
extern "C" {
clock_t __cdecl clock(void);
time_t __cdecl _time64(time_t*);
inline time_t __cdecl time(time_t* t) {
    return _time64(t);
}
}
