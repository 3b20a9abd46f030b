"""The setuptools commands: print the plan, let CMake build it, put this build's files, and no others, in place."""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings
from functools import lru_cache
from pathlib import Path
from typing import IO

from setuptools import Distribution, Extension
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.command.dist_info import dist_info
from setuptools.command.editable_wheel import editable_wheel
from setuptools.command.sdist import sdist

from . import build_info, cmake, convolution, finish, sbom, version
from .plan import Plan, load, present, show

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

ROOT = Path(__file__).resolve().parents[2]
LIB = Path("mamba_ssm") / "lib"
INFO = "build_info.json"
# Whether bdist_wheel leaves the wheel of causal-conv1d too. A frontend such as pip takes only the one reported to it.
both_wheels = True


@lru_cache(maxsize=1)
def the_plan() -> Plan:
    return load(ROOT)


@lru_cache(maxsize=1)
def announce() -> None:
    """Prints the plan once, before anything is done, and ends here when a finding is fatal."""
    present(the_plan())
    keep_others_out()


@lru_cache(maxsize=1)
def keep_others_out() -> IO[str]:
    """The file whose lock this process holds until it ends: two builds would clear and fill the same folders."""
    try:
        (ROOT / "build").mkdir(exist_ok=True)
        file = open(ROOT / "build" / "lock", "a")  # noqa: SIM115  (open as long as the process lives)
    except PermissionError as error:
        raise SystemExit(f"mamba_ssm: {error.filename} cannot be written; was it made by another user?") from None
    try:
        if sys.platform == "win32":
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise SystemExit(
            f"mamba_ssm: another build is running in {ROOT}; wait until it has ended, or build in another checkout"
        ) from None
    except OSError:
        pass  # a network folder without locks
    return file


def extension() -> Extension:
    """Stands for both libraries, so that setuptools makes a platform wheel; CMake has the sources."""
    return Extension("mamba_ssm.lib.mamba_cpu", sources=[])


class BuildCommand(build):
    def run(self) -> None:
        announce()
        # What an earlier build left here would travel in this wheel: another configuration's libraries, old modules.
        shutil.rmtree(Path(self.build_lib) / "mamba_ssm", ignore_errors=True)
        super().run()


class BuildNative(build_ext):
    """build_ext: CMake builds, and the outputs named by the plan are copied, nothing else."""

    def run(self) -> None:
        announce()
        plan = the_plan()
        base = Path(self.get_finalized_command("build").build_base)
        try:
            folder = cmake.build(plan, ROOT / "csrc", base)
        except cmake.BuildError as error:
            raise SystemExit(f"mamba_ssm: {error}") from None
        built = [folder / "lib" / name for name in plan.libraries]
        info = build_info.text(build_info.describe(plan, ROOT, folder, built))
        # In the checkout too, where Python imports mamba_ssm from the folder it is started in.
        for target in [ROOT / LIB] if self.inplace else [ROOT / LIB, Path(self.build_lib) / LIB]:
            target.mkdir(parents=True, exist_ok=True)
            for name in set(version.library_names(sys.platform, cuda=True)) - set(plan.libraries):
                remove_file(target / name)
            for library in built:
                replace_file(library, target / library.name)
            (target / INFO).write_text(info, encoding="utf-8", newline="\n")

    def _outputs(self) -> dict[str, str]:
        """{file in build_lib: file in the source tree}"""
        names = [*the_plan().libraries, INFO]
        return {str(Path(self.build_lib) / LIB / name): str(LIB / name) for name in names}

    def get_outputs(self) -> list[str]:
        return list(self.get_output_mapping()) if self.inplace else list(self._outputs())

    def get_output_mapping(self) -> dict[str, str]:
        return self._outputs() if self.inplace else {}

    def get_source_files(self) -> list[str]:
        return []


class BuildWheel(bdist_wheel):
    def finalize_options(self) -> None:
        label_version(self.distribution)
        super().finalize_options()
        self.root_is_pure = False

    def run(self) -> None:
        # The wheel comes to dist finished or not at all, so it is made where nobody looks for one.
        dist, self.dist_dir = Path(self.dist_dir), self.get_finalized_command("build").build_base
        dist.mkdir(parents=True, exist_ok=True)
        if not os.access(dist, os.W_OK):
            raise SystemExit(f"mamba_ssm: {dist.absolute()}, where the wheel goes, cannot be written")
        with warnings.catch_warnings():
            # setuptools' own bdist_wheel goes through its install command, and that one warns users off.
            warnings.filterwarnings("ignore", message="setup.py install is deprecated")
            super().run()
        plan, (*kind, path) = the_plan(), self.distribution.dist_files[-1]
        seconds = plan.config.source_date
        finish.settle(Path(path), build_info.source_of(ROOT).seconds if seconds is None else seconds)
        if plan.glibc:
            try:
                finish.check_release(Path(path), plan.glibc)
            except finish.ReleaseError as error:
                os.unlink(path)
                raise SystemExit(f"mamba_ssm: {error}") from None
        wheel = finish.deliver(Path(path), dist)
        self.distribution.dist_files[-1] = (*kind, str(wheel))
        show(f"mamba_ssm: {wheel.name} is ready")  # its folder is the frontend's, which may move it
        if both_wheels:
            wheel = finish.deliver(convolution.build(ROOT, Path(self.dist_dir), seconds), dist)
            self.distribution.dist_files.append(("bdist_wheel", "any", str(wheel)))
            show(f"mamba_ssm: {wheel.name} is ready")

    def write_wheelfile(self, wheelfile_base: str, *arguments, **options) -> None:
        super().write_wheelfile(wheelfile_base, *arguments, **options)
        # An editable wheel passes here as well, and holds no libraries to tell of.
        lib = Path(wheelfile_base).parent / LIB
        if lib.is_dir():
            info = json.loads((lib / INFO).read_text(encoding="utf-8"))
            folder = Path(wheelfile_base) / sbom.FOLDER
            folder.mkdir(exist_ok=True)
            document = sbom.text(info, the_plan().version)
            (folder / sbom.NAME).write_text(document, encoding="utf-8", newline="\n")

    def get_tag(self) -> tuple[str, str, str]:
        return the_plan().tag


class DistInfo(dist_info):
    def finalize_options(self) -> None:
        label_version(self.distribution)
        super().finalize_options()


class EditableWheel(editable_wheel):
    def finalize_options(self) -> None:
        label_version(self.distribution)
        super().finalize_options()


class SourceDistribution(sdist):
    """An sdist has no label: what it will be built with is not known yet."""

    def run(self) -> None:
        labelled = self.distribution.metadata.version
        self.distribution.metadata.version = version.base_version(ROOT)
        self.reinitialize_command("egg_info")
        try:
            super().run()
        finally:
            self.distribution.metadata.version = labelled
            self.reinitialize_command("egg_info")

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        (Path(base_dir) / build_info.SOURCE_FILE).write_text(
            build_info.source_line(ROOT), encoding="utf-8", newline="\n"
        )


class Clean(Distribution().get_command_class("clean")):
    """Takes no folder from under a build that is running."""

    def run(self) -> None:
        keep_others_out()
        super().run()


def label_version(distribution) -> None:
    distribution.metadata.version = the_plan().version


def replace_file(source: Path, target: Path) -> None:
    """Puts a library in place in one step, and not at all if it is there already.

    Writing into the old file would pull the code from under a running Python that has it loaded.
    """
    data = source.read_bytes()
    if target.is_file() and target.read_bytes() == data:
        return
    fresh = target.with_name(target.name + ".new")
    fresh.write_bytes(data)
    os.chmod(fresh, 0o755)
    try:
        os.replace(fresh, target)
    except PermissionError:
        fresh.unlink(missing_ok=True)
        raise in_use(target) from None


def remove_file(target: Path) -> None:
    try:
        target.unlink(missing_ok=True)
    except PermissionError:
        raise in_use(target) from None


def in_use(target: Path) -> SystemExit:
    """What Windows means when it denies access to a library."""
    return SystemExit(f"mamba_ssm: {target} is in use by a running Python; close it and build again")


COMMANDS = {
    "build": BuildCommand,
    "build_ext": BuildNative,
    "clean": Clean,
    "bdist_wheel": BuildWheel,
    "dist_info": DistInfo,
    "editable_wheel": EditableWheel,
    "sdist": SourceDistribution,
}
