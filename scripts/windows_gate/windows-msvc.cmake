# CMake toolchain: CUDA by NVIDIA's Windows nvcc.exe, C++ by clang-cl in Microsoft mode, links by lld-link. The command line
# gives GATE_CACHE, GATE_CUDA_VERSION and GATE_MSVC_VERSION. What CMake would find out about nvcc by linking and running
# programs is stated here instead.
set(CMAKE_SYSTEM_NAME Windows)
set(CMAKE_SYSTEM_PROCESSOR AMD64)
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES GATE_CACHE GATE_CUDA_VERSION GATE_MSVC_VERSION)

set(CMAKE_CXX_COMPILER "${GATE_CACHE}/bin/clang-cl")
set(CMAKE_LINKER "${GATE_CACHE}/bin/lld-link")
set(CMAKE_AR "${GATE_CACHE}/bin/llvm-lib")
set(CMAKE_RC_COMPILER x86_64-w64-mingw32-windres)
string(
    JOIN " " CMAKE_CXX_FLAGS_INIT
         --target=x86_64-pc-windows-msvc
         -fms-compatibility-version=${GATE_MSVC_VERSION}
         -X
         -imsvc${CMAKE_CURRENT_LIST_DIR}/include
         -Wno-unused-command-line-argument # /Zc:preprocessor
)

set(CMAKE_CUDA_COMPILER "${GATE_CACHE}/bin/nvcc")
set(CMAKE_CUDA_COMPILER_FORCED TRUE)
set(CMAKE_CUDA_COMPILER_ID_RUN 1)
set(CMAKE_CUDA_COMPILER_ID NVIDIA)
set(CMAKE_CUDA_COMPILER_VERSION ${GATE_CUDA_VERSION})
set(CMAKE_CUDA_SIMULATE_ID MSVC)
set(CMAKE_CUDA_SIMULATE_VERSION ${GATE_MSVC_VERSION})
set(CMAKE_CUDA_PLATFORM_ID Windows)
set(CMAKE_CUDA_COMPILER_ARCHITECTURE_ID x64)
set(MSVC_CUDA_ARCHITECTURE_ID x64)
set(CMAKE_CUDA_STANDARD_COMPUTED_DEFAULT 17)
set(CMAKE_CUDA_EXTENSIONS_COMPUTED_DEFAULT OFF)
set(CMAKE_CUDA_COMPILER_TOOLKIT_ROOT "${GATE_CACHE}/cuda/nvidia/cu13")
# What CMake reads in the output of a link with -v.
string(
    CONCAT CMAKE_CUDA_COMPILER_PRODUCED_OUTPUT
           "#$ INCLUDES= -I${CMAKE_CUDA_COMPILER_TOOLKIT_ROOT}/include\n"
           "#$ LIBRARIES= /LIBPATH:${CMAKE_CUDA_COMPILER_TOOLKIT_ROOT}/lib/x64\n"
           "link.exe /LIBPATH:${CMAKE_CUDA_COMPILER_TOOLKIT_ROOT}/lib/x64 cudart_static.lib CompilerIdCUDA.exe\n"
)

# crt.obj and Windows' own two DLLs in place of libcmt.lib and the Windows SDK.
set(CMAKE_SHARED_LINKER_FLAGS_INIT
    "/nodefaultlib /manifest:no /libpath:${GATE_CACHE}/lib /libpath:${CMAKE_CUDA_COMPILER_TOOLKIT_ROOT}/lib/x64"
)
set(CMAKE_CXX_STANDARD_LIBRARIES "crt.obj ucrtbase.lib ucrtbase_math.lib kernel32.lib" CACHE STRING "")
set(CMAKE_CUDA_STANDARD_LIBRARIES "crt.obj ucrtbase.lib ucrtbase_math.lib kernel32.lib" CACHE STRING "")
# A static library is all that is tried, and any function "is found" that way.
set(CMAKE_HAVE_LIBC_PTHREAD FALSE CACHE BOOL "")
set(CMAKE_HAVE_PTHREADS_CREATE FALSE CACHE BOOL "")
set(CMAKE_HAVE_PTHREAD_CREATE FALSE CACHE BOOL "")
