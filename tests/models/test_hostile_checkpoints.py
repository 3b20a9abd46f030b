"""Checkpoints made to run code or to reach other files: refused by every torch, with no advice to load them anyway."""

import io
import json
import pickle
import re
import tarfile
import traceback
import warnings
import zipfile

import pytest
import torch

from mamba_ssm import CheckpointError
from mamba_ssm._torch import private
from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

# What torch.jit.save writes of a module whose __setstate__ makes a file.
PROGRAM = """class Model(Module):
  __parameters__ = []
  __buffers__ = []
  training : bool
  def __getstate__(self: __torch__.Model) -> bool:
    return self.training
  def __setstate__(self: __torch__.Model, state: bool) -> NoneType:
    self.training = bool(torch.fill_(torch.from_file("VICTIM", True, 1, dtype=0), 65))
    return None
"""


class Evil:
    """Its pickle makes a file."""

    def __init__(self, victim):
        self.victim = str(victim)

    def __reduce__(self):
        return open, (self.victim, "w")


def torchscript(path, victim):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02c__torch__\nModel\n)\x81\x89b.")
        archive.writestr("archive/code/__torch__.py", PROGRAM.replace("VICTIM", victim.as_posix()))
        archive.writestr("archive/constants.pkl", b"\x80\x02).")
        archive.writestr("archive/version", b"3\n")


def torchscript_hidden_from_zipfile(path, victim):
    """With a second list of contents: zipfile reads what lies before the end, torch what the end points to."""
    torchscript(path, victim)
    raw = path.read_bytes()
    start, end = raw.index(b"PK\x01\x02"), raw.index(b"PK\x05\x06")
    other = raw[start:end].replace(b"constants.pkl", b"constants.txt").replace(b"/code/", b"/text/")
    path.write_bytes(raw[:end] + other + raw[end:])
    with zipfile.ZipFile(path) as archive:
        assert not any("constants.pkl" in name or "/code/" in name for name in archive.namelist())


def tar(path, victim):
    """torch's first format, before 0.1.10; its reader believes sizes and offsets."""
    nothing = pickle.dumps(0, 2)
    members = {"storages": nothing + pickle.dumps([], 2), "tensors": nothing, "pickle": pickle.dumps({}, 2)}
    with tarfile.open(path, "w") as archive:
        for name, contents in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(contents)
            archive.addfile(member, io.BytesIO(contents))


def archive_with_code(path, victim):
    torch.save({"weight": torch.ones(2), "evil": Evil(victim)}, path)


def legacy_with_code(path, victim):
    torch.save({"weight": torch.ones(2), "evil": Evil(victim)}, path, _use_new_zipfile_serialization=False)


def plain_pickle(path, victim):
    path.write_bytes(pickle.dumps(Evil(victim), 2))


@pytest.mark.filterwarnings("error")  # torch before 2.6 warns that it goes on to torch.jit.load
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (torchscript, "TorchScript program"),
        (torchscript_hidden_from_zipfile, "TorchScript program"),
        (tar, "tar archive"),
        (archive_with_code, "more than tensors"),
        (legacy_with_code, "more than tensors"),
        (plain_pickle, "more than tensors"),
    ],
)
def test_code_in_weights_is_not_run(tmp_path, make, reason):
    path, victim = tmp_path / "pytorch_model.bin", tmp_path / "victim"
    MambaLMHeadModel(MambaConfig(d_model=16, n_layer=1, vocab_size=21)).save_pretrained(tmp_path)
    make(path, victim)
    with pytest.raises(ValueError, match=f"refused to load {re.escape(str(path))}.*{reason}") as error:
        MambaLMHeadModel.from_pretrained(tmp_path)
    assert not victim.exists()
    assert type(error.value) is CheckpointError
    said = "".join(traceback.format_exception(error.value))
    assert "weights_only" not in said and "torch.jit" not in said and "trust" not in said


@pytest.mark.parametrize("refuses", [True, False])
def test_a_torch_whose_reader_is_not_found(tmp_path, monkeypatch, refuses):
    """One that refuses programs itself, from 2.6 on, loads; an older one takes no archive, only .safetensors."""
    if refuses and not private.LOAD_REFUSES_PROGRAMS:
        pytest.skip("this torch runs programs")
    monkeypatch.setattr(private, "_archive_records", None)
    monkeypatch.setattr("mamba_ssm.utils.hf.LOAD_REFUSES_PROGRAMS", refuses)
    model = MambaLMHeadModel(MambaConfig(d_model=16, n_layer=1, vocab_size=21))
    model.save_pretrained(tmp_path)
    if refuses:
        assert torch.equal(MambaLMHeadModel.from_pretrained(tmp_path).lm_head.weight, model.lm_head.weight)
    else:
        with pytest.raises(ValueError, match=f"torch {re.escape(torch.__version__)} would run.*save.*safetensors"):
            MambaLMHeadModel.from_pretrained(tmp_path)
    torchscript(tmp_path / "pytorch_model.bin", tmp_path / "victim")
    with pytest.raises(ValueError, match=r"refused to load .* program") as error, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch names TorchScript before it refuses
        MambaLMHeadModel.from_pretrained(tmp_path)
    assert not (tmp_path / "victim").exists()
    assert "weights_only" not in "".join(traceback.format_exception(error.value))


@pytest.mark.parametrize("file", ["../b.bin", "..", ".", "", "/etc/b.bin", "folder/b.bin", 3, None])
def test_an_index_names_files_beside_it(tmp_path, file):
    MambaLMHeadModel(MambaConfig(d_model=16, n_layer=1, vocab_size=21)).save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CheckpointError, match="its weight_map names") as error:
        MambaLMHeadModel.from_pretrained(tmp_path)
    assert str(index) in str(error.value) and repr(file) in str(error.value)


@pytest.mark.parametrize("file", ["x" * 5000, "\ud800", "a\0b", "\x1b[2J", "missing.bin"])
def test_an_index_names_files_that_are_there(tmp_path, file):
    MambaLMHeadModel(MambaConfig(d_model=16, n_layer=1, vocab_size=21)).save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CheckpointError, match=r"it holds config\.json, pytorch") as error:
        MambaLMHeadModel.from_pretrained(tmp_path)
    assert isinstance(error.value, FileNotFoundError)
    assert str(error.value).isprintable() and len(str(error.value)) < 600


def test_the_format_before_archives_is_read(tmp_path):
    model = MambaLMHeadModel(MambaConfig(d_model=16, n_layer=1, vocab_size=21))
    model.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    found = MambaLMHeadModel.from_pretrained(tmp_path)
    assert torch.equal(found.lm_head.weight, model.lm_head.weight)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 269\n"
WEB_PAGES = (
    b"<!DOCTYPE html><html><body>404</body></html>",
    b"\n\n  <HTML>log in</HTML>",
    b"<?xml version='1.0'?><Error/>",
)
OTHER_KINDS = [(b"", "it is empty"), (b" \n", "it is empty"), (LFS, "it is a Git LFS pointer; `git lfs pull`")]
OTHER_KINDS += [(page, "it is a web page; download the file itself") for page in WEB_PAGES]
OTHER_KINDS.append((bytes(4096), "it begins with zeros"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "config.json"])
@pytest.mark.parametrize(("contents", "reason"), OTHER_KINDS)
def test_what_a_download_left_in_the_place_of_a_file(tmp_path, name, contents, reason):
    MambaLMHeadModel(MambaConfig(d_model=16, n_layer=1, vocab_size=21)).save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").replace(tmp_path / "weights")
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(CheckpointError, match=f"{re.escape(str(tmp_path / name))} is damaged: {reason}"):
        MambaLMHeadModel.from_pretrained(tmp_path)


def safetensors_header(header):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


NOISE = torch.randint(256, (4096,), generator=torch.Generator().manual_seed(3)).to(torch.uint8).numpy().tobytes()
GARBAGE = {
    "noise": NOISE,
    "an archive of noise": b"PK\x03\x04" + NOISE,
    "a pickle of noise": b"\x80\x02" + NOISE,
    "a long header": b"\xff" * 8 + b"{}",
    "offsets past the end": safetensors_header({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}),
    "a shape that multiplies to too much": safetensors_header(
        {"a": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 0]}}
    ),
    "a JSON text": b'{"a": 1}',
}


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage(tmp_path, kind, name):
    MambaLMHeadModel(MambaConfig(d_model=16, n_layer=1, vocab_size=21)).save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    (tmp_path / name).write_bytes(GARBAGE[kind])
    with pytest.raises(CheckpointError, match="damaged") as error:
        MambaLMHeadModel.from_pretrained(tmp_path)
    assert str(tmp_path / name) in str(error.value) and len(str(error.value)) < 600


@pytest.mark.parametrize(
    "state", [{3: torch.ones(1)}, {None: torch.ones(1)}, {"a": 1.0}, [torch.ones(1)], torch.ones(1)]
)
def test_no_state_dict(tmp_path, state):
    MambaLMHeadModel(MambaConfig(d_model=16, n_layer=1, vocab_size=21)).save_pretrained(tmp_path)
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="must hold a dict of tensors by name, a state dict"):
        MambaLMHeadModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("folder", ["config.json", "pytorch_model.bin"])
def test_a_folder_in_the_place_of_a_file(tmp_path, folder):
    MambaLMHeadModel(MambaConfig(d_model=16, n_layer=1, vocab_size=21)).save_pretrained(tmp_path)
    (tmp_path / folder).unlink()
    (tmp_path / folder).mkdir()
    with pytest.raises(CheckpointError, match=f"has no .*{folder}.*; it holds config.json"):
        MambaLMHeadModel.from_pretrained(tmp_path)
