// Stand-in for the Visual C++ runtime's base header: the types and macros that NVIDIA's headers and the rest of this folder
// use.
#pragma once
#define _VCRUNTIME_H
#define _CRTIMP
#define _ACRTIMP
#define __CRTDECL __cdecl
#define _CRT_WIDE_(s) L##s
#define _CRT_WIDE(s) _CRT_WIDE_(s)
typedef unsigned __int64 size_t;
typedef unsigned __int64 uintptr_t;
typedef __int64 ptrdiff_t;
typedef __int64 intptr_t;
typedef __int64 time_t;
typedef char* va_list;
#define NULL 0
#define offsetof(type, member) __builtin_offsetof(type, member)
namespace std {
typedef decltype(__nullptr) nullptr_t;
using ::ptrdiff_t;
using ::size_t;
}  // namespace std
using std::nullptr_t;
