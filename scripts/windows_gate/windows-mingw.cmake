# CMake toolchain: the CPU library by mingw-w64, whose C++ runtime is whole (std::thread, exceptions) and linked in statically.
set(CMAKE_SYSTEM_NAME Windows)
set(CMAKE_SYSTEM_PROCESSOR AMD64)
set(CMAKE_CXX_COMPILER x86_64-w64-mingw32-g++-posix CACHE STRING "") # in the cache, for build_info.json
set(CMAKE_RC_COMPILER x86_64-w64-mingw32-windres)
# GCC keeps AVX values on a stack that Windows aligns to 16 bytes only, and moves them as if it were aligned to 32 or 64
# (GCC bug 54412); the assembler turns those moves into ones that need no alignment.
set(CMAKE_CXX_FLAGS_INIT -Wa,-muse-unaligned-vector-move)
set(CMAKE_SHARED_LINKER_FLAGS_INIT -static)
set(CMAKE_EXE_LINKER_FLAGS_INIT -static)
set(CMAKE_CROSSCOMPILING_EMULATOR wine)
