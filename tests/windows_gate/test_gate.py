"""The decisions of scripts/windows_gate, by tables: paths, arguments, messages, versions. Nothing is compiled here."""

import os
from pathlib import Path

import pytest

pytest.importorskip("pefile", reason="pefile is not installed here")
pytest.importorskip("zstandard", reason="zstandard is not installed here")
pytest.importorskip("elftools", reason="pyelftools is not installed here")
pytest.importorskip("check_wheel_contents", reason="check-wheel-contents is not installed here")
pytest.importorskip("cyclonedx", reason="cyclonedx-python-lib is not installed here")

from windows_gate import broken, compilers, gate, toolchain

PREFIX = "/cache/prefix"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/a/b c/d.cu", r"Z:\a\b c\d.cu"),
        ("a/b.obj", r"a\b.obj"),
        ("/", "Z:\\"),
    ],
)
def test_windows_path(path, expected):
    assert compilers.windows_path(path) == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (r"Z:\wide\a.cu", "/wide/a.cu"),
        ("z:/wide//a.cu", "/wide/a.cu"),
        (r"C:\users\root\Temp\x.ii", f"{PREFIX}/drive_c/users/root/Temp/x.ii"),
        (r"sub\x.obj", "sub/x.obj"),
        ("x.obj", "x.obj"),
    ],
)
def test_linux_path(path, expected):
    assert compilers.linux_path(path, PREFIX) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-c", "/src/a.cu", "-o", "a.obj"], ["-c", r"Z:\src\a.cu", "-o", "a.obj"]),
        (["-I/src/csrc", "-I", "/other"], [r"-IZ:\src\csrc", "-I", r"Z:\other"]),
        (["-Xcompiler=/W3,/utf-8"], ["-Xcompiler=/W3,/utf-8"]),
        (["-Xcompiler", "/W3", "/a.cu"], ["-Xcompiler", "/W3", r"Z:\a.cu"]),
        (["-MT", "/dir/a.obj", "-MF", "/dir/a.d"], ["-MT", "/dir/a.obj", "-MF", r"Z:\dir\a.d"]),
        (["--output-file=/dir/a.obj"], [r"--output-file=Z:\dir\a.obj"]),
        (["-gencode=arch=compute_90,code=sm_90", "-DX=1"], ["-gencode=arch=compute_90,code=sm_90", "-DX=1"]),
    ],
)
def test_nvcc_arguments(arguments, expected):
    assert compilers.nvcc_arguments(arguments) == expected


def test_nvcc_response_file(tmp_path):
    file = tmp_path / "a.rsp"
    file.write_text('-I"/src/with space" -DX\n')
    assert compilers.nvcc_arguments(["--options-file", str(file)]) == [r"-IZ:\src\with space", "-DX"]


def test_messages_name_linux_files_and_not_what_is_being_compiled():
    text = "a.cu\r\ntmpxft_0000_a.cudafe1.cpp\r\nZ:\\src\\a.cu(3): error: no\r\nZ:/inc/b.h(1): note (see Z:\\c d)\r\n"
    assert compilers.readable(text) == "/src/a.cu(3): error: no\n/inc/b.h(1): note (see /c d)\n"


@pytest.mark.skipif(os.name != "posix", reason="the gate runs on Linux")
def test_nvcc_does_not_wait_for_what_wine_leaves_running(tmp_path, monkeypatch, capfd):
    wine = tmp_path / "wine"
    wine.write_text(f"#!/bin/sh\n(sleep 20; touch {tmp_path}/ended) &\necho said\necho wrong >&2\nexit 3\n")
    wine.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert compilers.run_nvcc(tmp_path, ["-c", "a.cu"]) == 3
    assert capfd.readouterr() == ("said\n", "wrong\n")
    assert not (tmp_path / "ended").exists()


@pytest.mark.skipif(os.name != "posix", reason="the gate runs on Linux")
@pytest.mark.parametrize("does", ["exit 1", "exec sleep 20"])
def test_wine_that_does_not_start(tmp_path, monkeypatch, does):
    wine = tmp_path / "wine"
    wine.write_text(f"#!/bin/sh\n{does}\n")
    wine.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(gate, "WINE_SECONDS", 1)
    with pytest.raises(gate.GateError, match="does not start within 1 s"), gate.wine_services(tmp_path):
        pass


@pytest.mark.parametrize(
    ("arguments", "present", "absent"),
    [
        (["-c", "/Fo", r"Z:\out\a.obj", r"C:\tmp\a.cpp"], ["-Fo/out/a.obj", f"{PREFIX}/drive_c/tmp/a.cpp"], ["/Fo"]),
        (["/Foa.obj", "-IZ:\\inc", "-DA=1", "-D", "B"], ["-Foa.obj", "-I/inc", "-DA=1", "-DB"], []),
        (["/W3", "/bigobj", "/Brepro", "/utf-8", "-FS", "-Fdx.pdb"], [], ["-W3", "-bigobj", "-Brepro", "-FS"]),
        (["/std:c++17"], ["-std:c++17"], ["-std:c++14"]),
        ([], ["-std:c++14", "-D_MSVC_TRADITIONAL=1"], []),
        (["/Zc:preprocessor"], ["-D_MSVC_TRADITIONAL=0"], ["-Zc:preprocessor"]),
        (["-c", "a.cpp"], ["/clang:-fkeep-persistent-storage-variables"], []),
        (["-E", "a.cpp"], ["-E"], ["/clang:-fkeep-persistent-storage-variables"]),
    ],
)
def test_clang_cl_arguments(arguments, present, absent):
    words = compilers.clang_cl_arguments(arguments, "/folder", PREFIX, "/include")
    assert [word for word in present if word not in words] == []
    assert [word for word in absent if word in words] == []


def test_files_come_after_the_options_end():
    words = compilers.clang_cl_arguments(["-c", r"Z:\wide\a.cpp"], "/folder", PREFIX, "/include")
    assert words[-2:] == ["--", "/wide/a.cpp"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-8-sig"])
def test_cl_response_file(tmp_path, encoding):
    (tmp_path / "a.rsp").write_bytes('-DA="b c" "Z:\\x y\\a.cpp"'.encode(encoding))
    assert list(compilers.cl_words(["@a.rsp", "-c"], str(tmp_path), PREFIX)) == ["-DA=b c", "Z:\\x y\\a.cpp", "-c"]


@pytest.mark.parametrize(
    ("folders", "expected"),
    [
        ([], None),
        (["/usr/lib/llvm-14"], None),
        (["/usr/lib/llvm-9", "/usr/lib/llvm-22", "/usr/lib/llvm-18"], "/usr/lib/llvm-22"),
        (["/usr/lib/llvm-18", "/usr/lib/llvm"], "/usr/lib/llvm-18"),
    ],
)
def test_newest_clang(folders, expected):
    assert toolchain.newest_clang(folders) == expected


@pytest.mark.parametrize(
    ("search", "expected"),
    [
        ("", None),
        ("clang-14 - C compiler\n", None),
        ("clang-9 - C\nclang-19 - C\nclang-22 - C\nclang-22-doc - D\n", 22),
    ],
)
def test_clang_package(search, expected):
    assert toolchain.clang_package(search) == expected


@pytest.mark.parametrize(
    ("root", "apt", "sudo", "why"),
    [
        (True, False, False, "there is no apt-get here"),
        (False, True, False, "installing them takes root"),
        (False, True, True, "installing them takes root"),  # sudo that asks for a password
    ],
)
def test_no_packages_to_be_had_is_said(monkeypatch, tmp_path, root, apt, sudo, why):
    there = {"apt-get": apt, "sudo": sudo}
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: "/usr/bin/" + name if there.get(name) else None)
    monkeypatch.setattr(toolchain, "llvm_folder", lambda: None)
    monkeypatch.setattr(toolchain.os, "geteuid", lambda: 0 if root else 1000, raising=False)
    monkeypatch.setattr(toolchain.subprocess, "call", lambda *command, **options: 1)
    with pytest.raises(toolchain.NotPossible, match=f"missing: wine, .*{why}"):
        toolchain.install_packages(tmp_path / "log")


def test_what_is_installed_needs_no_packages(monkeypatch, tmp_path):
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: "/usr/bin/" + name)
    monkeypatch.setattr(toolchain, "llvm_folder", lambda: Path("/usr/lib/llvm-22"))
    toolchain.install_packages(tmp_path / "log")
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_a_failed_stage_is_told_of_and_tried_once_more(failures):
    calls, told = [], []

    def stage():
        calls.append(1)
        if len(calls) <= failures:
            raise toolchain.GateError(f"failure {len(calls)}")
        return "done"

    if failures < 2:
        assert gate.with_second_try("native tests", stage, told.append) == "done"
    else:
        with pytest.raises(toolchain.GateError, match="failure 2"):
            gate.with_second_try("native tests", stage, told.append)
    assert [("native tests" in text, "failure 1" in text) for text in told] == [(True, True)][:failures]
    assert len(calls) == min(failures + 1, 2)


def test_syntax_only():
    command = "clang-cl /nologo -clang:-MD -clang:-MFa.d /Foa.obj /Fdx/ -I'/a b' -c -- /src/a.cpp"
    assert gate.syntax_only(command) == ["clang-cl", "/nologo", "-I/a b", "/Zs", "--", "/src/a.cpp"]


def test_command_for_another_source():
    entry = {"command": "nvcc -O3 -MD -MT a.obj -MF a.d -x cu -c /src/a.cu -o a.obj", "file": "/src/a.cu"}
    command = gate.command_for(entry, Path("/planted/b.cu"), Path("b.obj"))
    assert command == ["nvcc", "-O3", "-x", "cu", "-c", "/planted/b.cu", "-o", "b.obj"]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("a.cpp(3,10): fatal error: 'algorithm' file not found\n", "algorithm"),
        ("a.cpp(3,10): fatal error: 'unistd.h' file not found\n", None),
        ("a.cpp(3,10): fatal error: 'sys/mman.h' file not found\n", None),
        ("a.cpp(3,10): error: no\n", None),
    ],
)
def test_only_standard_headers_excuse_a_source(output, expected):
    assert gate.missing_standard_header(output) == expected


def test_declared_functions():
    header = (
        "MAMBA_API int32_t mamba_f(const S* p);\nMAMBA_API const char* mamba_last_error(void);\nint mamba_g(void);\n"
    )
    assert gate.declared_functions(header) == {"mamba_f", "mamba_last_error"}


def test_every_planted_source_says_what_to_expect():
    sources = sorted(broken.SOURCES.iterdir())
    assert len(sources) > 15
    assert [source.name for source in sources if not broken.expected(source)] == []
    assert {source.suffix for source in sources} == {".cu", ".cpp"}


def test_stored_values_are_those_of_the_references():
    pytest.importorskip("torch")
    from windows_gate import reference_values

    def numbers(text):
        return [float(word.rstrip(",")) for word in text.split() if word[0] in "-0123456789"]

    stored, now = reference_values.HEADER.read_text(encoding="utf-8"), reference_values.header()
    assert [line for line in stored.split("\n") if "[" in line] == [line for line in now.split("\n") if "[" in line]
    assert numbers(stored) == pytest.approx(numbers(now), rel=1e-6, abs=1e-9)
