"""Builds real CPU-only wheels from a copy of the source and opens them. About a minute on two cores."""

import base64
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
from _helpers.wheels import package_files
from wheel_build import convolution, facts
from wheel_build.version import base_version

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads Linux libraries"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here"),
    *(
        pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed here")
        for name in ("setuptools", "cmake", "ninja")
    ),
]
# libc's own family and the C++ runtime; ld-linux is libc's loader, which thread-local storage refers to.
SYSTEM_LIBRARIES = re.compile(
    r"(libc|libm|libdl|libpthread|librt|libstdc\+\+|libgcc_s)\.so\.\d+|ld-linux-x86-64\.so\.2"
)
EPOCH = "1700000000"
NOT_OPTIMISED = "-DCMAKE_CXX_FLAGS_RELEASE=-O0"  # a fifth of the time; tests/build/test_flags.py has the usual flags
SBOM = "sboms/mamba_ssm.cdx.json"


def environment(**more):
    """One for all builds here, without the switches that these tests run under: so they compile into one folder."""
    switches = "CUDA", "TORCH_CUDA", "NVCC_", "MAMBA", "MM_", "CMAKE"
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(switches) or name == "CMAKE_CXX_COMPILER_LAUNCHER"  # .ci/run has a cache
    }
    return {**clean, "MAMBA_SSM_CUDA": "off", "SOURCE_DATE_EPOCH": EPOCH, "CMAKE_ARGS": NOT_OPTIMISED, **more}


def setup(folder, *words, **environ):
    command, pipes = [sys.executable, "setup.py", *words], {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(command, cwd=folder, env=environment(**environ), **pipes, text=True)


def build(folder, *words, **environ):
    done = setup(folder, *words, **environ)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def members(wheel):
    """{name without the version: contents}"""
    with zipfile.ZipFile(wheel) as archive:
        return {
            re.sub(r"^mamba_ssm-[^/]+\.dist-info", "dist-info", name): archive.read(name) for name in archive.namelist()
        }


@pytest.fixture(scope="module")
def source(tmp_path_factory, request):
    """A copy of the source with leftovers of a CUDA build planted where they have leaked into wheels before."""
    root = request.config.rootpath
    folder = tmp_path_factory.mktemp("checkout") / "source"
    ignored = shutil.ignore_patterns(".*", "build", "dist", "lib", "*.egg-info", "__pycache__")
    shutil.copytree(root, folder, ignore=lambda path, names: [] if path.endswith("tests") else ignored(path, names))
    shutil.copy(root / ".clang-format", folder)
    (folder / "PKG-INFO").unlink(missing_ok=True)
    for place in (folder / "mamba_ssm" / "lib", folder / "build" / built_folder() / "mamba_ssm" / "lib"):
        place.mkdir(parents=True)
        (place / "libmamba_cuda.so").write_bytes(b"of an earlier build")
    (folder / "build" / built_folder() / "mamba_ssm" / "deleted_module.py").write_text("gone = True\n")
    return folder


def built_folder():
    return f"lib.linux-x86_64-cpython-{sys.version_info.major}{sys.version_info.minor}"


@pytest.fixture(scope="module")
def wheel(source):
    output = build(source, "bdist_wheel")
    # The plan, counts of files, warnings: no line for each file that is copied.
    assert "build plan for the CPU alone, about " in output
    assert re.search(r"^(\d+) of \1 files: done$", output, re.MULTILINE)
    assert not re.search(r"copying|running build|adding '|Building CXX", output)
    (found,) = (source / "dist").glob("mamba_ssm-*.whl")
    return found


@pytest.fixture(scope="module")
def sdist_wheel(source, tmp_path_factory):
    """The wheel built from the sdist, in another folder."""
    folder = tmp_path_factory.mktemp("sdist")
    build(source, "sdist", "-d", str(folder))
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder)
    unpacked = folder / archive.name.removesuffix(".tar.gz")
    build(unpacked, "bdist_wheel")
    (found,) = (unpacked / "dist").glob("mamba_ssm-*.whl")
    return found


def test_name_and_tag(wheel, root):
    assert wheel.name == f"mamba_ssm-{base_version(root)}+cpu-py3-none-linux_x86_64.whl"
    tags = members(wheel)["dist-info/WHEEL"].decode()
    assert "Tag: py3-none-linux_x86_64\n" in tags
    assert "Root-Is-Purelib: false\n" in tags


def test_contents_are_the_package_and_this_builds_libraries(wheel, source):
    names = set(members(wheel))
    modules = {name for name in package_files(source) if name.endswith(".py")}
    assert {name for name in names if name.endswith(".py")} == modules
    assert {name for name in names if name.startswith("mamba_ssm/lib/")} == {
        "mamba_ssm/lib/libmamba_cpu.so",
        "mamba_ssm/lib/build_info.json",
    }
    rest = {name for name in names if not name.startswith("mamba_ssm/lib/") and not name.endswith(".py")}
    assert rest == {"mamba_ssm/py.typed"} | {
        f"dist-info/{name}" for name in ("METADATA", "WHEEL", "RECORD", "top_level.txt", "licenses/LICENSE", SBOM)
    }


def test_the_checkout_has_what_was_built(wheel, source, tmp_path):
    """README's Install is typed in the folder where the build just ended, and Python there imports the checkout."""
    built = {name: data for name, data in members(wheel).items() if name.startswith("mamba_ssm/lib/")}
    assert {name: (source / name).read_bytes() for name in built} == built
    assert not (source / "mamba_ssm" / "lib" / "libmamba_cuda.so").exists()
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    installed = list(importlib.metadata.distributions(name="mamba_ssm"))  # twice would be a problem
    done = subprocess.run(
        [sys.executable, "-m", "mamba_ssm"],
        cwd=source,
        env=dict(os.environ) if installed else {**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"({source / 'mamba_ssm'})" in done.stdout


def test_metadata_requires_torch_and_nothing_else(wheel, root):
    metadata = members(wheel)["dist-info/METADATA"].decode()
    required = re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)
    assert [line for line in required if "extra ==" not in line] == ["torch>=2.2"]
    assert f"Version: {base_version(root)}+cpu\n" in metadata
    assert "License-Expression: Apache-2.0\n" in metadata
    assert "Requires-Python: >=3.10\n" in metadata


def test_record_has_every_file_with_its_hash(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (record,) = (name for name in archive.namelist() if name.endswith("RECORD"))
        lines = [line.rsplit(",", 2) for line in archive.read(record).decode().splitlines()]
        assert sorted(line[0] for line in lines) == sorted(archive.namelist())
        for name, digest, size in lines:
            if name != record:
                data = archive.read(name)
                hashed = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
                assert (digest, size) == (f"sha256={hashed}", str(len(data)))


def test_build_info(wheel, root):
    info = json.loads(members(wheel)["mamba_ssm/lib/build_info.json"])
    assert info["package_version"] == base_version(root)
    assert info["local_label"] == "cpu"
    assert info["cuda"] is False
    assert info["nvcc_version"] is None
    assert info["architectures"] == []
    assert info["dtypes"] == ["float32", "float16", "bfloat16"]
    assert re.fullmatch(r"(GNU|Clang) [\d.]+", info["host_compiler"])
    assert info["debug"] is False
    assert info["flags"]["cxx"] == "-O0"
    library = members(wheel)["mamba_ssm/lib/libmamba_cpu.so"]
    facts = {"size": len(library), "sha256": hashlib.sha256(library).hexdigest()}
    assert info["libraries"] == {"libmamba_cpu.so": facts}
    assert {"source_commit", "source_dirty", "abi_version"} <= set(info)


def test_library_needs_only_system_libraries_and_exports_only_the_c_abi(wheel, root, tmp_path):
    library = tmp_path / "libmamba_cpu.so"
    library.write_bytes(members(wheel)["mamba_ssm/lib/libmamba_cpu.so"])
    dynamic = subprocess.run(["readelf", "-dW", library], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"NEEDED.*\[(.*)\]", dynamic)
    assert needed
    assert [name for name in needed if not SYSTEM_LIBRARIES.fullmatch(name)] == []
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic

    listed = subprocess.run(["readelf", "--dyn-syms", "-W", library], capture_output=True, text=True, check=True).stdout
    symbols = [line.split() for line in listed.splitlines() if re.match(r"\s*\d+:", line)]
    undefined = {words[7].split("@")[0] for words in symbols if len(words) > 7 and words[6] == "UND"}
    theirs = re.compile(r"_?Py|_ZNK?(2at|3c10|5torch)|THP|omp_|GOMP")
    foreign = [name for name in undefined if theirs.match(name)]
    assert foreign == []
    header = (root / "csrc" / "include" / "mamba_kernels.h").read_text()
    declared = set(re.findall(r"^MAMBA_API .*?(mamba_\w+)\(", header, re.MULTILINE))
    exported = {words[7].split("@")[0] for words in symbols if len(words) > 7 and words[6] != "UND"}
    assert exported == declared

    loaded = ctypes.CDLL(str(library))
    loaded.mamba_struct_size.restype = ctypes.c_int64
    assert loaded.mamba_struct_size(b"MambaRun") == 16


# Objects may come from a cache (.ci/run); publish/test_rebuild.py compares what compilers write in two folders.
def test_no_folder_of_this_machine_is_in_the_wheel(wheel, source):
    for name, data in members(wheel).items():
        assert str(source).encode() not in data, name


def test_wheel_from_sdist_has_the_same_contents(wheel, sdist_wheel, root):
    assert sdist_wheel.name == f"mamba_ssm-{base_version(root)}-py3-none-linux_x86_64.whl"
    from_checkout, from_sdist = members(wheel), members(sdist_wheel)
    assert set(from_checkout) == set(from_sdist)
    # The version differs (an sdist has no label), and so do the files that name it; not one byte of the rest.
    differing = {name for name in from_checkout if from_checkout[name] != from_sdist[name]}
    assert differing == {"dist-info/METADATA", "dist-info/RECORD", f"dist-info/{SBOM}"}


def test_second_build_is_byte_identical_and_compiles_nothing(wheel, source, tmp_path):
    output = build(source, "bdist_wheel", "-d", str(tmp_path), "-b", "unpacked")
    for name in (wheel.name, convolution.wheel_name(source)):
        assert (tmp_path / name).read_bytes() == (source / "dist" / name).read_bytes()
    assert "nothing to compile" in output


def test_the_other_wheel(wheel, source, sdist_wheel, tmp_path):
    """causal-conv1d, by setup.py in the checkout and in the sdist, and by its own backend."""
    name = f"causal_conv1d-1.7.0+mamba.{base_version(source)}-py3-none-any.whl"
    assert sorted(path.name for path in (source / "dist").iterdir()) == [name, wheel.name]
    made = (source / "dist" / name).read_bytes()
    assert (sdist_wheel.parent / name).read_bytes() == made
    command = [sys.executable, "-c", f"import backend; print(backend.build_wheel({str(tmp_path)!r}))"]
    environ = {**os.environ, "SOURCE_DATE_EPOCH": EPOCH}
    printed = subprocess.run(
        command, cwd=source / "causal-conv1d", env=environ, capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() == name
    assert (tmp_path / name).read_bytes() == made


def test_a_frontend_gets_one_wheel(wheel, source, tmp_path):
    """PEP 517 knows one wheel for a call, and setuptools' backend fails over two."""
    code = f"from wheel_build import backend; print(backend.build_wheel({str(tmp_path)!r}))"
    environ = environment(PYTHONPATH=str(source / "scripts"))
    subprocess.run([sys.executable, "-c", code], cwd=source, env=environ, check=True, stdout=subprocess.PIPE)
    assert [path.name for path in tmp_path.iterdir()] == [wheel.name]


@pytest.mark.skipif(bool(facts.driver_version()), reason="an NVIDIA GPU is here, for which this would compile")
def test_an_editable_install_without_a_gpu_is_for_the_cpu(source, wheel, tmp_path):
    """Whether nvcc is here or not; and where pip hides the line, build_info.json has it."""
    built = source / "mamba_ssm" / "lib" / "build_info.json"
    before = built.read_text()
    code = f"from wheel_build import backend; backend.build_editable({str(tmp_path)!r})"
    environ = environment(PYTHONPATH=str(source / "scripts"))
    del environ["MAMBA_SSM_CUDA"]
    done = subprocess.run([sys.executable, "-c", code], cwd=source, env=environ, stdout=subprocess.PIPE, text=True)
    info = json.loads(built.read_text())
    built.write_text(before)
    assert done.returncode == 0, done.stdout[-4000:]
    (made,) = tmp_path.iterdir()
    assert made.name.startswith(f"mamba_ssm-{base_version(source)}+cpu-")
    assert info["editable"].startswith("for the CPU alone: the build saw no GPU (TORCH_CUDA_ARCH_LIST=9.0")
    assert f"  editable       {info['editable']}\n" in done.stdout
    assert "nothing to compile" in done.stdout


def test_dist_holds_a_finished_wheel_or_none(source, wheel, tmp_path):
    """A file in the way of the last step: what stood in dist before still stands, and nothing is left beside it."""
    dist = tmp_path / "dist"
    dist.mkdir()
    old = dist / wheel.name
    old.write_bytes(b"an earlier wheel")
    (dist / f"{wheel.name}.new").mkdir()
    assert refused(source, "bdist_wheel", "-d", str(dist))
    assert old.read_bytes() == b"an earlier wheel"
    assert [path.name for path in dist.iterdir() if path.is_file()] == [wheel.name]


def test_second_build_in_the_same_checkout_and_its_cleaning_are_refused(source, wheel, tmp_path):
    import fcntl

    with open(source / "build" / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for words in (["bdist_wheel", "-d", str(tmp_path)], ["clean", "--all"]):
            output = refused(source, *words)
            assert f"mamba_ssm: another build is running in {source}; wait until it has ended" in output
    assert list(tmp_path.iterdir()) == []
    assert (source / "build" / built_folder()).is_dir()


def refused(folder, *words):
    done = setup(folder, *words)
    assert done.returncode != 0
    return done.stdout


def test_fatal_finding_stops_the_build(source):
    done = setup(source, "bdist_wheel", MM_DISABLE_HALF="maybe")
    assert done.returncode != 0
    assert "FATAL [switch-invalid] MM_DISABLE_HALF is 'maybe'" in done.stdout
