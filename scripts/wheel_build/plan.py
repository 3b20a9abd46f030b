"""The plan: everything a build will do, decided before it does anything. `make_plan` is pure; `load` looks first."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from . import cuda, editable, effort, facts, preflight, preflight_windows, tools, version
from .advice import with_variables
from .architectures import Architectures, check_spelling, plan_architectures
from .config import Config, SwitchError, read_config
from .facts import Facts
from .preflight import FATAL, NOTE, WARNING, Finding

DEFAULT_NVCC_THREADS = 8
# msvc.Discovery.source, where the environment is taken as it is
WITHOUT_VSWHERE = {
    "prompt": "that of this Developer prompt",
    "DISTUTILS_USE_SDK": "the environment as it is (DISTUTILS_USE_SDK)",
    "PATH": "the environment as it is (cl is on PATH; INCLUDE and LIB are set)",
}


@dataclass(frozen=True)
class Plan:
    config: Config
    facts: Facts
    cuda: bool
    architectures: Architectures
    nvcc_threads: int
    jobs: int
    reason: str  # why that many jobs
    base_version: str
    label: str
    version: str
    wheel: str
    findings: tuple[Finding, ...]
    chosen: str = ""  # what an editable install is compiled for, where no switch says it

    @property
    def fatal(self) -> bool:
        return any(finding.severity == FATAL for finding in self.findings)

    def unseen(self) -> Plan:
        """The plan of a build whose output nobody sees unless it fails, as under pip: no warning tells of the CPU-only
        wheel, so it must be asked for.
        """
        chance = ("cuda-left-out", WARNING)
        findings = (
            replace(finding, severity=FATAL) if (finding.code, finding.severity) == chance else finding
            for finding in self.findings
        )
        return replace(self, findings=tuple(findings))

    @property
    def seconds(self) -> float:
        """About how long this takes where nothing is compiled yet."""
        return effort.seconds(self.config.dtypes, self.architectures.count, min(self.facts.cores, self.processes))

    @property
    def processes(self) -> int:
        """Compilers that run at a time."""
        return self.jobs * max(1, min(self.nvcc_threads, self.architectures.count))

    @property
    def headline(self) -> str:
        if self.fatal:
            return f"mamba_ssm {self.version}: build plan"
        count = self.architectures.count
        what = f"{count} architecture{'s' if count > 1 else ''}" if count else "the CPU alone"
        cores = f"{self.facts.cores} core{'s' if self.facts.cores > 1 else ''}"
        line = f"mamba_ssm {self.version}: build plan for {what}, {effort.words(self.seconds)} on {cores} from scratch"
        if count > 1:
            one = with_variables(self.facts.platform, TORCH_CUDA_ARCH_LIST="native")
            line += f"; {one} (or 9.0, for example) compiles for one"
        return line

    @property
    def glibc(self) -> str:
        """The oldest glibc that a release build is linked for; "" leaves that to the system that builds."""
        return version.RELEASE_GLIBC if self.config.release and self.facts.platform == "linux" else ""

    @property
    def tag(self) -> tuple[str, str, str]:
        return version.wheel_tag(self.facts.platform, self.facts.machine, self.config.release)

    @property
    def libraries(self) -> list[str]:
        return version.library_names(self.facts.platform, self.cuda)

    def as_dict(self) -> dict:
        """The plan for machines (`setup.py configure --json`). Keys are stable."""
        nvcc = self.facts.discovery.nvcc
        return {
            "cuda": self.cuda,
            "architectures": self.architectures.cmake,
            "dtypes": self.config.dtypes,
            "jobs": self.jobs,
            "nvcc_threads": self.nvcc_threads,
            "version": self.version,
            "wheel": self.wheel,
            "debug": self.config.debug,
            "label": self.label,
            "editable": self.chosen or None,
            "minutes": round(self.seconds / 60, 1),
            "tools": {
                "python": self.facts.python,
                "cmake": self.facts.cmake and asdict(self.facts.cmake),
                "ninja": self.facts.ninja and asdict(self.facts.ninja),
                "compiler": self.facts.compiler and asdict(self.facts.compiler),
                "nvcc": nvcc and {"path": nvcc.path, "version": self.facts.nvcc_full_version, "source": nvcc.source},
            },
            "findings": [asdict(finding) for finding in self.findings],
        }

    def as_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2)

    def as_text(self) -> str:
        nvcc = self.facts.discovery.nvcc
        tool = lambda found: f"{found.version} ({found.path})" if found else "not found"  # noqa: E731
        lines = [
            self.headline,
            f"  editable       {self.chosen}" if self.chosen else f"  wheel          {self.wheel}",
            f"  python         {self.facts.python} (the wheel serves every CPython >= 3.10)",
            f"  cmake          {tool(self.facts.cmake)}",
            f"  ninja          {tool(self.facts.ninja)}",
            f"  C++ compiler   {tool(self.facts.compiler)}",
        ]
        studio = self.facts.msvc
        if studio and studio.toolset:
            name, toolset = studio.toolset.studio.name, studio.toolset.version
            lines.append(f"  Visual Studio  {name}, toolset {toolset} (found by vswhere)")
        elif studio and studio.source:
            lines.append(f"  Visual Studio  {WITHOUT_VSWHERE[studio.source]}")
        if nvcc:
            lines.append(f"  nvcc           {self.facts.nvcc_full_version} ({nvcc.path}, found by {nvcc.source})")
        else:
            lines.append("  nvcc           " + ("not needed" if self.config.cuda == "off" else "not found"))
        lines.append("  CUDA           " + ("yes" if self.cuda else "no: CPU only"))
        if self.cuda:
            lines.append(f"  architectures  {' '.join(self.architectures.cmake)}")
        lines.append(f"  dtypes         {' '.join(self.config.dtypes)}")
        threads = f" x {self.nvcc_threads} nvcc threads" if self.cuda else ""
        lines.append(f"  jobs           {self.jobs}{threads} ({self.reason})")
        if self.glibc:
            lines.append(f"  release        for glibc {self.glibc} and newer, linked by zig {tool(self.facts.zig)}")
        if self.config.debug:
            lines.append("  debug          on: symbols, line information, assertions")
        if self.config.cmake_args:
            lines.append(f"  CMAKE_ARGS     {' '.join(self.config.cmake_args)}")
        for finding in self.findings:
            lines.append(f"{finding.severity.upper()} [{finding.code}] {finding.fact}")
            lines.append(f"  cure: {finding.cure}")
        return "\n".join(lines)


def plan_jobs(
    config: Config, cuda_on: bool, architectures: int, cores: int, memory: int | None
) -> tuple[int, int, str]:
    """(jobs, nvcc threads, why): as many compilations as there are cores, as few as memory holds."""
    threads = 1
    if cuda_on:
        by_memory = max(1, memory // preflight.MEMORY_PER_NVCC_THREAD) if memory is not None else DEFAULT_NVCC_THREADS
        threads = config.nvcc_threads or max(1, min(DEFAULT_NVCC_THREADS, architectures, by_memory))
    # nvcc uses no more threads than there are architectures, whatever it was told.
    busy = max(1, min(threads, architectures)) if cuda_on else 1
    each = busy * preflight.MEMORY_PER_NVCC_THREAD if cuda_on else preflight.MEMORY_PER_JOB
    if config.max_jobs:
        return config.max_jobs, threads, "MAX_JOBS"
    jobs = max(1, -(-cores // busy))
    reason = f"{cores} cores"
    if memory is not None:
        reason += f", {memory / facts.GIB:.0f} GiB of free memory at {each / facts.GIB:.0f} a job"
        jobs = max(1, min(jobs, memory // each))
    return jobs, threads, reason


def make_plan(
    config: Config,
    seen: Facts,
    base: str,
    from_sdist: bool = False,
    other_generator: bool = False,
    in_place: bool = False,
) -> Plan:
    """Decides everything from the switches and the machine's facts. in_place: of an editable install."""
    config, chosen = editable.for_this_machine(config, seen) if in_place else (config, "")
    findings = preflight.check_switches(config) + preflight.check_cuda(config, seen)
    cuda_on = config.cuda != "off" and seen.discovery.nvcc is not None
    architectures = Architectures(())
    if cuda_on and seen.nvcc_version is not None and seen.nvcc_architectures:
        try:
            architectures = plan_architectures(config.arch_list, seen.nvcc_architectures, seen.nvcc_version, seen.gpus)
        except SwitchError as error:
            findings.append(preflight.switch_finding(error))
    else:
        try:
            check_spelling(config.arch_list)
        except SwitchError as error:
            findings.append(preflight.switch_finding(error))
    if architectures.left_out:
        findings.append(
            Finding(
                "architectures-left-out",
                NOTE,
                f"nvcc {seen.nvcc_full_version} does not know {', '.join(architectures.left_out)} of the default list",
                "newer GPUs run the PTX included; for machine code use a newer nvcc",
            )
        )
    label = version.local_label(config.local_version, cuda_on, seen.nvcc_version, config.debug)
    findings += preflight.check_tools(config, seen, other_generator)
    findings += preflight.check_release(config, seen)
    findings += preflight.check_paths(seen, cuda_on) + preflight.check_room(seen, cuda_on)
    findings += preflight_windows.check(config, seen, label)
    jobs, threads, reason = plan_jobs(config, cuda_on, architectures.count, seen.cores, seen.memory)
    wheel_version = version.wheel_version(base, label, from_sdist)
    if from_sdist and (config.local_version or config.debug):
        findings.append(
            Finding(
                "label-unused",
                NOTE,
                f"this is an unpacked sdist: its wheel keeps the sdist's version, without the label {label}",
                "build from a checkout for a labelled version",
            )
        )
    return Plan(
        config=config,
        facts=seen,
        cuda=cuda_on,
        architectures=architectures,
        nvcc_threads=threads,
        jobs=jobs,
        reason=reason,
        base_version=base,
        label=label,
        version=wheel_version,
        wheel=version.wheel_name(wheel_version, seen.platform, seen.machine, config.release),
        findings=tuple(findings),
        chosen=chosen,
    )


def load(root: Path, environ: Mapping[str, str] = os.environ, in_place: bool = False) -> Plan:
    """Reads the switches, looks at the machine, and decides."""
    config = read_config(environ)
    seen = facts.gather(root, environ, in_place)
    other_generator = bool(environ.get("CMAKE_GENERATOR")) or any(word.startswith("-G") for word in config.cmake_args)
    return make_plan(config, seen, version.base_version(root), version.is_sdist(root), other_generator, in_place)


def show(text: str, end: str = "\n") -> None:
    """Prints what may hold any path, also where Windows' console or pip's pipe knows few characters."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), end=end, flush=True)


def present(plan: Plan) -> None:
    """Prints the plan, and ends this process where a finding is fatal."""
    show(plan.as_text())
    if plan.fatal:
        raise SystemExit("mamba_ssm: the build stops here; each FATAL line above says why, and its cure")


def more_requirements(environ: Mapping[str, str]) -> list[str]:
    """Build requirements to add: what a release build needs, and NVIDIA's nvcc when it is asked for and not there."""
    config = read_config(environ)
    release = ["ziglang", "auditwheel"] if config.release and sys.platform == "linux" else []
    return release + nvcc_requirements(config, environ)


def nvcc_requirements(config: Config, environ: Mapping[str, str]) -> list[str]:
    if config.cuda != "on":
        return []
    discovery = tools.discover(environ)
    # A CUDACXX that is wrong is the user's to mend: the plan says so.
    named = any(variable == "CUDACXX" for variable, _ in discovery.wrong)
    return [] if named else cuda.requirements(config.cuda, discovery.nvcc)
