"""README's Install, where dist holds wheels of several labels: pip would refuse to install them together."""

import os
import re
import shutil
import subprocess

import pytest


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash on PATH")
def test_install_takes_the_newest_wheel(request, tmp_path):
    readme = (request.config.rootpath / "README.md").read_text(encoding="utf-8")
    command = re.search(r"<!-- install-command -->\n```bash\n(pip .*)\n", readme)[1]
    dist = tmp_path / "dist"
    dist.mkdir()
    for age, label in enumerate(("cu129", "cu130", "cpu")):
        wheel = dist / f"mamba_ssm-2.4.0+{label}-py3-none-linux_x86_64.whl"
        wheel.touch()
        os.utime(wheel, (1700000000 - age, 1700000000 - age))
    code = f'pip() {{ printf "%s\\n" "$@"; }}\n{command}\n'
    done = subprocess.run(["bash", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["install", "dist/mamba_ssm-2.4.0+cu129-py3-none-linux_x86_64.whl"]
