"""Where nvcc is found, on made-up Linux and Windows machines, and what nvcc's answers mean."""

import pytest
from wheel_build import cuda

SITE = "/venv/lib/python3.12/site-packages"
WHEEL = f"{SITE}/nvidia/cu13/bin/nvcc"
FOLDER = "/usr/local/cuda/bin/nvcc"
PROGRAMS = r"C:\Program Files\NVIDIA GPU Computing Toolkit\CUDA"


def made_up(platform, present):
    """A file system that holds just the files given."""
    separator = "\\" if platform == "win32" else "/"

    def list_folder(folder):
        prefix = folder + separator
        return sorted({path[len(prefix) :].split(separator)[0] for path in present if path.startswith(prefix)})

    return cuda.FileSystem(lambda path: path in present, list_folder)


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
    ("win32", {}, [SITE + r"\nvidia\cu13\bin\nvcc.exe"], SITE + r"\nvidia\cu13\bin\nvcc.exe", "wheels"),
]


@pytest.mark.parametrize(("platform", "environ", "present", "path", "source"), FOUND)
def test_found(platform, environ, present, path, source):
    found = cuda.find_nvcc(environ, platform, made_up(platform, present), ["", SITE])
    assert found.nvcc is not None
    assert path in found.nvcc.path
    assert found.nvcc.source == source
    assert found.wrong == ()


@pytest.mark.parametrize("platform", ["linux", "win32"])
def test_not_found(platform):
    # A folder named nvcc, or the other system's nvcc, is none.
    present = ["/usr/local/cuda/bin/nvcc.exe"] if platform == "linux" else [r"C:\x\nvcc"]
    assert cuda.find_nvcc({"PATH": r"C:\x"}, platform, made_up(platform, present), [SITE]).nvcc is None


def test_wrong_home_is_told_and_the_search_goes_on():
    found = cuda.find_nvcc({"CUDA_HOME": "/gone", "CUDA_PATH": "/away"}, "linux", made_up("linux", [FOLDER]), [])
    assert found.nvcc == cuda.Nvcc(FOLDER, "folder")
    assert found.wrong == (("CUDA_HOME", "/gone"), ("CUDA_PATH", "/away"))


def test_wrong_cudacxx_ends_the_search():
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
def test_link_flag_for_toolkits_without_lib64(present, flags):
    assert cuda.extra_cuda_flags(cuda.Nvcc("/w/bin/nvcc", "wheels"), "linux", made_up("linux", present)) == flags


def test_requirements_name_one_minor_of_nvcc_only_when_asked_and_missing():
    nvcc = cuda.Nvcc(FOLDER, "folder")
    assert cuda.requirements("auto", None) == cuda.requirements("off", None) == cuda.requirements("on", nvcc) == []
    wanted = cuda.requirements("on", None)
    assert len(wanted) == 5
    assert len({requirement.split("==")[1] for requirement in wanted}) == 1
