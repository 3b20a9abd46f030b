// printf and its kin are inline in the UCRT: the DLL exports only the __stdio_common_* functions.
#pragma once
#include <stdarg.h>
struct _iobuf;
typedef _iobuf FILE;
extern "C" {
FILE* __cdecl __acrt_iob_func(unsigned);
int __cdecl __stdio_common_vfprintf(unsigned __int64, FILE*, const char*, void*, va_list);
int __cdecl __stdio_common_vsprintf(unsigned __int64, char*, size_t, const char*, void*, va_list);
int __cdecl fflush(FILE*);
inline int __cdecl fprintf(FILE* f, const char* s, ...) {
    va_list a;
    va_start(a, s);
    int n = __stdio_common_vfprintf(0, f, s, 0, a);
    va_end(a);
    return n;
}
inline int __cdecl printf(const char* s, ...) {
    va_list a;
    va_start(a, s);
    int n = __stdio_common_vfprintf(0, __acrt_iob_func(1), s, 0, a);
    va_end(a);
    return n;
}
inline int __cdecl vsnprintf(char* b, size_t c, const char* s, va_list a) {
    return __stdio_common_vsprintf(2, b, c, s, 0, a);
}
inline int __cdecl snprintf(char* b, size_t c, const char* s, ...) {
    va_list a;
    va_start(a, s);
    int n = vsnprintf(b, c, s, a);
    va_end(a);
    return n;
}
}
#define stdout (__acrt_iob_func(1))
#define stderr (__acrt_iob_func(2))
