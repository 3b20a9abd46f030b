"""A GGUF file of llama.cpp's architectures mamba and mamba2 as a model."""

import os
import typing
from pathlib import Path

import torch

from mamba_ssm._arguments import first_few, parameter_dtype, shown, usable_device
from mamba_ssm.gguf._format import DTYPES, GGUFFile
from mamba_ssm.gguf._layout import EPSILON, EXPAND, LAYERS, Entry, Sizes, config_of, entries
from mamba_ssm.gguf._tokenizer import tokenizer_of_file
from mamba_ssm.gguf.export import VOCABULARY_KEYS
from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel
from mamba_ssm.modules.quantized import WEIGHT, of_weight, replace_by_quantized
from mamba_ssm.ops.linear import dequantize

_MOST = 2**31 - 1


def import_file(file: str | os.PathLike[str], folder: str | os.PathLike[str]) -> str:
    """Writes a GGUF file's model, and its tokenizer.json if it has such a tokenizer, into a folder, which is made, for
    MambaLMHeadModel.from_pretrained.

    Returns: a line that says what was written. Raises: as load_model.
    """
    opened = GGUFFile(file)
    model = _load(opened, None, None)
    tokenizer = tokenizer_of_file(opened)
    model.save_pretrained(folder)
    if tokenizer is not None:
        Path(folder, "tokenizer.json").write_text(tokenizer.as_json(), encoding="utf-8")
    found = "no tokenizer" if tokenizer is None else "tokenizer.json"
    return f"wrote {folder}: config.json, weights and {found}"


def load_model(
    file: str | os.PathLike[str],
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | str | None = None,
) -> MambaLMHeadModel:
    """The model of a GGUF file of architecture mamba or mamba2, with weights of F32, F16, BF16 or Q8_0.

    Weights of Q8_0 stay what they are: int8, as mamba_ssm.quantize makes them. Nothing of the file is executed.

    dtype: of the others; by default the one that all large weights have, or float32. device: of the parameters.

    Raises:
        CheckpointNotFoundError (a FileNotFoundError): there is no such file. CheckpointError (a ValueError): it is
        damaged, cut off, or of an architecture, a type or sizes that are not read; the message says which.
        ValueError, RuntimeError: device or dtype is none, or cannot be used here.
    """
    device, dtype = usable_device("load_model", device), parameter_dtype("load_model", dtype)
    return _load(GGUFFile(file), device, dtype)


def load_tokenizer(file: str | os.PathLike[str]) -> str | None:
    """The byte-level BPE tokenizer of a GGUF file as a tokenizer.json has it, for tokenizers.Tokenizer.from_str;
    None if the file has none, or one of another kind.

    Raises: CheckpointError: as load_model.
    """
    tokenizer = tokenizer_of_file(GGUFFile(file))
    return None if tokenizer is None else tokenizer.as_json()


def _load(file: GGUFFile, device: torch.device | None, dtype: torch.dtype | None) -> MambaLMHeadModel:
    tied = "output.weight" not in file.tensors
    sizes = _sizes(file)
    listed = entries(sizes, tied)
    _check_tensors(file, listed)
    config = config_of(sizes, tied, _vocabulary(file, sizes))
    if dtype is None:
        kinds = {file.tensors[entry.theirs].type for entry in listed if entry.matrix}
        dtype = DTYPES.get(kinds.pop(), torch.float32) if len(kinds) == 1 else torch.float32
    try:
        model = MambaLMHeadModel(config, device=device, dtype=dtype)
    except ValueError as error:  # sizes that no kernel takes
        raise file.error(str(error)) from error
    state: dict[str, torch.Tensor] = {}
    for entry in listed:
        state.update(_tensors(file, entry))
        if of_weight(entry.ours)[1] in state:
            replace_by_quantized(model, entry.ours.removesuffix(WEIGHT))
    if tied:
        embedding, head = of_weight("backbone.embedding.weight"), of_weight("lm_head.weight")
        if embedding[1] in state:
            replace_by_quantized(model, "lm_head")
        model.tie_weights()
        state |= {ours: state[other] for ours, other in zip(head, embedding, strict=True) if other in state}
    model.load_state_dict(state)
    return model


def _sizes(file: GGUFFile) -> Sizes:
    """What the metadata says, in range; whether the tensors agree is checked before anything is made of it."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in list(LAYERS):  # not hashed: it may be anything
        known = " and ".join(LAYERS)
        raise file.error(f"has the architecture {shown(architecture)}, and {known} are read")

    def number(name: str, default: int | None = None, least: int = 1) -> int:
        value = file.metadata.get(f"{architecture}.{name}", default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST:
            raise file.error(f"{architecture}.{name} must be an integer of at least {least}, got {shown(value)}")
        return value

    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise file.error("has no token_embd.weight of two dimensions")
    sizes = Sizes(
        architecture,
        number("embedding_length"),
        number("block_count"),
        embedding.shape[0],
        number("ssm.inner_size"),
        number("ssm.state_size"),
        number("ssm.conv_kernel"),
        number("ssm.time_step_rank"),
        number("ssm.group_count", 1),
    )
    if sizes.d_inner != EXPAND * sizes.d_model:
        raise file.error(
            f"{architecture}.ssm.inner_size must be {EXPAND} times embedding_length, got {sizes.d_inner} and "
            f"{sizes.d_model}"
        )
    if sizes.n_layer > len(file.tensors):
        raise file.error(f"{architecture}.block_count is {sizes.n_layer}, and the file has {len(file.tensors)} tensors")
    if architecture == "mamba2" and (sizes.d_inner % sizes.dt_rank or sizes.d_inner % sizes.ngroups):
        raise file.error(
            f"{architecture}.ssm.time_step_rank (heads) and ssm.group_count must divide inner_size = {sizes.d_inner}, "
            f"got {sizes.dt_rank} and {sizes.ngroups}"
        )
    epsilon = file.metadata.get(f"{architecture}.attention.layer_norm_rms_epsilon")
    if not isinstance(epsilon, float) or abs(epsilon - EPSILON) > 1e-3 * EPSILON:
        raise file.error(f"{architecture}.attention.layer_norm_rms_epsilon must be {EPSILON}, got {shown(epsilon)}")
    if file.metadata.get(f"{architecture}.ssm.dt_b_c_rms"):
        raise file.error(f"has {architecture}.ssm.dt_b_c_rms, norms of dt, B and C (FalconMamba), which Mamba lacks")
    return sizes


def _check_tensors(file: GGUFFile, listed: list[Entry]) -> None:
    expected = {entry.theirs: entry.shape for entry in listed}
    problems = {
        "missing": [name for name in expected if name not in file.tensors],
        "unexpected": [name for name in file.tensors if name not in expected],
        "of another shape": [
            f"{name} {file.tensors[name].shape} instead of {shape}"
            for name, shape in expected.items()
            if name in file.tensors and file.tensors[name].shape != shape
        ],
    }
    if any(problems.values()):
        text = "; ".join(f"{kind}: {first_few(names)}" for kind, names in problems.items() if names)
        raise file.error(f"has other tensors than its metadata says: {text}")


def _vocabulary(file: GGUFFile, sizes: Sizes) -> tuple[int, int]:
    """vocab_size and pad_vocab_size_multiple: those of a model that was exported here, or every row is a token."""
    size, multiple = (file.metadata.get(key) for key in VOCABULARY_KEYS)
    if all(isinstance(value, int) and value > 0 for value in (size, multiple)):
        padded = -(-typing.cast(int, size) // typing.cast(int, multiple)) * typing.cast(int, multiple)
        if padded == sizes.rows:
            return typing.cast(int, size), typing.cast(int, multiple)
        raise file.error(
            f"{' and '.join(VOCABULARY_KEYS)} are {size} and {multiple}, and the embedding has {sizes.rows} rows"
        )
    return sizes.rows, 1


def _tensors(file: GGUFFile, entry: Entry) -> dict[str, torch.Tensor]:
    """By our names."""
    values, scales = file.read(entry.theirs)
    if scales is not None:
        if entry.matrix:
            return dict(zip(of_weight(entry.ours), (values, scales), strict=True))
        values, scales = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (values, scales))
        values = dequantize(values, scales, torch.float32)
    if entry.is_A:
        if not (values < 0).all():
            raise file.error(f"is damaged: {entry.theirs} must be negative throughout")
        values = torch.log(-values.double()).float()
    return {entry.ours: values.reshape(entry.own or entry.shape)}
