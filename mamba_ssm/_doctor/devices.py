"""torch, the rest of mamba_ssm, and the GPUs: imported here, when the files have been looked at."""

import re
import sys
import typing
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

from mamba_ssm._doctor.files import PACKAGE, SITE
from mamba_ssm._native import loader
from mamba_ssm._native.errors import shell_command

if typing.TYPE_CHECKING:
    from types import ModuleType

Report = dict[str, typing.Any]
_OLDEST = (2, 2)


def examine(report: Report, problems: list[str], notes: list[str]) -> None:
    """Fills report["gpus"] and ["self_test"], and torch's versions. Every device that can be used is tested."""
    torch = import_all(report, problems)
    if torch is None:
        return
    if report["libraries"]["cpu"]["loaded"]:
        _test("cpu", report, problems)
    gpus = torch.cuda.device_count() if torch.version.cuda and torch.cuda.is_available() else 0
    if report["libraries"]["cuda"]["loaded"]:
        notes += _unused(torch, gpus)
        for index in range(gpus):
            _examine_gpu(torch, index, report, problems)
    elif not loader.library_path("cuda").exists() and not report["build"].get("cuda"):
        if gpus:
            build = shell_command("python setup.py bdist_wheel", MAMBA_SSM_CUDA="on")
            problems.append(
                f"torch sees {gpus} GPU(s), but this is a CPU-only mamba_ssm: CUDA tensors will raise. Install a wheel "
                f"with a CUDA label (+cu...), or build one where nvcc is found: `{build}`"
            )
        elif torch.version.cuda:
            notes.append("CPU-only mamba_ssm with a CUDA build of torch; no GPU is visible, so nothing is missing")


def import_all(report: Report, problems: list[str]) -> "ModuleType | None":
    """torch, when it and mamba_ssm were imported; None if one of them cannot be, which problems then tell."""
    torch = _import_torch(report, problems)
    return torch if torch is not None and _import_package(problems) else None


def _import_torch(report: Report, problems: list[str]) -> "ModuleType | None":
    needed = f"mamba_ssm needs torch {_OLDEST[0]}.{_OLDEST[1]} or newer"
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            problems.append(f"torch cannot be imported: {error}. Install that, or reinstall torch")
        else:
            problems.append(f"{needed}, which {sys.executable} does not have; do: pip install torch")
        return None
    except Exception as error:  # a library that is missing, of another system or damaged; a folder called torch
        problems.append(f"torch cannot be imported: {type(error).__name__}: {error}. Reinstall torch")
        return None
    if not hasattr(torch, "__version__"):
        place = getattr(torch, "__file__", None) or f"the folder {next(iter(torch.__path__))}"
        problems.append(
            f"`import torch` takes {place}, which is not PyTorch. Rename or remove it, or start Python in another "
            "folder"
        )
        return None
    report["versions"].update(torch=torch.__version__, torch_cuda=torch.version.cuda)
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < _OLDEST:
        problems.append(f"{needed}, and this is {torch.__version__}; do: pip install --upgrade torch")
        return None
    return torch


def _import_package(problems: list[str]) -> bool:
    """Imports mamba_ssm as a program would, from this package's folder. So far it is an empty module, unless the doctor
    was called by a program that uses it.
    """
    try:
        if not hasattr(sys.modules["mamba_ssm"], "Mamba"):
            spec = PathFinder.find_spec("mamba_ssm", [str(SITE)])
            if spec is None or spec.loader is None or spec.origin is None:
                raise ImportError(f"{PACKAGE / '__init__.py'} is missing")
            sys.modules["mamba_ssm"] = module_from_spec(spec)
            spec.loader.exec_module(sys.modules["mamba_ssm"])
        from mamba_ssm._doctor import self_test  # noqa: F401
    except Exception as error:
        problems.append(f"mamba_ssm cannot be imported: {type(error).__name__}: {error}")
        return False
    return True


def _unused(torch: "ModuleType", gpus: int) -> typing.Iterator[str]:
    if torch.version.hip:
        yield "this torch is built for ROCm, which mamba_ssm does not support: CPU only"
    elif torch.version.cuda is None:
        yield "this torch is built without CUDA: mamba_ssm's CUDA kernels stay unused, its CPU kernels work"
    elif gpus == 0:
        yield "torch sees no GPU: mamba_ssm's CUDA kernels stay unused, its CPU kernels work"


def _examine_gpu(torch: "ModuleType", index: int, report: Report, problems: list[str]) -> None:
    try:
        major, minor = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        problem = loader.cuda_problem(index)
    except Exception as error:  # torch sees a GPU that it cannot use
        problems.append(f"cuda:{index} cannot be used: {type(error).__name__}: {error}")
        return
    report["gpus"].append({"index": index, "name": name, "architecture": f"sm_{major}{minor}"})
    if problem:
        problems.append(f"cuda:{index}: {problem}")
    else:
        _test(f"cuda:{index}", report, problems)


def _test(device: str, report: Report, problems: list[str]) -> None:
    from mamba_ssm._doctor import self_test

    report["self_test"][device] = self_test.run(device, problems)
