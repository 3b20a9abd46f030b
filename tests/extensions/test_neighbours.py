"""What the doctor says of packages beside this one, in a folder as pip leaves it."""

import base64
import hashlib
import json

import pytest
from _helpers.copies import install, python, write_copy

from mamba_ssm import _doctor, _neighbours

# Without torch, whose import takes long.
EXAMINE = "import json, runpy; print(json.dumps(runpy.run_path('mamba_ssm/_neighbours.py')['examine']()))"


def examine(site):
    return json.loads(python([site], "-c", EXAMINE))


@pytest.fixture
def site(tmp_path):
    return install(tmp_path)


def test_nothing_to_say(site):
    assert examine(site) == [[], []]


def test_the_doctor_says_it(monkeypatch):
    monkeypatch.setattr(_neighbours, "examine", lambda: (["a problem"], ["a note"]))
    report = _doctor.examine()
    assert report["problems"] == ["a problem"] and "a note" in report["notes"] and not report["healthy"]


def test_a_library_beside_the_module_of_its_name_wins(site):
    library = site / "selective_scan_cuda_oflex.abi3.so"
    library.write_bytes(b"")
    problems, (note,) = examine(site)
    assert problems == []
    assert note.startswith(f"selective_scan_cuda_oflex is {library}, another project's: it is found before mamba_ssm's")


def test_a_module_that_is_missing(site):
    (site / "selective_scan_cuda.py").unlink()
    assert examine(site)[0] == ["selective_scan_cuda was not found, which this package brings: reinstall mamba_ssm"]


def test_a_copy_over_this_package(site):
    info = site / "mamba_ssm-2.4.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mamba_ssm\nVersion: 2.4.0\n")
    files = [*(site / "mamba_ssm").rglob("*.py"), *site.glob("*.py")]
    digests = [base64.urlsafe_b64encode(hashlib.sha256(f.read_bytes()).digest()).rstrip(b"=").decode() for f in files]
    lines = [f"{f.relative_to(site).as_posix()},sha256={d},\n" for f, d in zip(files, digests, strict=True)]
    (info / "RECORD").write_text("".join(lines))
    assert examine(site) == [[], []]
    write_copy(site)
    problems, (note,) = examine(site)
    assert problems == []
    files = ("__init__", "ops/__init__", "ops/selective_scan_interface")
    assert note.startswith(", ".join(f"mamba_ssm/{file}.py" for file in files) + ": not as installed")
