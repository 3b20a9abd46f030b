#include <corecrt.h>
extern "C" void __cdecl _wassert(const wchar_t*, const wchar_t*, unsigned);
#undef assert
#ifdef NDEBUG
#define assert(e) ((void)0)
#else
#define assert(e) ((void)(!!(e) || (_wassert(_CRT_WIDE(#e), _CRT_WIDE(__FILE__), (unsigned)__LINE__), 0)))
#endif
