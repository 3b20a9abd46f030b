#pragma once
#include <corecrt.h>
extern "C" {
void* __cdecl malloc(size_t);
void* __cdecl calloc(size_t, size_t);
void* __cdecl realloc(void*, size_t);
void __cdecl free(void*);
void* __cdecl _alloca(size_t);
__declspec(noreturn) void __cdecl abort(void);
__declspec(noreturn) void __cdecl exit(int);
int __cdecl atexit(void(__cdecl*)(void));
char* __cdecl getenv(const char*);
int __cdecl atoi(const char*);
double __cdecl atof(const char*);
long __cdecl strtol(const char*, char**, int);
int __cdecl abs(int);
long __cdecl labs(long);
long long __cdecl llabs(long long);
unsigned short __cdecl _byteswap_ushort(unsigned short);
unsigned long __cdecl _byteswap_ulong(unsigned long);
unsigned __int64 __cdecl _byteswap_uint64(unsigned __int64);
}
inline long abs(long x) throw() {
    return x < 0 ? -x : x;
}
inline long long abs(long long x) throw() {
    return x < 0 ? -x : x;
}
