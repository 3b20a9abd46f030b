// Not for use: clang's <intrin.h> includes it.
#pragma once
typedef struct {
    long long part[32];
} jmp_buf[1];
