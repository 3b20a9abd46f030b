"""The build switches: read from the environment once, strictly, into one frozen dataclass."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .spelling import misspelt

TRUE = ("1", "true", "yes", "on")
FALSE = ("0", "false", "no", "off")
# Older build scripts set these for upstream, which can download a wheel instead of building one. We never do.
WITHOUT_EFFECT = ("MAMBA_FORCE_BUILD", "MAMBA_KEEP_CUDA_BUILD")
# What the plan decides must not be decided a second time behind its back.
PLANNED_BY_SWITCHES = {
    "CMAKE_CUDA_ARCHITECTURES": "TORCH_CUDA_ARCH_LIST",
    "CMAKE_CUDA_COMPILER": "CUDACXX or CUDA_HOME",
    "CMAKE_CUDA_HOST_COMPILER": "CUDAHOSTCXX",
    "CMAKE_CXX_COMPILER": "CXX",
    "CMAKE_BUILD_TYPE": "DEBUG",
    "MAMBA_CUDA": "MAMBA_SSM_CUDA",
    "MAMBA_DISABLE_BF16": "MM_DISABLE_BF16",
    "MAMBA_DISABLE_HALF": "MM_DISABLE_HALF",
    "MAMBA_DEBUG": "DEBUG",
    "MAMBA_NVCC_THREADS": "NVCC_THREADS",
    "MAMBA_GLIBC": "MAMBA_RELEASE",
    "MAMBA_ZIG": "MAMBA_RELEASE",
    "MAMBA_OUTPUT_DIR": "nothing (the wheel's folder is fixed)",
}
# What compilers read besides their command line: CMake's variables, nvcc's two, cl's two (before and after it).
COMPILER_FLAGS = ("CFLAGS", "CXXFLAGS", "CUDAFLAGS", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CL", "_CL_")
# What makes cmake do something else than configure our sources in the build's folder.
OTHER_WORK = re.compile(r"-[SBHNPE].*|--(build|help|install|list-presets|open|preset|version|workflow)(=.*)?")
LATEST_DATE = 4354819198  # 2107-12-31 23:59:58, the last that a zip archive can hold
LOCAL_LABEL = re.compile(r"[a-z0-9]+(?:[-_.][a-z0-9]+)*", re.IGNORECASE)


class SwitchError(Exception):
    """One switch holds a value that it cannot take."""

    def __init__(self, switch: str, value: str, allowed: str, code: str = "switch-invalid") -> None:
        super().__init__(f"{switch}={value!r} is not understood; allowed: {allowed}")
        self.switch, self.value, self.allowed, self.code = switch, value, allowed, code


@dataclass(frozen=True)
class Config:
    """What the user asked for. None and "" mean: not said, the plan decides."""

    arch_list: str = ""
    nvcc_threads: int | None = None
    max_jobs: int | None = None
    disable_bf16: bool = False
    disable_half: bool = False
    cuda: str = ""  # auto, on or off
    local_version: str = ""
    debug: bool = False
    release: bool = False
    source_date: int | None = None
    cmake_args: tuple[str, ...] = ()
    cxx: str = ""
    cuda_host: str = ""
    compiler_flags: tuple[tuple[str, str], ...] = ()  # the variables of COMPILER_FLAGS that are set
    notes: tuple[str, ...] = ()
    misspelt: tuple[tuple[str, str], ...] = ()  # (variable, the switch that may be meant, or "")
    errors: tuple[SwitchError, ...] = field(default=())

    @property
    def any_host_compiler(self) -> bool:
        """Whether nvcc is told not to look at its host compiler's version."""
        return any("-allow-unsupported-compiler" in value for _, value in self.compiler_flags)

    @property
    def dtypes(self) -> list[str]:
        disabled = {"float16": self.disable_half, "bfloat16": self.disable_bf16}
        return [dtype for dtype in ("float32", "float16", "bfloat16") if not disabled.get(dtype)]


def parse_boolean(switch: str, value: str) -> bool:
    word = value.strip().lower()
    if word in TRUE:
        return True
    if word in FALSE or not word:
        return False
    raise SwitchError(switch, value, "1/0, true/false, yes/no, on/off in any case, or empty for off")


def parse_positive(switch: str, value: str) -> int | None:
    word = value.strip()
    if not word:
        return None
    if re.fullmatch(r"[0-9]{1,4}", word) and int(word) > 0:
        return int(word)
    raise SwitchError(switch, value, "a positive integer up to 9999, or empty for the default")


def parse_source_date(switch: str, value: str) -> int | None:
    word = value.strip()
    if not word:
        return None
    if re.fullmatch(r"[0-9]{1,12}", word) and int(word) <= LATEST_DATE:
        return int(word)
    raise SwitchError(switch, value, f"seconds since 1970, up to {LATEST_DATE}, or empty for the time of the commit")


def parse_cuda(switch: str, value: str) -> str:
    word = value.strip().lower()
    if word in ("", "auto", "on", "off"):
        return word
    raise SwitchError(switch, value, "auto, on or off, or empty for the default")


def parse_local_version(switch: str, value: str) -> str:
    """PEP 440: letters and digits in segments, normalised to lower case with dots."""
    word = value.strip()
    if word and not LOCAL_LABEL.fullmatch(word):
        raise SwitchError(
            switch,
            value,
            "a PEP 440 local label: letters and digits in segments separated by '.', '-' or '_', such as cu130.mine",
        )
    segments = re.split(r"[-_.]", word.lower())
    return ".".join(str(int(segment)) if segment.isdigit() else segment for segment in segments)


def parse_cmake_args(switch: str, value: str) -> tuple[str, ...]:
    words = _split(switch, value)
    before = ""
    # CMake also takes "-D NAME=value" in two words.
    for word in re.sub(r"(^|\0)(-[DUGATC])\0(?=[^\0])", r"\1\2", "\0".join(words)).split("\0"):
        defined = re.match(r"-D([^:=]*)(?::[^=]*)?(=.*)?", word, re.DOTALL)
        name = defined[1] if defined else ""
        # conda's environments say Release, which is what the plan says.
        if name in PLANNED_BY_SWITCHES and (name, defined[2]) != ("CMAKE_BUILD_TYPE", "=Release"):
            by = PLANNED_BY_SWITCHES[name]
            raise SwitchError(switch, value, f"any CMake argument but -D{name}, which is set by {by}")
        if defined and not (name and defined[2]):
            raise SwitchError(switch, value, f"arguments such as -DNAME=VALUE ({word!r} is none)")
        if OTHER_WORK.fullmatch(word):
            raise SwitchError(switch, value, f"arguments to configure with ({word!r} makes cmake do something else)")
        # The value of an option may be a word of its own, as in --toolchain FILE.
        if word and not word.startswith("-") and not (before.startswith("--") and "=" not in before):
            raise SwitchError(switch, value, f"CMake's options, which begin with a hyphen ({word!r} does not)")
        before = word
    return words


def _split(switch: str, value: str) -> tuple[str, ...]:
    """Splits as a shell does, but leaves backslashes alone: they are path separators on Windows."""
    words, word, quote, started = [], "", "", False
    for char in value:
        if quote:
            if char == quote:
                quote = ""
            else:
                word += char
        elif char in "\"'":
            quote, started = char, True
        elif char.isspace():
            if word or started:
                words.append(word)
            word, started = "", False
        else:
            word += char
    if quote:
        raise SwitchError(switch, value, f"arguments with every {quote} closed")
    if word or started:
        words.append(word)
    return tuple(words)


# field of Config: (switch, parser)
SWITCHES: dict[str, tuple[str, Callable]] = {
    "nvcc_threads": ("NVCC_THREADS", parse_positive),
    "max_jobs": ("MAX_JOBS", parse_positive),
    "disable_bf16": ("MM_DISABLE_BF16", parse_boolean),
    "disable_half": ("MM_DISABLE_HALF", parse_boolean),
    "cuda": ("MAMBA_SSM_CUDA", parse_cuda),
    "local_version": ("MAMBA_LOCAL_VERSION", parse_local_version),
    "debug": ("DEBUG", parse_boolean),
    "release": ("MAMBA_RELEASE", parse_boolean),
    "source_date": ("SOURCE_DATE_EPOCH", parse_source_date),
    "cmake_args": ("CMAKE_ARGS", parse_cmake_args),
}

# Every name that means something here: the switches, MAMBA_SSM_CPU_ISA of the run time, and what is easily misspelt.
NAMES = (
    *(name for name, _ in SWITCHES.values()),
    "TORCH_CUDA_ARCH_LIST",
    "MAMBA_SSM_CPU_ISA",
    "CUDA_HOME",
    "CUDAHOSTCXX",
)


def read_config(environ: Mapping[str, str]) -> Config:
    """Reads every switch. Wrong values are collected in `errors`, so that one run names them all.

    TORCH_CUDA_ARCH_LIST is kept as written: what it may hold depends on the nvcc found (architectures.py).
    """
    values: dict = {}
    errors = []
    for name, (switch, parse) in SWITCHES.items():
        try:
            values[name] = parse(switch, environ.get(switch, ""))
        except SwitchError as error:
            errors.append(error)
    for switch in COMPILER_FLAGS:
        try:
            _split(switch, environ.get(switch, ""))
        except SwitchError as error:
            errors.append(error)
    notes = tuple(
        f"{switch} is set and has no effect: there is never a download"
        for switch in WITHOUT_EFFECT
        if environ.get(switch)
    )
    return Config(
        arch_list=environ.get("TORCH_CUDA_ARCH_LIST", "").strip(),
        cxx=environ.get("CXX", "").strip(),
        cuda_host=environ.get("CUDAHOSTCXX", "").strip(),
        compiler_flags=tuple((name, environ[name]) for name in COMPILER_FLAGS if environ.get(name)),
        notes=notes,
        misspelt=tuple(misspelt(environ, NAMES, WITHOUT_EFFECT, PLANNED_BY_SWITCHES)),
        errors=tuple(errors),
        **values,
    )
