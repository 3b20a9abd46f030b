"""The conda recipe: it renders for each system and CUDA, and says what setup.py, pyproject.toml and the package say."""

import re
from pathlib import Path

import pytest
from wheel_build import version

rattler_build = pytest.importorskip("rattler_build", reason="py-rattler-build (extra publish) is not installed")
tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "packaging"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def rendered(system):
    platform = rattler_build.PlatformConfig(target_platform=system)
    context = rattler_build.JinjaConfig(platform=platform)
    variants = rattler_build.VariantConfig.from_file_with_context(str(FOLDER / "variants.yaml"), context)
    recipe = rattler_build.Stage0Recipe.from_file(str(FOLDER / "recipe.yaml"))
    return [one.recipe.to_dict() for one in recipe.render(variants, rattler_build.RenderConfig(platform=platform))]


@pytest.fixture(scope="module", params=["linux-64", "win-64"])
def packages(request):
    """{"cpu", "cuda129", ...: package}"""
    found = {package["build"]["string"].split("_")[0]: package for package in rendered(request.param)}
    assert sorted(found) == ["cpu", "cuda129", "cuda130"]
    return found


def test_each_is_built_for_what_its_name_says(packages):
    for name, package in packages.items():
        needs = package["requirements"]
        assert package["build"]["script"]["env"] == {"MAMBA_SSM_CUDA": "off" if name == "cpu" else "on"}
        compilers = [need for need in needs["build"] if need.startswith("cuda-nvcc_")]
        assert [re.sub(r"\D", "", need.split()[1]) for need in compilers] == ([] if name == "cpu" else [name[4:]])
        assert ("cuda-cudart-static" in needs["host"]) == (name != "cpu")
        assert not [need for need in needs["run"] if need.startswith("cuda")]


def test_version_and_needs_are_pyprojects(packages):
    python = f"python {PROJECT['project']['requires-python']}"
    (torch,) = PROJECT["project"]["dependencies"]
    builders = {need for need in PROJECT["build-system"]["requires"] if not need.startswith("ninja")}
    for package in packages.values():
        assert package["package"] == {"name": "mamba-ssm", "version": version.base_version(ROOT)}
        assert package["requirements"]["run"] == [python, torch.replace("torch", "pytorch ")]
        given = {need.replace(" ", "") for part in ("build", "host") for need in package["requirements"][part]}
        assert builders <= given
        assert package["about"]["summary"] == PROJECT["project"]["description"]
        assert str(package["about"]["license"]) == PROJECT["project"]["license"]


def test_glibc_is_the_release_builds():
    for package in rendered("linux-64"):
        assert f"sysroot_linux-64 {version.RELEASE_GLIBC}.*" in package["requirements"]["build"]
