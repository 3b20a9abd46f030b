"""Checkpoints: config.json and weights from a folder or from the Hugging Face hub, and back into a folder.

huggingface_hub and safetensors are imported where they are used only. Nothing of a checkpoint is executed. A checkpoint
that cannot be loaded raises CheckpointError.
"""

import importlib.util
import json
import os
import pickle
import re
import tarfile
import typing
from collections.abc import Mapping
from pathlib import Path

import torch

from mamba_ssm._arguments import first_few, parameter_dtype, shown, usable_device
from mamba_ssm._torch import LOAD_REFUSES_PROGRAMS, archive_names

CONFIG_NAME = "config.json"
SAFE_WEIGHTS_NAME = "model.safetensors"
WEIGHTS_NAME = "pytorch_model.bin"
INDEX_SUFFIX = ".index.json"  # of a file beside weights that are split over several
# What the hub may take as a name; everything else is a folder, and the hub is not asked for it.
_HUB_NAME = re.compile(r"(\w[\w.-]{0,95}/)?\w[\w.-]{0,95}", re.ASCII)


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, refused, or its weights do not fit its configuration; the message says which
    file, what is wrong and, where there is one, the cure.
    """


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no such folder, file or model on the hub, or the hub was not reached."""


def load_config_hf(model_name: str | os.PathLike[str]) -> dict[str, typing.Any]:
    """The contents of config.json, a dict, of a folder or a repository of the hub.

    Raises:
        CheckpointNotFoundError (a FileNotFoundError): there is none. CheckpointError (a ValueError): it is damaged.
        ImportError: the hub needs huggingface_hub.

    Same as upstream's mamba_ssm.utils.hf.load_config_hf.
    """
    return _read_json(_find(model_name, [CONFIG_NAME]))


def load_state_dict_hf(
    model_name: str | os.PathLike[str],
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | str | None = None,
) -> dict[str, torch.Tensor]:
    """{name: tensor} of a folder's or a hub repository's weights: model.safetensors, else pytorch_model.bin, each whole
    or split over several files with an index.

    device, dtype: of the tensors; by default the CPU's and the file's. Only floating-point tensors change dtype, which
        may be given by name ("bfloat16").

    Raises:
        CheckpointNotFoundError (a FileNotFoundError): there are no weights. CheckpointError (a ValueError): the file is
        damaged or holds more than tensors. ImportError: names the package to install. ValueError: device or dtype is
        none. RuntimeError: torch cannot use the device here.

    Same as upstream's mamba_ssm.utils.hf.load_state_dict_hf.
    """
    device = usable_device("load_state_dict_hf", device)
    dtype = parameter_dtype("load_state_dict_hf", dtype)
    return read_weights(find_weights(model_name), device, dtype)


def find_weights(model_name: str | os.PathLike[str]) -> Path:
    """The path of the weights, or of their index, of a folder or a hub repository, downloaded if need be."""
    names = [SAFE_WEIGHTS_NAME, WEIGHTS_NAME]
    if importlib.util.find_spec("safetensors") is None:
        names.reverse()  # safetensors is asked for only where there is nothing else
    path = _find(model_name, [file for name in names for file in (name, name + INDEX_SUFFIX)])
    for shard in _shards(path):
        _find(model_name, [shard.name])
    return path


def _shards(path: Path) -> list[Path]:
    """The files that hold the weights: path itself, or those beside it that an index names."""
    if not path.name.endswith(INDEX_SUFFIX):
        return [path]
    files = _read_json(path).get("weight_map")
    if not isinstance(files, dict):
        raise CheckpointError(f"{path} is no index of weights: it must hold a weight_map of tensors to files beside it")
    for file in files.values():
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".."):
            raise CheckpointError(
                f"{path} is no index of weights: its weight_map names {shown(file)}, not a file beside it"
            )
    return [path.with_name(file) for file in sorted(set(files.values()))]


def read_weights(
    path: Path, device: torch.device | str | int | None = None, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """{name: tensor} of a .safetensors or a torch.save file, or of those that an index names."""
    state = {}
    for shard in _shards(path):
        state.update(_read_file(shard))
    return {name: tensor.to(device, dtype if tensor.is_floating_point() else None) for name, tensor in state.items()}


def _read_json(path: Path) -> dict[str, typing.Any]:
    _refuse_another_kind(path)
    try:
        contents = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, or nested too deeply
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(contents, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(contents).__name__}")
    return contents


# The names that a file with a nested tensor has, by which torch from 2.15 on refuses it.
_NESTED_TENSORS = ("torch._utils._rebuild_nested_tensor", "torch.nested._internal.nested_tensor.")


def _read_file(path: Path) -> dict[str, torch.Tensor]:
    _refuse_another_kind(path)
    if path.suffix == ".safetensors":
        read = _import("safetensors.torch", "safetensors", f"to read {path}").load_file
    else:
        read = _load_tensors
    try:
        state = read(path)
    except (PermissionError, CheckpointError):
        raise
    except pickle.UnpicklingError as error:
        if any(name in str(error) for name in _NESTED_TENSORS):
            raise CheckpointError(
                f"{path}: weights must be dense tensors with data, and it holds a nested tensor"
            ) from None
        # without torch's message, which advises to load the file with its code
        raise _refused(f"{path}: it is damaged, or holds more than tensors, and that could run code") from None
    except Exception as error:  # each reader has several exceptions of its own for a damaged file
        reason = str(error).strip().partition("\n")[0][:200]
        little_memory = isinstance(error, MemoryError) or "memory" in reason
        cause = "there is too little memory for it, or it is damaged" if little_memory else "it is damaged"
        raise CheckpointError(f"{path} cannot be read: {cause} ({type(error).__name__}: {reason})") from error
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in state.items()
    ):
        raise CheckpointError(f"{path} must hold a dict of tensors by name, a state dict")
    for name, tensor in state.items():
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_nested:
            raise CheckpointError(f"{path}: {first_few([name])} must be a dense tensor with data, got {_kind(tensor)}")
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise CheckpointError(
                f"{path}: {first_few([name])} must hold all of its elements, got one of shape {tuple(tensor.shape)} "
                "whose elements share memory"
            )
    return state


def _refuse_another_kind(path: Path) -> None:
    """Raises on what downloads often leave in a file's place."""
    with open(path, "rb") as file:
        start = file.read(200).lstrip().lower()
    found = None
    if not start:
        found = "it is empty"
    elif not start.strip(b"\0"):
        found = "it begins with zeros"
    elif start.startswith(b"version https://git-lfs"):
        found = "it is a Git LFS pointer; `git lfs pull` in its folder gets the file itself"
    elif start.startswith((b"<!doctype", b"<html", b"<?xml")):
        found = "it is a web page; download the file itself"
    if found is not None:
        raise CheckpointError(f"{path} is damaged: {found}")


def _kind(tensor: torch.Tensor) -> str:
    for kind in ("meta", "quantized", "nested"):
        if getattr(tensor, f"is_{kind}"):
            return f"a {kind} tensor"
    return f"layout {tensor.layout}"


def _refused(reason: str) -> CheckpointError:
    return CheckpointError(f"refused to load {reason}; save the model's state_dict() alone, or model.safetensors")


def _load_tensors(path: Path) -> typing.Any:
    """The contents of a torch.save file that holds nothing but tensors.

    weights_only is not enough before torch 2.6: it still runs the code of TorchScript, and trusts the old tar format.
    """
    program = _refused(f"{path}: it is a TorchScript program, whose code would run")
    with open(path, "rb") as file:  # once: what is looked at is what is loaded
        archive = file.read(4) == b"PK\x03\x04"
        file.seek(0)
        if archive:
            names = archive_names(file)
            if names is None and not LOAD_REFUSES_PROGRAMS:
                raise _refused(
                    f"{path}: torch {torch.__version__} would run it if it is a program, and does not say so"
                )
            if any(name == "constants.pkl" or name.startswith("code/") for name in names or ()):
                raise program
        elif tarfile.is_tarfile(file):
            raise _refused(f"{path}: it is a tar archive, whose reader in torch checks nothing")
        file.seek(0)
        try:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=False)
        except RuntimeError as error:
            if "TorchScript" in str(error):  # without torch's message, as above
                raise program from None
            raise


def write_checkpoint(
    folder: str | os.PathLike[str],
    config: dict[str, typing.Any],
    state_dict: Mapping[str, torch.Tensor],
    safe_serialization: bool,
) -> None:
    """Writes config.json and the weights; removes those in another form, which would be another model's."""
    text = json.dumps(config, indent=4) + "\n"  # before anything is written: it may hold what JSON does not
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if safe_serialization:
        save_file = _import("safetensors.torch", "safetensors", "for safe_serialization=True").save_file
        tensors = {name: tensor.contiguous() for name, tensor in state_dict.items()}
        save_file(tensors, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
    else:
        torch.save(state_dict, folder / WEIGHTS_NAME)
    (folder / (WEIGHTS_NAME if safe_serialization else SAFE_WEIGHTS_NAME)).unlink(missing_ok=True)
    for name in (WEIGHTS_NAME, SAFE_WEIGHTS_NAME):
        (folder / (name + INDEX_SUFFIX)).unlink(missing_ok=True)
    (folder / CONFIG_NAME).write_text(text, encoding="utf-8")


def _find(model_name: str | os.PathLike[str], names: list[str]) -> Path:
    """The path of the first of these files that a folder or a hub repository has."""
    given = os.fspath(model_name) if isinstance(model_name, os.PathLike) else model_name
    if not isinstance(given, str) or not given:
        raise TypeError(f"a checkpoint is given by a folder or the name of a hub repository, got {shown(model_name)}")
    folder, wanted = os.path.expanduser(given), " or ".join(first_few([name]) for name in names)
    if os.path.isdir(folder):
        for name in names:
            if os.path.isfile(os.path.join(folder, name)):
                return Path(folder, name)
        there = first_few(sorted(os.listdir(folder)))
        raise CheckpointNotFoundError(f"the folder {folder} has no {wanted}; it holds {there or 'nothing'}")
    if os.path.isfile(folder):
        raise CheckpointNotFoundError(f"{folder} is a file: give the folder that holds it and the others")
    if not _HUB_NAME.fullmatch(given):
        raise CheckpointNotFoundError(f"there is no folder {shown(folder)}")
    return _find_on_hub(given, names)


def _find_on_hub(model_name: str, names: list[str]) -> Path:
    hub = _import("huggingface_hub", "hub", f"to get {model_name!r} from the hub: it is no folder here")
    for name in names:
        try:
            return Path(hub.hf_hub_download(model_name, name))
        except Exception as error:  # a connection has many
            # no connection, and not in the cache, is an EntryNotFoundError too
            local = isinstance(error, hub.utils.LocalEntryNotFoundError)
            if isinstance(error, hub.utils.EntryNotFoundError) and not local:
                continue
            problem = "the hub was not reached"
            if isinstance(error, hub.utils.GatedRepoError):
                problem = "the hub's model is gated: ask for access on its page, then `hf auth login`"
            elif isinstance(error, (hub.utils.RepositoryNotFoundError, hub.utils.HFValidationError)):
                problem = "the hub has no such model, or it is private and needs `hf auth login`"
            reason = " ".join(str(error).split())[:300]
            raise CheckpointNotFoundError(
                f"{model_name!r} is no folder here, and {problem} ({type(error).__name__}: {reason})"
            ) from error
    raise CheckpointNotFoundError(f"the hub's {model_name!r} has no {' or '.join(names)}")


def _import(module: str, extra: str, purpose: str) -> typing.Any:
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f'{package} is needed {purpose}; pip install "mamba_ssm[{extra}]"') from error
