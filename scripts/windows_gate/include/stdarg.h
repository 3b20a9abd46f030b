#pragma once
#include <corecrt.h>
extern "C" void __cdecl __va_start(va_list*,
                                   ...);  // compiler intrinsic; every argument takes an 8-byte slot, larger ones go by address
#define va_start(ap, last) ((void)__va_start(&ap, last))
#define va_arg(ap, T) (sizeof(T) > 8 || (sizeof(T) & (sizeof(T) - 1)) ? **(T**)((ap += 8) - 8) : *(T*)((ap += 8) - 8))
#define va_end(ap) ((void)(ap = (va_list)0))
#define va_copy(to, from) ((to) = (from))
