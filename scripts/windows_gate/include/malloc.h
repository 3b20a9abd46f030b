#pragma once
#include <stdlib.h>
extern "C" {
void* __cdecl _aligned_malloc(size_t size, size_t alignment);
void __cdecl _aligned_free(void* data);
}
