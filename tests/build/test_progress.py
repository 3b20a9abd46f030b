"""What a build says of its own time: the plan's first line, and how far it is while ninja compiles."""

import os
import re
import shutil
import subprocess

import pytest
from wheel_build import effort, progress
from wheel_build.config import read_config
from wheel_build.plan import make_plan

CUDA_STEP = "Building CUDA object CMakeFiles/mamba_cuda_bf16.dir/ssd/cuda/kernels.cu.o"
CPU_STEP = "Building CXX object CMakeFiles/mamba_cpu_avx2.dir/norm/cpu/kernels.cpp.o"


def test_every_source_has_its_time(root):
    csrc = root / "csrc"
    assert set(effort.CPU) == {file.parents[1].name for file in csrc.glob("*/cpu/kernels.cpp")}
    assert set(effort.CUDA) == {effort.source(file.parents[1].name, file.stem) for file in csrc.glob("*/cuda/*.cu")}


@pytest.mark.parametrize(
    ("step", "architectures", "seconds"),
    [
        (CUDA_STEP, 1, effort.CUDA["ssd"]),
        (CUDA_STEP, 7, (1 + 6 * effort.FURTHER) * effort.CUDA["ssd"]),
        (CUDA_STEP.replace("/", "\\"), 1, effort.CUDA["ssd"]),  # on Windows
        (CPU_STEP, 7, effort.CPU["norm"]),
        ("Building CXX object CMakeFiles/mamba_cpu.dir/norm/cpu.cpp.o", 1, effort.DISPATCH),
        ("Linking CXX shared library lib/libmamba_cpu.so", 1, effort.DISPATCH),
    ],
)
def test_time_of_a_step(step, architectures, seconds):
    assert effort.of_step(step, architectures) == seconds


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (1, "less than a minute"),
        (80, "about a minute"),
        (100, "about 2 minutes"),
        (400, "about 7 minutes"),
        (2700, "about 45 minutes"),
    ],
)
def test_time_in_words(seconds, words):
    assert effort.words(seconds) == words


def test_estimates_are_near_what_was_measured():
    """One architecture: 232 s on two cores, 56 to 79 on 16 hyperthreads; the CPU's kernels: a minute on two."""
    every = ["float32", "float16", "bfloat16"]
    assert 210 < effort.seconds(every, 1, 2) < 260
    assert 30 < effort.seconds(every, 1, 16) < 80
    assert 40 < effort.seconds(every, 0, 2) < 100


# switches, changed facts, the plan's first line behind the version
FIRST_LINES = [
    (
        {},
        {"cores": 2},
        r"build plan for 5 architectures, about 2[05] minutes on 2 cores from scratch; "
        r"TORCH_CUDA_ARCH_LIST=native \(or 9\.0, for example\) compiles for one",
    ),
    (
        {"TORCH_CUDA_ARCH_LIST": "9.0"},
        {"cores": 2},
        r".* for 1 architecture, about 4 minutes on 2 cores from scratch",
    ),
    ({"MAMBA_SSM_CUDA": "off"}, {"cores": 1}, r"build plan for the CPU alone, about 2 minutes on 1 core from scratch"),
    (
        {"MAX_JOBS": "1", "MAMBA_SSM_CUDA": "off"},
        {},
        r".* for the CPU alone, about 2 minutes on 8 cores from \w+",
    ),
    ({}, {"platform": "win32"}, r'.*; \$env:TORCH_CUDA_ARCH_LIST = "native" \(or 9\.0, for example\) compiles for one'),
]


@pytest.mark.parametrize(("switches", "changes", "line"), FIRST_LINES)
def test_first_line(machine, switches, changes, line):
    plan = make_plan(read_config(switches), machine(**changes), "2.4.0")
    assert re.fullmatch(rf"mamba_ssm 2\.4\.0\+\w+: {line}", plan.as_text().splitlines()[0])


def test_a_plan_that_is_not_carried_out_promises_no_time(machine):
    plan = make_plan(read_config({"TORCH_CUDA_ARCH_LIST": "banana"}), machine(), "2.4.0")
    assert plan.as_text().splitlines()[0] == "mamba_ssm 2.4.0+cu130: build plan"


def test_the_time_left_follows_the_speed_seen():
    steps = [f"step {number}" for number in range(10)]
    seen = progress.Progress(steps, lambda step: 60.0, cores=2)  # 300 s by the table
    assert seen.line(0) == "0 of 10 files, about 5 minutes left"
    for done, step in enumerate(steps[:5], 1):
        seen.ended(step, done, 10)
    assert seen.left(150) == pytest.approx(150)  # as fast as the table says
    assert 450 < seen.left(600) < 600  # four times as slow
    assert seen.line(1200) == "5 of 10 files, about 15 minutes left"
    for done, step in enumerate(steps[5:], 6):
        seen.ended(step, done, 10)
    assert seen.line(1200) == "10 of 10 files: done"


def test_files_count_by_their_weight():
    seen = progress.Progress([CUDA_STEP, CPU_STEP], lambda step: effort.of_step(step, 7), cores=2)
    seen.ended(CUDA_STEP, 1, 2)
    assert seen.share > 0.95


def reported(terminal, times, count):
    """All that a Reporter writes while `count` steps of one weight end at these times."""
    written, clock = [], iter([0.0, *times])
    reporter = progress.Reporter(written.append, terminal, clock=lambda: next(clock))
    seen = progress.Progress(["step"] * count, lambda step: 1.0, cores=1)
    reporter.show(seen)
    for done in range(1, count + 1):
        seen.ended("step", done, count)
        reporter.show(seen)
    reporter.end()
    return "".join(written)


def test_a_log_gets_a_line_every_tenth_or_half_minute():
    text = reported(False, [number / 10 for number in range(101)], 100)
    assert [line.split()[0] for line in text.splitlines()] == ["0", *map(str, range(10, 101, 10))]
    text = reported(False, [0, 29, 31, 45, 62, 63], 5)
    assert len(text.splitlines()) == 6  # a fifth each
    text = reported(False, [0, 10, 31, 45, 62, *range(63, 160)], 101)
    assert [line.split()[0] for line in text.splitlines()][:3] == ["0", "2", "4"]  # half a minute each


def test_a_terminal_gets_one_line():
    text = reported(True, [0, 1, 2, 3], 3)
    assert text.count("\n") == 1
    assert text.count("\r") == 4
    before, last = text.rstrip("\n").split("\r")[-2:]
    assert last.rstrip() == "3 of 3 files: done"
    assert len(last) == len(before)  # nothing of the line before stays


def test_what_compilers_say_is_shown_below_the_line():
    written = []
    reporter = progress.Reporter(written.append, True)
    reporter.show(progress.Progress(["a"], lambda step: 1.0, cores=1))
    reporter.other("x.cpp:1: warning: unused")
    assert "".join(written).splitlines()[-1] == "x.cpp:1: warning: unused"


PROJECT = """
cmake_minimum_required(VERSION 3.20) # whatever is on PATH
project(x NONE)
foreach(name IN ITEMS a b)
    add_custom_command(
        OUTPUT ${name}.txt
        COMMAND ${CMAKE_COMMAND} -E echo "${name}: warning: here"
        COMMAND ${CMAKE_COMMAND} -E copy ${CMAKE_SOURCE_DIR}/in ${name}.txt
        DEPENDS ${CMAKE_SOURCE_DIR}/in
        COMMENT "Building CUDA object x.dir/ssd/cuda/${name}.cu.o"
    )
endforeach()
add_custom_target(all_of_it DEPENDS a.txt b.txt)
"""
GLOB = 'file(GLOB found CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/*.c")'


needs_ninja = pytest.mark.skipif(
    not (shutil.which("cmake") and shutil.which("ninja")), reason="no cmake and ninja on PATH"
)


def configured(folder, project):
    """The command that builds it."""
    (folder / "CMakeLists.txt").write_text(project)
    (folder / "in").touch()
    build = folder / "build"
    subprocess.run(["cmake", "-S", folder, "-B", build, "-G", "Ninja"], check=True, stdout=subprocess.DEVNULL)
    return ["cmake", "--build", str(build), "--target", "all_of_it"]


@needs_ninja
def test_with_ninja(tmp_path, capfd):
    """Steps become counts, other words are shown, and so is the exit status."""
    command = configured(tmp_path, PROJECT)
    assert progress.run(1, 2, command, os.environ) == 0
    out = capfd.readouterr().out
    assert "0 of 2 files, less than a minute left\n" in out
    assert "2 of 2 files: done\n" in out
    assert "a: warning: here\n" in out
    assert "Building" not in out
    assert progress.run(1, 2, command, os.environ) == 0
    assert "nothing to compile" in capfd.readouterr().out
    (tmp_path / "in").unlink()
    assert progress.run(1, 2, command, os.environ) != 0
    assert "missing and no known rule" in capfd.readouterr().out


@needs_ninja
def test_where_cmake_runs_again_files_are_counted_as_ninja_counts_them(tmp_path, capfd):
    """Before that a dry run does not know them."""
    command = configured(tmp_path, PROJECT + GLOB)
    for _ in range(2):
        (tmp_path / "new.c").touch()
        assert progress.run(1, 2, command, os.environ) == 0
        lines = [line for line in capfd.readouterr().out.splitlines() if " of " in line]
        assert [re.match(r"\d of [2-9] files", line)[0][0] for line in lines] == ["1", "2"]
        (tmp_path / "new.c").unlink()
        (tmp_path / "in").write_text("changed")
