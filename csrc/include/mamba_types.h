/* What all of the C ABI shares (mamba_kernels.h): codes, limits, and where to run. */
#ifndef MAMBA_TYPES_H
#define MAMBA_TYPES_H

#include <stdint.h>

/* Error codes. */
#define MAMBA_OK 0
#define MAMBA_ERROR_INVALID 1         /* an argument is wrong: message names it */
#define MAMBA_ERROR_UNSUPPORTED 2     /* right, but not in this library (size limit) */
#define MAMBA_ERROR_DTYPE_DISABLED 3  /* the dtype was switched off when the library was built */
#define MAMBA_ERROR_CUDA 4            /* CUDA said no: message holds the error's name, the kernel and the sizes */
#define MAMBA_ERROR_NO_KERNEL_IMAGE 5 /* the library holds no code for this GPU's architecture */
#define MAMBA_ERROR_DRIVER 6          /* no driver, or one older than the library's CUDA runtime needs */
#define MAMBA_ERROR_MEMORY 7          /* host memory could not be allocated (CPU library) */
#define MAMBA_ERROR_INDEX 8           /* an index of no row (CPU library) */

/* Element types. */
#define MAMBA_FLOAT32 0
#define MAMBA_FLOAT16 1
#define MAMBA_BFLOAT16 2
#define MAMBA_INT8 3 /* a weight of linear, with scales */

/* Weights along in_features that share a scale; the last of a row may be fewer. */
#define MAMBA_INT8_BLOCK 32

/* The forward scan stores the state every so many steps for the backward scan to start from. */
#define MAMBA_SCAN_CHECKPOINT 64
/* Largest dstate of selective_scan, selective_state_update, ssd and mamba3. */
#define MAMBA_MAX_DSTATE 256
/* Largest headdim of ssd and mamba3. */
#define MAMBA_MAX_HEADDIM 256
/* Largest rank of mamba3. */
#define MAMBA_MAX_RANK 64
/* Largest dt_rank of mamba_step. */
#define MAMBA_MAX_DT_RANK 8192
/* Largest group_size of norm. */
#define MAMBA_MAX_NORM_GROUP 1073741824
#define MAMBA_MAX_LINEAR_NORM 2048

/* Where to run. mamba_cuda reads stream and device, mamba_cpu reads num_threads. */
typedef struct MambaRun {
    void* stream;        /* cudaStream_t; NULL is the legacy default stream */
    int32_t device;      /* CUDA device index */
    int32_t num_threads; /* most CPU threads to use, >= 1 */
} MambaRun;

/* A function of the same library that takes one params struct and returns a code, and what it is called with. */
typedef struct MambaCall {
    void* function; /* its address */
    const void* params;
} MambaCall;

/* Calls to make one after the other. */
typedef struct MambaSequence {
    int64_t count;
    const MambaCall* calls; /* (count) */
} MambaSequence;

#endif /* MAMBA_TYPES_H */
