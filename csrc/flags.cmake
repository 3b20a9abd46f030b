# Every flag that this project gives a compiler or linker, one row each. CMake adds the language standard, the
# optimisation of the build type, -fPIC and hidden symbols, and (CMakeLists.txt says which) the C runtime.
#
#   mamba_flags(<compiler> <where> <flags>...)
#
# compiler: MSVC (cl, clang-cl) or GNU (gcc, clang); the rows of the other one are passed over.
# where: CXX, CUDA, LINK, DEFINE (macros, for both languages). In CUDA a row is for the host compiler that nvcc drives,
# so nvcc gets it as -Xcompiler.

if(MSVC)
    set(mamba_compiler MSVC)
else()
    set(mamba_compiler GNU)
endif()

add_library(mamba_flags INTERFACE)

function(mamba_flags compiler where)
    if(NOT compiler STREQUAL mamba_compiler)
        return()
    endif()
    if(CXX IN_LIST where)
        target_compile_options(mamba_flags INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${ARGN}>")
    endif()
    if(CUDA IN_LIST where)
        list(JOIN ARGN "," flags)
        target_compile_options(mamba_flags INTERFACE "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=${flags}>")
    endif()
    if(LINK IN_LIST where)
        target_link_options(mamba_flags INTERFACE ${ARGN})
    endif()
    if(DEFINE IN_LIST where)
        target_compile_definitions(mamba_flags INTERFACE ${ARGN})
    endif()
endfunction()

# ---- cl --------------------------------------------------------------------------------------------------------------

mamba_flags(MSVC "CXX;CUDA" /W3)
mamba_flags(MSVC "CXX;CUDA" /w14701 /w14703) # a variable may be used without a value: gcc's -Wall has that, /W3 not
mamba_flags(MSVC "CXX;CUDA" /utf-8) # or cl reads the sources in the system's code page
mamba_flags(MSVC "CXX;CUDA" /Zc:preprocessor) # the standard's, which CUDA's headers demand from 13.2 on
mamba_flags(MSVC "CXX;CUDA" /Zc:__cplusplus) # or it says C++98
mamba_flags(MSVC "CXX;CUDA" /EHsc)
mamba_flags(MSVC "CXX;CUDA" /bigobj) # kernels are many sections, and a plain object holds 65,279
mamba_flags(MSVC "DEFINE" _USE_MATH_DEFINES) # or <math.h> has no M_PI, in any pass
mamba_flags(MSVC "DEFINE" NOMINMAX WIN32_LEAN_AND_MEAN) # or <windows.h> brings macros named min and max
mamba_flags(MSVC "DEFINE" _CRT_SECURE_NO_WARNINGS) # standard C functions are not deprecated here
mamba_flags(MSVC "CXX;CUDA;LINK" /Brepro) # no time stamps: two builds are the same bytes
mamba_flags(MSVC "LINK" /INCREMENTAL:NO)

# ---- gcc and clang ---------------------------------------------------------------------------------------------------

mamba_flags(GNU "CXX;CUDA" -Wall -Wextra)
# This machine's folders stay out of the libraries: the same source gives the same bytes anywhere.
# nvcc hands on what stands behind -Xcompiler through a shell, hence the quotes: a path may hold spaces or brackets.
foreach(map IN ITEMS "${CMAKE_CURRENT_SOURCE_DIR}=csrc" "${CMAKE_BINARY_DIR}=build")
    mamba_flags(GNU "CXX" "-ffile-prefix-map=${map}")
    mamba_flags(GNU "CUDA" "-ffile-prefix-map=\"${map}\"")
endforeach()
mamba_flags(GNU "CXX" -ffunction-sections -fdata-sections)
mamba_flags(GNU "LINK" LINKER:--gc-sections LINKER:--as-needed)
mamba_flags(GNU "LINK" LINKER:--no-undefined) # a missing kernel is an error now, not when it is called
mamba_flags(GNU "LINK" "LINKER:--version-script=${CMAKE_CURRENT_SOURCE_DIR}/exports.map") # cudart's symbols stay inside
mamba_flags(GNU "LINK" LINKER:--build-id=sha1)
if(NOT WIN32) # MinGW's linker has no -z
    mamba_flags(GNU "LINK" LINKER:-z,nodelete) # dlclose would unmap what mamba_cpu's threads run
endif()
if(NOT MAMBA_DEBUG)
    mamba_flags(GNU "LINK" LINKER:--strip-all)
endif()

# ---- instruction sets of the CPU kernels -----------------------------------------------------------------------------

set(mamba_isa_generic_MSVC "")
# gcc, whose vectors are arrays there, would look through memory for what an array holds for half of its time.
set(mamba_isa_generic_GNU $<$<CXX_COMPILER_ID:GNU>:--param=sccvn-max-alias-queries-per-access=50>)
if(CMAKE_CXX_FLAGS_RELEASE MATCHES "-O3") # takes twice as long as -O2 and unrolls to twice the size: few CPUs run these
    list(APPEND mamba_isa_generic_GNU $<$<CONFIG:Release>:-O2>)
endif()
set(mamba_isa_avx2_MSVC /arch:AVX2)
set(mamba_isa_avx2_GNU -mavx2 -mfma -mf16c)
set(mamba_isa_avx512_MSVC /arch:AVX512)
set(mamba_isa_avx512_GNU -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c)
