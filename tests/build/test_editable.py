"""What an editable install compiles for, on made-up machines; and where its choice can be read."""

import pytest
from wheel_build import build_info, cmake, cuda
from wheel_build.config import read_config
from wheel_build.plan import make_plan

CPU_LINE = (
    "for the CPU alone: the build saw no GPU (TORCH_CUDA_ARCH_LIST=9.0, for example, is for a GPU, "
    "MAMBA_SSM_CUDA=on for all)"
)
ALL = ["75-real", "80-real", "90a-real", "100-real", "120-real", "120-virtual"]
NO_NVCC = "no nvcc"


def plan_of(environ, machine, in_place=True):
    return make_plan(read_config(environ), machine, "2.4.0", in_place=in_place)


def codes(plan, severity):
    return [finding.code for finding in plan.findings if finding.severity == severity]


# switches, GPUs, what else is changed, architectures ([]: CPU only), whether a line says what was chosen
CHOICES = [
    ({}, (), {}, [], True),
    ({}, (89,), {}, ["89-real"], True),
    ({}, (75, 90), {}, ["75-real", "90a-real"], True),
    ({}, (), {"driver": "580.65"}, [], True),
    ({}, (), NO_NVCC, [], True),
    ({"MAMBA_SSM_CUDA": "auto"}, (), {}, [], True),
    ({"MAMBA_SSM_CUDA": "auto"}, (86,), {}, ["86-real"], True),
    ({"MAMBA_SSM_CUDA": "auto"}, (), NO_NVCC, [], True),
    ({"MAMBA_SSM_CUDA": "on"}, (86,), {}, ["86-real"], True),
    # a GPU that this nvcc is too old or too new for
    ({}, (103,), {"nvcc_architectures": (75, 90, 100)}, ["100-real"], True),
    ({}, (120,), {"nvcc_architectures": (75, 89, 90)}, ["90-virtual", "90a-real"], True),
    ({}, (61, 89), {}, ["89-real"], True),
    # what the user set stays
    ({"MAMBA_SSM_CUDA": "on"}, (), {}, ALL, False),
    ({"MAMBA_SSM_CUDA": "off"}, (86,), {}, [], False),
    ({"TORCH_CUDA_ARCH_LIST": "9.0"}, (86,), {}, ["90a-real"], False),
    ({"TORCH_CUDA_ARCH_LIST": "9.0"}, (), {}, ["90a-real"], False),
    ({"TORCH_CUDA_ARCH_LIST": "9.0", "MAMBA_SSM_CUDA": "off"}, (86,), {}, [], False),
]


@pytest.mark.parametrize("platform", ["linux", "win32"])
@pytest.mark.parametrize(("switches", "gpus", "changes", "architectures", "said"), CHOICES)
def test_choice(machine, without_nvcc, platform, switches, gpus, changes, architectures, said):
    changes = without_nvcc if changes == NO_NVCC else changes
    plan = plan_of(switches, machine(platform=platform, gpus=gpus, **changes))
    assert not plan.fatal
    assert codes(plan, "warning") == []  # a CPU-only editable install is what it should be where there is no GPU
    assert plan.architectures.cmake == architectures
    assert plan.cuda == bool(architectures)
    assert plan.label == ("cu130" if architectures else "cpu")
    assert bool(plan.chosen) == said == (f"  editable       {plan.chosen}" in plan.as_text().splitlines())
    assert plan.as_dict()["editable"] == (plan.chosen or None)


def test_the_line_names_the_switches_that_change_it(machine):
    assert plan_of({}, machine()).chosen == CPU_LINE
    line = plan_of({}, machine(gpus=(75, 90))).chosen
    assert line.startswith("for the GPU of this machine, 7.5, 9.0 (TORCH_CUDA_ARCH_LIST=8.6, for example, is for")
    line = plan_of({}, machine(gpus=(61, 89))).chosen
    assert line.startswith("for the GPU of this machine, 6.1, 8.9, by 8.9, since this nvcc does not know 6.1 (TORCH_")
    line = plan_of({}, machine(platform="win32")).chosen
    assert '$env:TORCH_CUDA_ARCH_LIST = "9.0"' in line
    assert '$env:MAMBA_SSM_CUDA = "on"' in line


# switches, GPUs, what else is changed, the finding that stops the install
ERRORS = [
    # a GPU or its driver, and no nvcc: as with a wheel
    ({}, (86,), {"driver": "580.65"}, "nvcc-missing-with-driver"),
    ({}, (), {"driver": "580.65"}, "nvcc-missing-with-driver"),
    ({"MAMBA_SSM_CUDA": "on"}, (), {}, "nvcc-missing"),
]


@pytest.mark.parametrize(("switches", "gpus", "changes", "code"), ERRORS)
def test_error_without_nvcc(machine, without_nvcc, switches, gpus, changes, code):
    plan = plan_of(switches, machine(gpus=gpus, **without_nvcc, **changes))
    assert codes(plan, "fatal") == [code]


def test_a_gpu_that_this_nvcc_is_too_new_for_is_an_error(machine):
    plan = plan_of({}, machine(gpus=(70,)))
    assert codes(plan, "fatal") == ["architecture-unknown"]
    assert "7.0 is not among them" in plan.as_text()


def test_without_a_gpu_nobody_minds_an_nvcc_that_does_not_work(machine):
    broken = {"nvcc_trouble": "#error -- unsupported GNU version!", "nvcc_version": (11, 8)}
    assert plan_of({}, machine(**broken)).findings == ()
    assert plan_of({}, machine(gpus=(86,), **broken)).fatal


def test_it_compiles_where_a_wheel_for_the_cpu_did(machine, without_nvcc, tmp_path):
    """Whether an nvcc is here that it does not use, or none: no object is compiled twice."""
    plans = [
        plan_of({}, machine()),
        plan_of({}, machine(**without_nvcc)),
        plan_of({"MAMBA_SSM_CUDA": "off"}, machine(**without_nvcc), in_place=False),
    ]
    assert len({cmake.build_folder(tmp_path, plan, {}) for plan in plans}) == 1


def test_a_wheel_does_not_look_at_the_gpu(machine):
    plan = plan_of({}, machine(gpus=(86,)), in_place=False)
    assert plan.architectures.cmake == ALL
    assert plan.chosen == ""


def test_build_info_keeps_the_line_that_pip_hides(machine, root, tmp_path):
    library = tmp_path / "libmamba_cpu.so"
    library.write_bytes(b"kernels")
    told = build_info.describe(plan_of({}, machine()), root, tmp_path, [library])
    assert told["editable"] == CPU_LINE
    wheel = plan_of({}, machine(discovery=cuda.Discovery(None)), in_place=False)
    assert "editable" not in build_info.describe(wheel, root, tmp_path, [library])


@pytest.mark.parametrize("hook", ["build_editable", "prepare_metadata_for_build_editable"])
def test_pips_hooks_ask_for_an_editable_plan(monkeypatch, hook):
    """Both: the version in the metadata has the label of what is compiled."""
    pytest.importorskip("setuptools")
    from wheel_build import backend

    seen = []
    monkeypatch.setattr(backend.commands, "in_place", False)
    monkeypatch.setattr(backend.build_meta, hook, lambda *words: seen.append(backend.commands.in_place) or "x")
    assert getattr(backend, hook)("folder") == "x"
    assert seen == [True]
