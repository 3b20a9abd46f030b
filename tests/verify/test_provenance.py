"""Checksums, signatures, and the comparison of two builds. None of them builds anything here."""

import hashlib
import os
import shutil
import subprocess
import zipfile

import pytest
import rebuild_check
import sign_wheels

NAME = "mamba_ssm-2.4.0+cpu-py3-none-linux_x86_64.whl"


def wheel(folder, contents=None, name=NAME, moment=(2026, 1, 1, 0, 0, 0)):
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / name, "w") as archive:
        for file, content in (contents or {"a.py": "1", "b.py": "2"}).items():
            archive.writestr(zipfile.ZipInfo(file, moment), content)
    return folder / name


def test_checksums_are_what_sha256sum_reads(tmp_path):
    one = wheel(tmp_path)
    (tmp_path / "SHA256SUMS.asc").write_text("of an older list")
    assert sign_wheels.main([str(tmp_path)]) == 0
    digest = hashlib.sha256(one.read_bytes()).hexdigest()
    assert (tmp_path / "SHA256SUMS").read_bytes() == f"{digest}  {NAME}\n".encode()
    assert sorted(os.listdir(tmp_path)) == ["SHA256SUMS", NAME]


def test_folder_without_wheels_and_signing_without_gpg_are_errors(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        sign_wheels.main([str(tmp_path)])
    assert f"there is no wheel in {tmp_path}" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    wheel(tmp_path)
    with pytest.raises(SystemExit):
        sign_wheels.main([str(tmp_path), "--sign"])
    assert "needs gpg" in capsys.readouterr().err
    assert os.listdir(tmp_path) == [NAME]


@pytest.mark.skipif(shutil.which("gpg") is None, reason="gpg is not installed here")
def test_signature_is_gpgs(tmp_path, monkeypatch):
    home, folder = tmp_path / "keys", tmp_path / "dist"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("GNUPGHOME", str(home))
    make = ["gpg", "--batch", "--passphrase", "", "--quick-gen-key", "tester@example.org", "ed25519", "sign"]
    subprocess.run(make, check=True, capture_output=True)
    wheel(folder)
    assert sign_wheels.main([str(folder), "--sign", "tester@example.org"]) == 0
    verify = ["gpg", "--verify", "SHA256SUMS.asc", "SHA256SUMS"]
    assert subprocess.run(verify, cwd=folder, capture_output=True).returncode == 0
    (folder / "SHA256SUMS").write_text("0" * 64 + f"  {NAME}\n")
    assert subprocess.run(verify, cwd=folder, capture_output=True).returncode != 0
    assert sign_wheels.main([str(folder), "--sign", "nobody@example.org"]) != 0
    assert not (folder / "SHA256SUMS.asc").exists()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, None),
        ({"contents": {"a.py": "1", "b.py": "3"}}, "b.py: other contents"),
        ({"contents": {"a.py": "1"}}, "b.py: in one of them only"),
        ({"moment": (2026, 1, 1, 0, 0, 2)}, "the same contents, packed in another way"),
        ({"name": NAME.replace("cpu", "cu130")}, "one is named"),
    ],
)
def test_two_builds_are_compared_down_to_the_file(tmp_path, capsys, changes, line):
    status = rebuild_check.compare([wheel(tmp_path / "1"), wheel(tmp_path / "2", **changes)])
    output = capsys.readouterr().out
    assert status == (1 if line else 0)
    assert ("reproducible: the same bytes" if line is None else line) in output


def test_what_cannot_be_tried_is_no_answer(tmp_path, monkeypatch, capsys):
    assert rebuild_check.main([str(tmp_path / NAME)]) == 2
    assert "is no file" in capsys.readouterr().err
    monkeypatch.setattr(rebuild_check, "ROOT", tmp_path)
    assert rebuild_check.main([]) == 2
    assert "git failed" in capsys.readouterr().err


def test_a_build_differs_from_the_other_in_folder_umask_and_environment():
    folders, umasks, variables = zip(*rebuild_check.SURROUNDINGS, strict=True)
    assert len(folders[0]) != len(folders[1])
    assert umasks[0] != umasks[1]
    assert all(variables[0][name] != variables[1][name] for name in variables[0])
