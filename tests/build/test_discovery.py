"""Where nvcc is found, on made-up Linux and Windows machines, and what nvcc's answers mean."""

import pytest
from wheel_build import cuda

SITE = "/venv/lib/python3.12/site-packages"
WHEEL = f"{SITE}/nvidia/cu13/bin/nvcc"
FOLDER = "/usr/local/cuda/bin/nvcc"
PROGRAMS = r"C:\Program Files\NVIDIA GPU Computing Toolkit\CUDA"


# platform, environment, files, nvcc found, by what
FOUND = [
    ("linux", {}, [FOLDER], FOLDER, "folder"),
    ("linux", {"PATH": "/usr/bin:/opt/x/bin"}, ["/opt/x/bin/nvcc", FOLDER], "/opt/x/bin/nvcc", "PATH"),
    ("linux", {"PATH": ":/usr/bin:"}, [FOLDER], FOLDER, "folder"),
    ("linux", {"CUDA_PATH": "/c/12", "PATH": "/p"}, ["/c/12/bin/nvcc", "/p/nvcc"], "/c/12/bin/nvcc", "CUDA_PATH"),
    ("linux", {"CUDA_HOME": "/h", "CUDA_PATH": "/c"}, ["/h/bin/nvcc", "/c/bin/nvcc"], "/h/bin/nvcc", "CUDA_HOME"),
    ("linux", {"CUDACXX": "/x/nvcc", "CUDA_HOME": "/h"}, ["/x/nvcc", "/h/bin/nvcc"], "/x/nvcc", "CUDACXX"),
    ("linux", {"CUDACXX": "nvcc", "PATH": "/p"}, ["/p/nvcc"], "/p/nvcc", "CUDACXX"),
    ("linux", {}, ["/usr/local/cuda-12.9/bin/nvcc", "/usr/local/cuda-13.0/bin/nvcc"], "13.0", "folder"),
    ("linux", {}, ["/usr/local/cuda-9.2/bin/nvcc", "/usr/local/cuda-12.4/bin/nvcc"], "12.4", "folder"),
    ("linux", {}, ["/opt/cuda/bin/nvcc"], "/opt/cuda/bin/nvcc", "folder"),
    ("linux", {}, [WHEEL], WHEEL, "wheels"),
    ("linux", {}, [WHEEL, FOLDER], FOLDER, "folder"),
    ("linux", {}, [f"{SITE}/nvidia/cuda_nvcc/bin/nvcc"], f"{SITE}/nvidia/cuda_nvcc/bin/nvcc", "wheels"),
    ("win32", {}, [PROGRAMS + r"\v13.0\bin\nvcc.exe"], PROGRAMS + r"\v13.0\bin\nvcc.exe", "folder"),
    ("win32", {}, [PROGRAMS + r"\v9.2\bin\nvcc.exe", PROGRAMS + r"\v12.8\bin\nvcc.exe"], "v12.8", "folder"),
    ("win32", {"CUDA_PATH": r"D:\CUDA"}, [r"D:\CUDA\bin\nvcc.exe"], r"D:\CUDA\bin\nvcc.exe", "CUDA_PATH"),
    ("win32", {"PATH": r"C:\a;C:\b"}, [r"C:\b\nvcc.exe"], r"C:\b\nvcc.exe", "PATH"),
    ("win32", {"CUDACXX": r"E:\bin\nvcc"}, [r"E:\bin\nvcc.exe"], r"E:\bin\nvcc.exe", "CUDACXX"),
    ("win32", {"CUDACXX": r"E:\bin\nvcc.exe"}, [r"E:\bin\nvcc.exe"], r"E:\bin\nvcc.exe", "CUDACXX"),
    ("win32", {"PATH": r'C:\a;"D:\b c"'}, [r"D:\b c\nvcc.exe"], r"D:\b c\nvcc.exe", "PATH"),
    (
        "win32",
        {"PROGRAMFILES": r"E:\Prog"},
        [PROGRAMS.replace(r"C:\Program Files", r"E:\Prog") + r"\v13.0\bin\nvcc.exe"],
        r"E:\Prog",
        "folder",
    ),
    ("win32", {}, [SITE + r"\nvidia\cu13\bin\nvcc.exe"], SITE + r"\nvidia\cu13\bin\nvcc.exe", "wheels"),
]


@pytest.mark.parametrize(("platform", "environ", "present", "path", "source"), FOUND)
def test_found(made_up, platform, environ, present, path, source):
    found = cuda.find_nvcc(environ, platform, made_up(platform, present), ["", SITE])
    assert found.nvcc is not None
    assert path in found.nvcc.path
    assert found.nvcc.source == source
    assert found.wrong == ()


@pytest.mark.parametrize("platform", ["linux", "win32"])
def test_not_found(made_up, platform):
    # A folder named nvcc, or the other system's nvcc, is none.
    present = ["/usr/local/cuda/bin/nvcc.exe"] if platform == "linux" else [r"C:\x\nvcc"]
    assert cuda.find_nvcc({"PATH": r"C:\x"}, platform, made_up(platform, present), [SITE]).nvcc is None


def test_wrong_home_is_told_and_the_search_goes_on(made_up):
    found = cuda.find_nvcc({"CUDA_HOME": "/gone", "CUDA_PATH": "/away"}, "linux", made_up("linux", [FOLDER]), [])
    assert found.nvcc == cuda.Nvcc(FOLDER, "folder")
    assert found.wrong == (("CUDA_HOME", "/gone"), ("CUDA_PATH", "/away"))


def test_wrong_cudacxx_ends_the_search(made_up):
    found = cuda.find_nvcc({"CUDACXX": "/gone/nvcc"}, "linux", made_up("linux", [FOLDER]), [])
    assert found == cuda.Discovery(None, (("CUDACXX", "/gone/nvcc"),))


def test_nvcc_answers():
    said = "Cuda compilation tools, release 12.9, V12.9.86\nBuild cuda_12.9.r12.9/compiler.36037853_0\n"
    assert cuda.parse_nvcc_version(said) == ((12, 9), "12.9.86")
    assert cuda.parse_nvcc_version("command not found") is None
    assert cuda.parse_architectures("compute_75\ncompute_120\ncompute_90\n") == [75, 90, 120]


@pytest.mark.parametrize(
    ("present", "flags"),
    [
        (["/w/lib/libcudart_static.a"], "-L/w/lib"),
        (["/w/lib/libcudart_static.a", "/w/lib64/libcudart_static.a"], ""),
        (["/w/lib64/libcudart_static.a"], ""),
        ([], ""),
    ],
)
def test_link_flag_for_toolkits_without_lib64(made_up, present, flags):
    assert cuda.extra_cuda_flags(cuda.Nvcc("/w/bin/nvcc", "wheels"), "linux", made_up("linux", present)) == flags


def test_requirements_name_one_minor_of_nvcc_only_when_asked_and_missing():
    nvcc = cuda.Nvcc(FOLDER, "folder")
    assert cuda.requirements("auto", None) == cuda.requirements("off", None) == cuda.requirements("on", nvcc) == []
    wanted = cuda.requirements("on", None)
    assert len(wanted) == 5
    assert len({requirement.split("==")[1] for requirement in wanted}) == 1


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        (
            "#if _MSC_VER < 1910 || _MSC_VER >= 1940\n#elif x\n#endif /* (_MSC_VER < 1910 || _MSC_VER >= 1940) */",
            (1910, 1940),
        ),
        ("#if defined(_WIN32)\n\n#if _MSC_VER < 1920 || _MSC_VER >= 1950\n", (1920, 1950)),
        ("#if _MSC_VER < 1920 || _MSC_VER >= 1960\n", (1920, 1960)),
        ("#if _MSC_VER >= 1500\n", None),
        ("", None),
    ],
)
def test_range_of_cl_is_read_from_nvccs_own_header(made_up, header, accepted):
    """The lines are those of CUDA 12.0, 13.0 and 13.2."""
    files = made_up("win32", {PROGRAMS + r"\v13.0\include\crt\host_config.h": header})
    assert cuda.msc_ver_range(cuda.Nvcc(PROGRAMS + r"\v13.0\bin\nvcc.exe", "folder"), files) == accepted


WHOLE = [
    r"bin\cudafe++.exe",
    r"bin\ptxas.exe",
    r"nvvm\bin\cicc.exe",
    r"include\cuda_runtime.h",
    r"include\cuda_fp16.h",
    r"include\nv\target",
    r"lib\x64\cudart_static.lib",
]


@pytest.mark.parametrize(
    ("left_out", "added", "missing"),
    [
        ((), (), []),
        (WHOLE[:1], (), ["cudafe++.exe"]),
        (WHOLE[6:], (), ["cudart_static.lib"]),
        (WHOLE[6:], (r"lib\cudart_static.lib",), []),
        (WHOLE[5:6], (r"include\cccl\nv\target",), []),
        (WHOLE[3:], (), ["cuda_runtime.h", "cuda_fp16.h", "target", "cudart_static.lib"]),
    ],
)
def test_parts_of_the_toolkit_that_are_missing(made_up, left_out, added, missing):
    files = made_up("win32", [rf"D:\CUDA\{name}" for name in {*WHOLE, *added} - set(left_out)])
    nvcc = cuda.Nvcc(r"D:\CUDA\bin\nvcc.exe", "CUDA_PATH")
    found = cuda.missing_parts(nvcc, "win32", files)
    assert [text.rstrip(")").split("\\")[-1] for text in found] == missing
    # Linux toolkits lie scattered; nvcc itself is tried there
    assert cuda.missing_parts(nvcc, "linux", files) == []
