"""The examination behind `python -m mamba_ssm`: facts first, then a small computation on every device."""

import platform
import typing
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from mamba_ssm import _neighbours
from mamba_ssm._native import abi, loader
from mamba_ssm._native.advice import DRIVER_FLOORS
from mamba_ssm._native.errors import NativeError, cuda_version_text, driver_problem, shell_command
from mamba_ssm.version import __version__

# float32 kernels against float32 references on inputs of size about 1: rounding of a 70-step recurrence, and of
# approximate exponentials, stays below 1e-4 of the largest value.
_TOLERANCE = 1e-3


def examine() -> dict[str, typing.Any]:
    """The whole report as a dict of plain values; report["healthy"] is the verdict."""
    report: dict[str, typing.Any] = {
        "versions": _versions(),
        "build": {},
        "libraries": {},
        "driver": {},
        "gpus": [],
        "self_test": {},
    }
    problems: list[str] = []
    notes: list[str] = []
    try:
        report["build"] = loader.build_info()
    except Exception as error:
        problems.append(str(error))
    if report["build"].get("cross_built"):
        notes.append("this wheel was cross-built on Linux and has not been run on Windows by who built it")
    _examine_cpu(report, problems, notes)
    _examine_cuda(report, problems, notes)
    for found, more in zip((problems, notes), _neighbours.examine(), strict=True):
        found += more
    problems = list(dict.fromkeys(problems))  # a damaged build_info.json is met by each library
    report["problems"], report["notes"] = problems, notes
    report["healthy"] = not problems
    report["verdict"] = _verdict(report)
    return report


def _versions() -> dict[str, str | None]:
    return {
        "mamba_ssm": __version__,
        "location": str(Path(__file__).resolve().parent),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _examine_library(
    kind: str, report: dict[str, typing.Any], problems: list[str], notes: list[str]
) -> abi.MambaLibraryInfo | None:
    """Loads a library if its file is as it was built, and notes what it says; returns its facts, or None."""
    path = loader.library_path(kind)
    entry = report["libraries"][kind] = {"path": str(path), "loaded": False}
    try:
        if path.exists():
            problem = loader.damage(kind, hashed=True)
            if problem:
                raise NativeError(problem)
            if path.name not in loader.build_info().get("libraries", {}):
                notes.append(f"build_info.json does not tell of {path.name}: whether the file is whole was not checked")
        facts = loader.info(kind)
    except Exception as error:
        entry["error"] = str(error)
        problems.append(str(error))
        return None
    off = [
        name
        for name, there in (("float16", facts.supports_float16), ("bfloat16", facts.supports_bfloat16))
        if not there
    ]
    entry.update(loaded=True, abi_version=facts.abi_version, isa=facts.isa.decode(), dtypes_off=off)
    return facts


def _examine_cpu(report: dict[str, typing.Any], problems: list[str], notes: list[str]) -> None:
    if _examine_library("cpu", report, problems, notes) is not None:
        _self_test("cpu", report, problems)


def _examine_cuda(report: dict[str, typing.Any], problems: list[str], notes: list[str]) -> None:
    has_library = loader.library_path("cuda").exists()
    wants_library = bool(report["build"].get("cuda"))
    gpus = torch.cuda.device_count() if torch.version.cuda and torch.cuda.is_available() else 0
    if not has_library:
        report["libraries"]["cuda"] = {"path": str(loader.library_path("cuda")), "loaded": False}
        if wants_library:
            problems.append(
                "lib/build_info.json says that CUDA kernels were built, but the library is missing: reinstall"
            )
        elif gpus:
            build = shell_command("python setup.py bdist_wheel", MAMBA_SSM_CUDA="on")
            problems.append(
                f"torch sees {gpus} GPU(s), but this is a CPU-only mamba_ssm: CUDA tensors will raise. Install a wheel "
                f"with a CUDA label (+cu...), or build one where nvcc is found: `{build}`"
            )
        elif torch.version.cuda:
            notes.append("CPU-only mamba_ssm with a CUDA build of torch; no GPU is visible, so nothing is missing")
        return
    facts = _examine_library("cuda", report, problems, notes)
    if facts is None:
        return
    runtime = facts.cuda_runtime_version
    report["driver"] = {
        "version": _driver_version(),
        "supports_cuda": cuda_version_text(facts.cuda_driver_version) if facts.cuda_driver_version else None,
        "wheel_cuda": cuda_version_text(runtime),
        "needed": DRIVER_FLOORS.get(runtime // 1000),
    }
    problem = driver_problem(facts.cuda_driver_version, runtime)
    if problem and facts.cuda_driver_version:
        problems.append(problem)
    if torch.version.hip:
        notes.append("this torch is built for ROCm, which mamba_ssm does not support: CPU only")
    elif torch.version.cuda is None:
        notes.append("this torch is built without CUDA: mamba_ssm's CUDA kernels stay unused, its CPU kernels work")
    elif gpus == 0:
        notes.append("torch sees no GPU: mamba_ssm's CUDA kernels stay unused, its CPU kernels work")
    for index in range(gpus):
        _examine_gpu(index, report, problems)


def _examine_gpu(index: int, report: dict[str, typing.Any], problems: list[str]) -> None:
    major, minor = torch.cuda.get_device_capability(index)
    entry = {"index": index, "name": torch.cuda.get_device_name(index), "architecture": f"sm_{major}{minor}"}
    report["gpus"].append(entry)
    problem = loader.cuda_problem(index)
    if problem:
        problems.append(f"cuda:{index}: {problem}")
    else:
        _self_test(f"cuda:{index}", report, problems)


def _driver_version() -> str | None:
    """The installed NVIDIA driver's version where Linux says it, else None."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split()
    except OSError:
        return None
    return next((word for word in words if word.replace(".", "").isdigit() and "." in word), None)


# ---- self-test -------------------------------------------------------------------------------------------------------


def _self_test(device: str, report: dict[str, typing.Any], problems: list[str]) -> None:
    """Runs every kernel on a small problem and compares it with the reference on the CPU."""
    results = report["self_test"][device] = {}
    for name, test in _TESTS.items():
        try:
            error = test(device)
        except Exception as failure:
            results[name] = {"ok": False, "error": f"{type(failure).__name__}: {failure}"}
            problems.append(f"self-test of {name} on {device} failed: {failure}")
            continue
        results[name] = {"ok": error <= _TOLERANCE, "relative_error": error}
        if not error <= _TOLERANCE:  # not ">": NaN must fail
            problems.append(
                f"self-test of {name} on {device} is wrong: relative error {error:.1e}, expected "
                f"at most {_TOLERANCE:.0e}"
            )


def _relative_error(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    worst = 0.0
    for ours, theirs in zip(found, expected, strict=True):
        difference = (ours.detach().cpu() - theirs.detach()).abs().max().item()
        error = difference / max(theirs.detach().abs().max().item(), 1e-6)
        if not error <= worst:  # keeps NaN
            worst = error
    return worst


def _inputs(shapes: list[tuple[int, ...]], device: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ours, theirs = [], []
    for shape in shapes:
        tensor = torch.randn(*shape, generator=generator)
        theirs.append(tensor)
        ours.append(tensor.to(device, copy=True))
    return ours, theirs


def _with_gradients(function: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [tensor.requires_grad_() for tensor in tensors]
    with torch.enable_grad():
        out = function(*leaves)
        grads = torch.autograd.grad(out.square().sum(), leaves)
    return [out, *grads]


def _test_scan(device: str) -> float:
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn, selective_scan_ref

    batch, dim, seqlen, dstate = 2, 24, 70, 16
    wide, matrix = (batch, dim, seqlen), (batch, dstate, seqlen)
    ours, theirs = _inputs([wide, wide, (dim, dstate), matrix, matrix, (dim,), wide, (dim,)], device)

    def run(scan: Callable[..., typing.Any]) -> Callable[..., torch.Tensor]:
        return lambda u, delta, A, B, C, D, z, bias: scan(u, delta, -A.square(), B, C, D, z, bias, True)

    return _relative_error(
        _with_gradients(run(selective_scan_fn), ours), _with_gradients(run(selective_scan_ref), theirs)
    )


def _test_conv(device: str) -> float:
    from mamba_ssm.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_ref

    ours, theirs = _inputs([(2, 24, 37), (24, 4), (24,)], device)

    def run(conv: Callable[..., typing.Any]) -> Callable[..., torch.Tensor]:
        return lambda x, weight, bias: conv(x, weight, bias, activation="silu")

    return _relative_error(
        _with_gradients(run(causal_conv1d_fn), ours), _with_gradients(run(causal_conv1d_ref), theirs)
    )


def _test_conv_update(device: str) -> float:
    from mamba_ssm.ops.causal_conv1d import causal_conv1d_update, causal_conv1d_update_ref

    ours, theirs = _inputs([(2, 24), (2, 24, 4), (24, 4), (24,)], device)

    def run(update: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        x, state, weight, bias = tensors
        return [update(x, state, weight, bias, "silu"), state]

    with torch.no_grad():
        return _relative_error(run(causal_conv1d_update, ours), run(causal_conv1d_update_ref, theirs))


def _test_state_update(device: str) -> float:
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update, selective_state_update_ref

    ours, theirs = _inputs([(2, 24, 16), (2, 24), (2, 24), (24, 16), (2, 16), (2, 16), (24,), (2, 24), (24,)], device)

    def run(update: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        state, x, dt, A, B, C, D, z, bias = tensors
        return [update(state, x, dt, -A.square(), B, C, D, z, bias, True), state]

    with torch.no_grad():
        return _relative_error(run(selective_state_update, ours), run(selective_state_update_ref, theirs))


_TESTS = {
    "selective_scan": _test_scan,
    "causal_conv1d": _test_conv,
    "causal_conv1d_update": _test_conv_update,
    "selective_state_update": _test_state_update,
}

# ---- text ------------------------------------------------------------------------------------------------------------


def _verdict(report: dict[str, typing.Any]) -> str:
    tested = [device for device, results in report["self_test"].items() if all(r["ok"] for r in results.values())]
    if report["healthy"]:
        return f"healthy: mamba_ssm works on {', '.join(tested)}"
    works = f"works on {', '.join(tested)}; " if tested else ""
    count = len(report["problems"])
    return f"NOT healthy: {works}{count} problem{'s' if count > 1 else ''}: {report['problems'][0]}"


def render(report: dict[str, typing.Any]) -> str:
    """The report as lines of text; the last one is the verdict."""
    versions, build, driver = report["versions"], report["build"], report["driver"]
    lines = [
        f"mamba_ssm   {versions['mamba_ssm']} ({versions['location']})",
        f"torch       {versions['torch']} (CUDA: {versions['torch_cuda'] or 'none'})",
        f"python      {versions['python']} on {versions['platform']}",
    ]
    if build:
        architectures = ", ".join(map(str, build.get("architectures") or [])) or "none"
        label, nvcc = build.get("local_label") or "none", build.get("nvcc_version") or "none"
        lines.append(f"wheel       label {label}, nvcc {nvcc}, architectures {architectures}")
    else:
        lines.append("wheel       how it was built is not known: no build_info.json, or one that cannot be read")
    for kind, entry in report["libraries"].items():
        if entry["loaded"]:
            off = f", without {' and '.join(entry['dtypes_off'])}" if entry["dtypes_off"] else ""
            lines.append(f"library     mamba_{kind}: loaded ({entry['isa']}{off})")
        else:
            lines.append(f"library     mamba_{kind}: {entry.get('error') or 'not in this installation'}")
    if driver:
        lines.append(
            f"driver      {driver['version'] or 'unknown'}, supports CUDA: {driver['supports_cuda'] or 'no'}; "
            f"the wheel (CUDA {driver['wheel_cuda']}) needs driver {driver['needed'] or '?'}"
        )
    lines += [f"gpu         cuda:{gpu['index']} {gpu['name']} ({gpu['architecture']})" for gpu in report["gpus"]]
    for device, results in report["self_test"].items():
        for name, result in results.items():
            outcome = "ok" if result["ok"] else "FAILED"
            detail = result.get("error") or f"relative error {result['relative_error']:.1e}"
            lines.append(f"self-test   {device} {name}: {outcome} ({detail})")
    lines += [f"note        {note}" for note in report["notes"]]
    lines += [f"problem     {problem}" for problem in report["problems"]]
    lines.append(f"verdict     {report['verdict']}")
    return "\n".join(lines)
