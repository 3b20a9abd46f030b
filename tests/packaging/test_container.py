"""The Dockerfile and the devcontainer type what README and CONTRIBUTING tell people to type."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "packaging" / "Dockerfile").read_text(encoding="utf-8")
STAGES = dict(re.findall(r"^FROM \S+ AS (\w+)\n(.*?)(?=^FROM|\Z)", DOCKERFILE, re.M | re.S))


def command(page, marker):
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.search(rf"{marker}\n+```bash\n(.*?)\n```", text, re.S)[1]


@pytest.mark.parametrize("stage", ["build", "test"])
def test_a_stage_runs_readmes_command(stage):
    assert f"RUN {command('README.md', f'<!-- {stage}-command -->')}\n" in STAGES[stage]


def test_the_last_stage_is_the_wheels_alone():
    assert list(STAGES) == ["tools", "build", "test", "wheels"]
    assert STAGES["wheels"].split() == ["COPY", "--from=build", "/src/dist/*.whl", "/"]


def test_cuda_is_that_of_readmes_wheel():
    (major, minor) = re.search(r"^FROM nvidia/cuda:(\d+)\.(\d+)\.", DOCKERFILE, re.M).groups()
    assert f"+cu{major}{minor}-py3-none-linux_x86_64.whl" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_build_outputs_stay_out_of_the_image():
    """What git ignores at the top, or a wheel of this machine would be among the image's."""
    left_out = (ROOT / "packaging" / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    assert {".venv*", "build", "dist", "mamba_ssm/lib"} <= set(left_out)


def test_the_devcontainer_is_contributings_setup():
    config = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    folder = ROOT / ".devcontainer"
    assert (folder / config["build"]["dockerfile"]).resolve() == ROOT / "packaging" / "Dockerfile"
    assert (folder / config["build"]["context"]).resolve() == ROOT
    assert config["build"]["target"] in STAGES
    assert config["postCreateCommand"] == " && ".join(command("CONTRIBUTING.md", "## Set up").splitlines())
