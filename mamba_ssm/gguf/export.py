"""A model as a GGUF file, which the package gguf writes."""

import importlib
import os
import typing
from pathlib import Path

import torch
import torch.nn as nn

from mamba_ssm._arguments import first_few, shown
from mamba_ssm.gguf._format import DTYPES, Q8_0, q8_0_bytes
from mamba_ssm.gguf._layout import EPSILON, Entry, Sizes, entries, sizes_of
from mamba_ssm.gguf._tokenizer import Tokenizer, tokenizer_of_folder
from mamba_ssm.models.config_mamba import check_config
from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel
from mamba_ssm.modules.quantized import of_weight
from mamba_ssm.ops.linear import dequantize, quantize_weight
from mamba_ssm.utils.hf import find_weights, read_weights

TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": Q8_0}
# The keys that hold what llama.cpp has no place for: which rows of the embedding are tokens.
VOCABULARY_KEYS = "mamba_ssm.vocab_size", "mamba_ssm.pad_vocab_size_multiple"
_CONTEXT = 1 << 20  # which a file has to state, and these models do not limit
_FLOATS = {torch.float16: "F16", torch.bfloat16: "BF16"}


def export_folder(folder: str | os.PathLike[str], file: str | os.PathLike[str], type: str | None = None) -> str:
    """Writes the checkpoint of a folder, or of a hub repository, with its tokenizer.json if it has one that fits.

    Returns: a line that says what was written. Raises: as MambaLMHeadModel.from_pretrained and export_model.
    """
    _check_type(type)
    model = MambaLMHeadModel.from_pretrained(folder, dtype=_dtype_of_folder(folder) if type is None else None)
    tokenizer, found = tokenizer_of_folder(find_weights(folder).parent, model.vocab_size)
    kind = export_model(model, file, type=type, tokenizer=tokenizer)
    return f"wrote {file}: {kind}, {found}"


def export_model(
    model: nn.Module, file: str | os.PathLike[str], type: str | None = None, tokenizer: Tokenizer | None = None
) -> str:
    """Writes a MambaLMHeadModel of Mamba or Mamba-2 layers for llama.cpp; needs pip install "mamba_ssm[gguf]".

    Args:
        file: to write; it is replaced when the new one is whole.
        type: of embedding, head and projections: "f32", "f16", "bf16" or "q8_0", by default q8_0 for a model that was
            quantised, else the embedding's dtype. All other tensors are float32. Weights of quantize() become q8_0 as
            they are, others are rounded as quantize() does.
        tokenizer: see export_folder; None: the file has none, and llama.cpp takes tokens by number.

    Returns:
        The type that was written.

    Raises:
        ValueError: llama.cpp cannot express the model, or type is none; the message says what and why.
        TypeError: model is no MambaLMHeadModel. ImportError: the package gguf is missing.
    """
    _check_type(type)
    sizes = sizes_of(model)
    model = typing.cast(MambaLMHeadModel, model)
    config = check_config(model.config)
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    listed = entries(sizes, config.tie_embeddings)
    _check_names(state, listed, config.tie_embeddings)
    embedding = state[listed[0].ours]
    kind = TYPES[type] if type else Q8_0 if embedding.dtype == torch.int8 else _FLOATS.get(embedding.dtype, "F32")
    if kind == Q8_0 and sizes.d_model % 32:
        raise ValueError(f"GGUF export: q8_0 needs a d_model that is a multiple of 32, got {sizes.d_model}: take f16")
    gguf = _import_gguf()
    target = Path(file)
    partial = target.with_name(target.name + ".partial")
    writer = gguf.GGUFWriter(partial, sizes.architecture)
    try:
        _add_metadata(writer, sizes, kind, gguf)
        for key, value in zip(VOCABULARY_KEYS, (config.vocab_size, config.pad_vocab_size_multiple), strict=True):
            writer.add_uint32(key, value)
        if tokenizer is None:
            writer.add_tokenizer_model("no_vocab")
            writer.add_vocab_size(sizes.rows)
        else:
            tokenizer.add_to(writer)
        for entry in listed:
            _add_tensor_info(writer, entry, kind, gguf)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for entry in listed:  # one at a time: only one is converted and in memory
            writer.write_tensor_data(_data(state, entry, kind).numpy())
        writer.close()
        os.replace(partial, target)
    finally:
        writer.close()
        partial.unlink(missing_ok=True)
    return kind.lower()


def _check_type(type: str | None) -> None:
    if type is not None and type not in TYPES:
        raise ValueError(f"GGUF export: type must be one of {', '.join(TYPES)}, got {shown(type)}")


def _import_gguf() -> typing.Any:
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise ImportError('gguf is needed to write GGUF files; pip install "mamba_ssm[gguf]"') from error


def _dtype_of_folder(folder: str | os.PathLike[str]) -> torch.dtype | None:
    """The dtype in which the checkpoint holds its embedding, so that a file without --type keeps it."""
    embedding = read_weights(find_weights(folder)).get("backbone.embedding.weight")
    return embedding.dtype if embedding is not None and embedding.is_floating_point() else None


def _check_names(state: dict[str, torch.Tensor], listed: list[Entry], tied: bool) -> None:
    weights = {entry.ours for entry in listed} | ({"lm_head.weight"} if tied else set())
    names = weights | {scales for _, scales in map(of_weight, weights) if scales in state}
    odd = [*sorted(names - state.keys()), *sorted(state.keys() - names)]
    if odd:
        raise ValueError(
            "GGUF export: the model must have MambaLMHeadModel's parameters and no others (adapters are merged first), "
            f"got {first_few(odd)} missing or beyond them"
        )


def _add_metadata(writer: typing.Any, sizes: Sizes, kind: str, gguf: typing.Any) -> None:
    writer.add_file_type(getattr(gguf.LlamaFileType, "ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"))
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(sizes.d_model)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(sizes.n_layer)
    writer.add_ssm_conv_kernel(sizes.d_conv)
    writer.add_ssm_inner_size(sizes.d_inner)
    writer.add_ssm_state_size(sizes.d_state)
    writer.add_ssm_time_step_rank(sizes.dt_rank)
    if sizes.architecture == "mamba2":
        writer.add_ssm_group_count(sizes.ngroups)
    writer.add_layer_norm_rms_eps(EPSILON)


def _add_tensor_info(writer: typing.Any, entry: Entry, kind: str, gguf: typing.Any) -> None:
    import numpy

    kind = kind if entry.matrix else "F32"
    raw = getattr(gguf.GGMLQuantizationType, kind)
    shape = gguf.quant_shape_to_byte_shape(entry.shape, raw) if kind in (Q8_0, "BF16") else entry.shape
    dtype = numpy.dtype({"F32": "float32", "F16": "float16"}.get(kind, "uint8"))
    size = dtype.itemsize
    for length in shape:
        size *= length
    writer.add_tensor_info(entry.theirs, shape, dtype, size, raw_dtype=raw)


def _data(state: dict[str, torch.Tensor], entry: Entry, kind: str) -> torch.Tensor:
    """The tensor as the file holds it, on the CPU; bfloat16 and Q8_0 as bytes."""
    tensor, scales = state[entry.ours].cpu(), state.get(of_weight(entry.ours)[1])
    if entry.matrix and kind == Q8_0:
        parts = (tensor, scales.cpu()) if scales is not None else quantize_weight(tensor)
        return q8_0_bytes(*parts)
    if scales is not None:
        tensor = dequantize(tensor, scales.cpu(), torch.float32)
    if entry.is_A:
        tensor = -torch.exp(tensor.double())
    tensor = tensor.to(DTYPES[kind] if entry.matrix else torch.float32).reshape(entry.shape).contiguous()
    return tensor.view(torch.uint8) if tensor.dtype == torch.bfloat16 else tensor
