"""The build switches: read once, strictly; a wrong value is one error naming switch, value and what is allowed."""

import pytest
from wheel_build.config import read_config

DEFAULTS = {
    "MM_DISABLE_BF16": ("disable_bf16", False),
    "MM_DISABLE_HALF": ("disable_half", False),
    "DEBUG": ("debug", False),
    "MAMBA_RELEASE": ("release", False),
    "SOURCE_DATE_EPOCH": ("source_date", None),
    "NVCC_THREADS": ("nvcc_threads", None),
    "MAX_JOBS": ("max_jobs", None),
    "MAMBA_SSM_CUDA": ("cuda", ""),
    "MAMBA_LOCAL_VERSION": ("local_version", ""),
    "CMAKE_ARGS": ("cmake_args", ()),
}
BOOLEANS = ["MM_DISABLE_BF16", "MM_DISABLE_HALF", "DEBUG", "MAMBA_RELEASE"]
RIGHT = [
    *((switch, word, True) for switch in BOOLEANS for word in ("1", "true", "TRUE", "Yes", "on", " on ")),
    *((switch, word, False) for switch in BOOLEANS for word in ("0", "false", "False", "NO", "off", "", "  ")),
    ("NVCC_THREADS", "4", 4),
    ("NVCC_THREADS", " 8 ", 8),
    ("MAX_JOBS", "1", 1),
    ("MAX_JOBS", "9999", 9999),
    ("MAX_JOBS", "", None),
    ("MAMBA_SSM_CUDA", "ON", "on"),
    ("MAMBA_SSM_CUDA", "off", "off"),
    ("MAMBA_SSM_CUDA", "Auto", "auto"),
    ("MAMBA_SSM_CUDA", " ", ""),
    ("MAMBA_LOCAL_VERSION", "cu130", "cu130"),
    ("MAMBA_LOCAL_VERSION", "CU130.Mine-2_007", "cu130.mine.2.7"),
    ("CMAKE_ARGS", "-DA=1  -DB='x y' -GNinja", ("-DA=1", "-DB=x y", "-GNinja")),
    ("CMAKE_ARGS", r"-DP=C:\dir\sub", (r"-DP=C:\dir\sub",)),
    ("CMAKE_ARGS", "-DMAMBA_BUILD_TESTS=ON", ("-DMAMBA_BUILD_TESTS=ON",)),
    ("CMAKE_ARGS", '""', ("",)),
    ("CMAKE_ARGS", "-DCMAKE_BUILD_TYPE=Release", ("-DCMAKE_BUILD_TYPE=Release",)),
    ("CMAKE_ARGS", "-D A=1 -G Ninja", ("-D", "A=1", "-G", "Ninja")),
    ("CMAKE_ARGS", "--toolchain x.cmake -Wno-dev", ("--toolchain", "x.cmake", "-Wno-dev")),
    ("CMAKE_ARGS", "--install-prefix /x --fresh", ("--install-prefix", "/x", "--fresh")),
    ("CMAKE_ARGS", "-DA= --log-level=DEBUG", ("-DA=", "--log-level=DEBUG")),
    ("SOURCE_DATE_EPOCH", " 1700000000 ", 1700000000),
    ("SOURCE_DATE_EPOCH", "0", 0),
    ("SOURCE_DATE_EPOCH", "4354819198", 4354819198),
]
WRONG = [
    *((switch, word, "true/false") for switch in BOOLEANS for word in ("2", "y", "enable", "TRUE!", "-1")),
    *(
        (switch, word, "positive integer")
        for switch in ("NVCC_THREADS", "MAX_JOBS")
        for word in ("0", "-1", "2.5", "x", "10000", "\u0663")
    ),
    ("MAX_JOBS", "auto", "positive integer"),
    ("MAMBA_SSM_CUDA", "1", "auto, on or off"),
    ("MAMBA_SSM_CUDA", "yes", "auto, on or off"),
    ("MAMBA_LOCAL_VERSION", "+cu130", "PEP 440"),
    ("MAMBA_LOCAL_VERSION", "cu13 0", "PEP 440"),
    ("MAMBA_LOCAL_VERSION", "cu..130", "PEP 440"),
    ("MAMBA_LOCAL_VERSION", "cu130-", "PEP 440"),
    ("CMAKE_ARGS", "-DX='open", "closed"),
    ("CMAKE_ARGS", "-DCMAKE_CUDA_ARCHITECTURES=86", "TORCH_CUDA_ARCH_LIST"),
    ("CMAKE_ARGS", "-O -DMAMBA_CUDA:BOOL=ON", "MAMBA_SSM_CUDA"),
    ("CMAKE_ARGS", "-O -D MAMBA_CUDA=ON", "MAMBA_SSM_CUDA"),
    ("CMAKE_ARGS", "-DMAMBA_DISABLE_HALF=ON", "MM_DISABLE_HALF"),
    ("CMAKE_ARGS", "-DMAMBA_GLIBC=2.17", "MAMBA_RELEASE"),
    ("CMAKE_ARGS", "-DCMAKE_BUILD_TYPE=Debug", "set by DEBUG"),
    ("CMAKE_ARGS", "-DCMAKE_CXX_COMPILER=clang++", "set by CXX"),
    ("CMAKE_ARGS", "-DNAME", "-DNAME=VALUE"),
    ("CMAKE_ARGS", "-D", "-DNAME=VALUE"),
    ("CMAKE_ARGS", "DNAME=1", "begin with a hyphen"),
    ("CMAKE_ARGS", "-DA=x y", "begin with a hyphen"),
    *(
        ("CMAKE_ARGS", word, "something else")
        for word in ("-B /tmp/x", "-S.", "--help", "--preset x", "-N", "--version")
    ),
    *((name, "-DX='open", "closed") for name in ("CXXFLAGS", "CUDAFLAGS", "CFLAGS")),
    ("SOURCE_DATE_EPOCH", "-1", "seconds since 1970"),
    ("SOURCE_DATE_EPOCH", "2026-01-01", "seconds since 1970"),
    ("SOURCE_DATE_EPOCH", "4354819199", "up to 4354819198"),
]


def test_defaults():
    config = read_config({})
    for field, value in DEFAULTS.values():
        assert getattr(config, field) == value
    assert config.arch_list == ""
    assert config.dtypes == ["float32", "float16", "bfloat16"]
    assert not config.errors


@pytest.mark.parametrize(("switch", "value", "expected"), RIGHT)
def test_right_value(switch, value, expected):
    config = read_config({switch: value})
    assert not config.errors
    assert getattr(config, DEFAULTS[switch][0]) == expected


@pytest.mark.parametrize(("switch", "value", "allowed"), WRONG)
def test_wrong_value_is_one_error_with_switch_value_and_allowed(switch, value, allowed):
    config = read_config({switch: value})
    assert len(config.errors) == 1
    error = config.errors[0]
    assert (error.switch, error.value) == (switch, value)
    assert switch in str(error)
    assert repr(value) in str(error)
    assert allowed in str(error)


# variable -> the switch that may be meant; "": none is near
MISSPELT = {
    "MAMBA_SSM_CUD": "MAMBA_SSM_CUDA",
    "MAMBA_CUDA": "MAMBA_SSM_CUDA",
    "MAMBA_DISABLE_BF16": "MM_DISABLE_BF16",
    "MAMBA_SSM_DISABLE_HALF": "MM_DISABLE_HALF",
    "MM_DISABLE_BF": "MM_DISABLE_BF16",
    "MAMBA_DEBUG": "DEBUG",
    "MAMBA_NVCC_THREADS": "NVCC_THREADS",
    "MAMBA_GLIBC": "MAMBA_RELEASE",
    "MAMBA_CPU_ISA": "MAMBA_SSM_CPU_ISA",
    "MM_XYZ": "",
    "NVCC_THREAD": "NVCC_THREADS",
    "TORCH_CUDA_ARCH_LISTS": "TORCH_CUDA_ARCH_LIST",
    "max_jobs": "MAX_JOBS",
    "CUDAHOME": "CUDA_HOME",
}
# Names that others read, alike as they are.
NOT_MISSPELT = [
    "MAMBA_SSM_CPU_ISA",
    "MAMBA_FORCE_BUILD",
    "TORCH_CUDA_ARCH_LIST",
    "MAMBA_EXE",
    "MAMBARC",
    "MAMBA_NO_BANNER",
    "MAMBA_ROOT_PREFIX",
    "NDEBUG",
    "CUDA_PATH_V13_0",
    "NCCL_NTHREADS",
    "OMP_NUM_THREADS",
    "FCFLAGS",
    "CPPFLAGS",
    "CUDA_VERSION",
    "CUDA_ROOT",
    "CMAKE_GENERATOR",
    "CMAKE_PREFIX_PATH",
    "MAKEFLAGS",
]


@pytest.mark.parametrize(("name", "meant"), MISSPELT.items())
def test_misspelt_switch(name, meant):
    assert read_config({name: "1"}).misspelt == ((name, meant),)
    assert read_config({name: ""}).misspelt == ()


@pytest.mark.parametrize("name", NOT_MISSPELT)
def test_name_of_others(name):
    assert read_config({name: "1"}).misspelt == ()


def test_every_wrong_switch_is_named_in_one_run():
    config = read_config({"MAX_JOBS": "0", "DEBUG": "maybe", "MM_DISABLE_HALF": "1"})
    assert [error.switch for error in config.errors] == ["MAX_JOBS", "DEBUG"]
    assert config.disable_half


@pytest.mark.parametrize(
    ("environ", "dtypes"),
    [
        ({"MM_DISABLE_HALF": "1"}, ["float32", "bfloat16"]),
        ({"MM_DISABLE_BF16": "yes"}, ["float32", "float16"]),
        ({"MM_DISABLE_BF16": "on", "MM_DISABLE_HALF": "true"}, ["float32"]),
    ],
)
def test_dtypes(environ, dtypes):
    assert read_config(environ).dtypes == dtypes


@pytest.mark.parametrize("switch", ["MAMBA_FORCE_BUILD", "MAMBA_KEEP_CUDA_BUILD"])
def test_switches_of_older_scripts_are_accepted_without_effect(switch):
    config = read_config({switch: "TRUE"})
    assert not config.errors
    assert switch in config.notes[0]
    assert read_config({switch: ""}).notes == ()
