"""Language models of Mamba blocks of all kinds and attention: upstream's constructors, state dicts and checkpoints."""

import os
import typing
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields, is_dataclass
from functools import partial

import torch
import torch.nn as nn

from mamba_ssm import _checks as checks
from mamba_ssm._arguments import parameter_dtype, usable_device
from mamba_ssm._torch import is_plain
from mamba_ssm.distributed.tensor_parallel import ParallelEmbeddings
from mamba_ssm.models._create_block import create_block as create_block  # where upstream has it
from mamba_ssm.models._create_block import layer_without_memory
from mamba_ssm.models._decoding import recorded_step
from mamba_ssm.models._fit import (
    EMBEDDING,
    HEAD,
    check_dtypes,
    check_shapes,
    check_sizes,
    check_tied,
    expected_shapes,
    shapes_of,
)
from mamba_ssm.models._initial import init_weights as _init_weights
from mamba_ssm.models._labels import head_weight, next_labels
from mamba_ssm.models._quantized import (
    INT8,
    QUANTIZATION,
    quantized_names,
    shapes_of_scales,
    step_by_int8_head,
    take_quantization,
    without_quantized,
)
from mamba_ssm.models.config_mamba import MambaConfig, check_config, check_layers
from mamba_ssm.modules.block import Block, add_norm, through_layers
from mamba_ssm.modules.inference import InferenceCache
from mamba_ssm.modules.padding import Padding, masked, padding_of
from mamba_ssm.modules.quantized import (
    QuantizedEmbedding,
    QuantizedLinear,
    is_quantized,
    of_weight,
    quantizable,
    replace_by_quantized,
)
from mamba_ssm.ops.linear import project
from mamba_ssm.ops.linear_cross_entropy import linear_cross_entropy
from mamba_ssm.ops.norm import RMSNorm
from mamba_ssm.utils.generation import GenerationMixin
from mamba_ssm.utils.hf import CheckpointError, find_weights, load_config_hf, read_weights, write_checkpoint


class CausalLMOutput(typing.NamedTuple):
    """What MambaLMHeadModel returns."""

    logits: torch.Tensor


class CausalLMLoss(typing.NamedTuple):
    """What MambaLMHeadModel returns where labels are given: the loss comes first, as trainers expect."""

    loss: torch.Tensor
    logits: typing.Any = None


def _check_device(what: str, given: torch.Tensor, name: str, weight: torch.Tensor) -> None:
    """torch takes meta tensors beside others in look-ups and products, and returns memory that nobody has written."""
    if given.device != weight.device:
        cure = checks.cure_of_devices(weight.is_meta, given.is_meta)
        raise ValueError(f"{what} must be on {weight.device} like {name}, got {given.device}: {cure}")


class MixerModel(nn.Module):
    """Embedding, blocks and the last norm: tokens (B, L) -> hidden states (B, L, d_model).

    The arguments are MambaConfig's, norm_epsilon, and initializer_cfg: keyword arguments of the initialisation
    (initializer_range=0.02, rescale_prenorm_residual=True). State-dict names: embedding, layers.{i}, norm_f.
    """

    int8_weights = ("embedding",)

    def __init__(
        self,
        d_model: int,
        n_layer: int,
        d_intermediate: int,
        vocab_size: int,
        ssm_cfg: Mapping[str, typing.Any] | None = None,
        attn_layer_idx: Collection[int] | None = None,
        attn_cfg: Mapping[str, typing.Any] | None = None,
        norm_epsilon: float = 1e-5,
        rms_norm: bool = False,
        initializer_cfg: dict[str, typing.Any] | None = None,
        fused_add_norm: bool = False,
        residual_in_fp32: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, typing.Any] = {"device": device, "dtype": dtype}
        check_layers("MixerModel", attn_layer_idx, n_layer)
        self.residual_in_fp32 = residual_in_fp32
        self.fused_add_norm = fused_add_norm
        self.embedding = nn.Embedding(vocab_size, d_model, **factory)
        attention = frozenset(attn_layer_idx or ())
        self.layers = nn.ModuleList(
            create_block(
                d_model,
                d_intermediate,
                ssm_cfg=ssm_cfg,
                attn_layer_idx=attention,
                attn_cfg=attn_cfg,
                norm_epsilon=norm_epsilon,
                rms_norm=rms_norm,
                residual_in_fp32=residual_in_fp32,
                fused_add_norm=fused_add_norm,
                layer_idx=i,
                **factory,
            )
            for i in range(n_layer)
        )
        self.norm_f = (RMSNorm if rms_norm else nn.LayerNorm)(d_model, eps=norm_epsilon, **factory)
        self.apply(
            partial(
                _init_weights,
                n_layer=n_layer,
                n_residuals_per_layer=1 if d_intermediate == 0 else 2,
                **(initializer_cfg or {}),
            )
        )

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: typing.Any
    ) -> dict[int, typing.Any]:
        """{layer index: the mixer's empty states} for InferenceParams.key_value_memory_dict."""
        return {
            i: typing.cast(Block, layer).allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)
            for i, layer in enumerate(self.layers)
        }

    def forward(
        self,
        input_ids: torch.Tensor,
        inference_params: InferenceCache | None = None,
        attention_mask: torch.Tensor | None = None,
        **mixer_kwargs: typing.Any,
    ) -> torch.Tensor:
        """input_ids (B, L) integers -> (B, L, d_model). mixer_kwargs go to every mixer: seq_idx (B, L) int32 for packed
        sequences, cu_seqlens (sequences + 1) int32 for Mamba-2, Mamba-3 and attention.

        attention_mask: (B, L) bool or integers, 1 at tokens, 0 at padding before or behind them, as tokenizers make it:
            each row is as if it were alone and without padding, at which the result is undefined but finite. Not with
            seq_idx or cu_seqlens; with inference_params for the first call alone.
        """
        self._check_tokens(input_ids)
        if attention_mask is not None:
            run = partial(self._run, inference_params, mixer_kwargs)
            packed = {name: mixer_kwargs.get(name) for name in ("seq_idx", "cu_seqlens")}
            return masked("MixerModel", input_ids, attention_mask, inference_params, run, packed, zero=False)
        return self._run(inference_params, mixer_kwargs, input_ids)

    def _check_tokens(self, input_ids: torch.Tensor) -> None:
        checks.check_tensor("MixerModel", "input_ids", input_ids)
        tokens = input_ids.dim() == 2 and input_ids.dtype in (torch.int64, torch.int32)
        plain = is_plain(self.embedding, nn.Embedding) or is_plain(self.embedding, QuantizedEmbedding)
        if not tokens and plain:  # another module takes what it will
            raise ValueError(
                f"MixerModel: input_ids must be int64 (B, L), got {input_ids.dtype} of {tuple(input_ids.shape)}"
            )
        if plain:
            _check_device("MixerModel: input_ids", input_ids, "embedding.weight", self.embedding.weight)

    def _run(
        self,
        inference_params: InferenceCache | None,
        mixer_kwargs: dict[str, typing.Any],
        input_ids: torch.Tensor,
        padding: Padding | None = None,
    ) -> torch.Tensor:
        """forward; input_ids were checked."""
        if padding is not None:
            mixer_kwargs = {**mixer_kwargs, "attention_mask": padding}
        return self._mix(self.embedding(input_ids), inference_params, mixer_kwargs)

    def _embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The first part of a step, which _mix ends."""
        self._check_tokens(input_ids)
        hidden_states: torch.Tensor = self.embedding(input_ids)
        return hidden_states

    def _mix(
        self,
        hidden_states: torch.Tensor,
        inference_params: InferenceCache | None,
        mixer_kwargs: Mapping[str, typing.Any],
    ) -> torch.Tensor:
        return self._last_norm(*through_layers(self.layers, hidden_states, inference_params, mixer_kwargs))

    def _last_norm(self, hidden_states: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        options = self.fused_add_norm, self.residual_in_fp32
        normed: torch.Tensor = add_norm(hidden_states, residual, self.norm_f, *options, prenorm=False)
        return normed


class MambaLMHeadModel(nn.Module, GenerationMixin):
    """A causal language model: MixerModel and a head that shares the embedding's weight if config.tie_embeddings.

    Args:
        config: MambaConfig, or another object with its attributes. initializer_cfg: as for MixerModel.
        device, dtype: of the parameters.

    Same as upstream's mamba_ssm.models.mixer_seq_simple.MambaLMHeadModel; state-dict names backbone.*, lm_head.weight.
    """

    int8_weights = ("lm_head",)

    def __init__(
        self,
        config: MambaConfig,
        initializer_cfg: dict[str, typing.Any] | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        config = check_config(config)
        factory: dict[str, typing.Any] = {"device": device, "dtype": dtype}
        multiple = config.pad_vocab_size_multiple
        self.vocab_size = vocab_size = -(-config.vocab_size // multiple) * multiple
        self.backbone = MixerModel(
            d_model=config.d_model,
            n_layer=config.n_layer,
            d_intermediate=config.d_intermediate,
            vocab_size=vocab_size,
            ssm_cfg=config.ssm_cfg,
            attn_layer_idx=config.attn_layer_idx,
            attn_cfg=config.attn_cfg,
            rms_norm=config.rms_norm,
            initializer_cfg=initializer_cfg,
            fused_add_norm=config.fused_add_norm,
            residual_in_fp32=config.residual_in_fp32,
            **factory,
        )
        self.lm_head = nn.Linear(config.d_model, vocab_size, bias=False, **factory)
        # drawn once more, and with one residual a layer, as upstream has it: the same seed gives the same weights
        self.apply(partial(_init_weights, n_layer=config.n_layer, **(initializer_cfg or {})))
        self.tie_weights()

    def tie_weights(self) -> None:
        """lm_head.weight is the embedding's from now on, if the configuration says so."""
        if not check_config(self.config).tie_embeddings:
            return
        embedding, head = self.backbone.embedding, self.lm_head
        if isinstance(embedding, ParallelEmbeddings):
            embedding = embedding.word_embeddings
        if embedding.weight.shape != head.weight.shape:
            raise ValueError(
                f"MambaLMHeadModel: lm_head.weight must have the embedding's shape, {tuple(embedding.weight.shape)}, "
                f"got {tuple(head.weight.shape)}: split both over the same ranks, or set tie_embeddings=False"
            )
        if isinstance(embedding, QuantizedEmbedding):
            typing.cast(QuantizedLinear, head).share_weight(embedding.weight, embedding.scales)
        else:
            head.weight = embedding.weight

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: typing.Any
    ) -> dict[int, typing.Any]:
        """{layer index: empty states} of a batch, of dtype or of each layer's own."""
        return self.backbone.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)

    def _check_head(self, hidden_states: torch.Tensor) -> None:
        if is_plain(self.lm_head, nn.Linear):
            _check_device("MambaLMHeadModel: the hidden states", hidden_states, "lm_head.weight", self.lm_head.weight)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        inference_params: InferenceCache | None = None,
        num_last_tokens: int = 0,
        labels: torch.Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        num_items_in_batch: torch.Tensor | int | None = None,
        attention_mask: torch.Tensor | None = None,
        **mixer_kwargs: typing.Any,
    ) -> CausalLMOutput | CausalLMLoss:
        """Next-token logits of each position; with labels the loss of predicting them, without any logits.

        Args:
            input_ids: (B, L) integers. position_ids: not used, accepted for generation code.
            inference_params: InferenceParams; with seqlen_offset 0 the states are filled, else a step is taken.
            num_last_tokens: if positive, logits of that many last positions only; with attention_mask of each row's
                last tokens, behind its padding.
            labels: (B, L) int64, as a rule input_ids: a position is to predict the label of the next one, as in
                transformers. No position predicts a label of ignore_index: give it to padding, and to the first token
                of each packed sequence. With num_last_tokens so many last positions count.
            label_smoothing, z_loss: as for linear_cross_entropy, which computes the loss in pieces.
            num_items_in_batch: the sum of the losses is divided by it, and not by the number of labels that count: for
                accumulating gradients of several batches.
            attention_mask: (B, L), 1 at tokens, 0 at padding; see MixerModel.forward. Padding predicts nothing and
                is not to be predicted, whatever its labels are.
            mixer_kwargs: go to every mixer: seq_idx (B, L) int32, cu_seqlens (sequences + 1) int32.

        Returns:
            A namedtuple with logits (B, L or num_last_tokens, padded vocabulary). With labels: one with the loss, a
            float32 scalar, whose logits are None.

        Raises:
            ValueError: labels are not (B, L), or lm_head is neither a linear layer nor a ColumnParallelLinear with
                sequence_parallel=False, or is more than that (it has a bias or hooks).
        """
        if inference_params is not None and labels is None and attention_mask is None and not mixer_kwargs:
            logits = None
            if type(self.backbone) is MixerModel:
                logits = recorded_step(self, input_ids, inference_params)
                logits = step_by_int8_head(self, input_ids, inference_params) if logits is None else logits
            if logits is not None:
                return CausalLMOutput(logits=logits)
        padding = None
        if attention_mask is not None:
            packed = {name: mixer_kwargs.get(name) for name in ("seq_idx", "cu_seqlens")}
            padding = padding_of("MambaLMHeadModel", attention_mask, input_ids, packed)
            mixer_kwargs["attention_mask"] = padding
        hidden_states = self.backbone(input_ids, inference_params=inference_params, **mixer_kwargs)
        if labels is not None:
            labels = next_labels(input_ids, labels, ignore_index, padding)
        if num_last_tokens > 0:
            if padding is not None:
                hidden_states = padding.move_to_start(hidden_states)
                labels = None if labels is None else padding.move_to_start(labels)
            hidden_states = hidden_states[:, -num_last_tokens:]
        self._check_head(hidden_states)
        if labels is None:
            return CausalLMOutput(logits=project(self.lm_head, hidden_states))
        weight, group = head_weight(self.lm_head, hidden_states.dtype)
        loss = linear_cross_entropy(
            hidden_states,
            weight,
            labels[:, -hidden_states.shape[1] :],
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            reduction="mean" if num_items_in_batch is None else "sum",
            process_group=group,
        )
        return CausalLMLoss(loss if num_items_in_batch is None else loss / num_items_in_batch)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name: str | os.PathLike[str],
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | str | None = None,
        **kwargs: typing.Any,
    ) -> "MambaLMHeadModel":
        """A model from a folder, or from a repository of the Hugging Face hub (needs huggingface_hub).

        Reads config.json and model.safetensors (needs safetensors) or pytorch_model.bin (tensors only: no code of the
        file is run), whole or split over several files with an index. kwargs go to the constructor.

        device, dtype: of the parameters; dtype may be a name, such as "bfloat16".

        Raises:
            CheckpointNotFoundError (a FileNotFoundError): no such folder, repository or file.
            CheckpointError (a ValueError): a file is damaged, is no mamba_ssm checkpoint, or its tensors do not fit the
            configuration. No layer is made before that is known, unless a subclass has a constructor of its own.
            ImportError: names the extra to install. ValueError: device or dtype is none. RuntimeError: torch cannot use
            the device here.
        """
        device, dtype = usable_device("from_pretrained", device), parameter_dtype("from_pretrained", dtype)
        source = f"config.json of {str(pretrained_model_name)!r}"
        values = load_config_hf(pretrained_model_name)
        quantization = take_quantization(values, source)
        config = MambaConfig.from_dict(values, source)
        path = find_weights(pretrained_model_name)
        state = read_weights(path)  # on the CPU as they are; copied to each parameter's device and dtype
        if config.tie_embeddings and EMBEDDING in state:
            for one, other in zip(of_weight(HEAD), of_weight(EMBEDDING), strict=True):  # which may be left out
                if other in state:
                    state.setdefault(one, state[other])
        quantized = quantized_names(state, path) if quantization else []
        standard = cls.__init__ is MambaLMHeadModel.__init__
        if standard:
            check_dtypes(without_quantized(state, quantized), path)
            check_sizes(config, state, path)
            try:
                expected = expected_shapes(config, partial(layer_without_memory, config))
            except (ValueError, RuntimeError) as error:  # of a block, or of torch where sizes multiply to too much
                reason, _, _ = str(error).partition("\n")
                raise CheckpointError(f"{source}: {reason}") from error
            check_shapes({**expected, **shapes_of_scales(expected, quantized)}, shapes_of(state), path)
        if config.tie_embeddings:
            check_tied(state, path)
        model = cls(config, device=device, dtype=dtype, **kwargs)
        known = quantizable(model) if quantized else {}
        for name in quantized:
            if name not in known:
                raise CheckpointError(f"{path}: {name} is none of the layers that can be int8")
            replace_by_quantized(model, name)
        if quantized:
            model.tie_weights()
        if not standard:  # only the model tells what its own constructor adds
            own = model.state_dict()
            floats = {name: state[name] for name in own if name in state and own[name].is_floating_point()}
            check_dtypes(without_quantized(floats, quantized), path)
            check_shapes(shapes_of(own), shapes_of(state), path)
        model.load_state_dict(state)
        return model

    def save_pretrained(self, save_directory: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Writes config.json and pytorch_model.bin, or model.safetensors with safe_serialization=True, into a folder,
        which is made. Weights in the other format are removed from it: a folder holds one model.
        """
        config = check_config(self.config)
        state = self.state_dict()
        if safe_serialization and config.tie_embeddings:
            for name in of_weight(HEAD):
                state.pop(name, None)  # safetensors holds each tensor once
        further = fields(self.config) if is_dataclass(self.config) else ()  # those of a subclass of MambaConfig
        own = {known.name: getattr(self.config, known.name) for known in further}
        quantized = any(map(is_quantized, quantizable(self).values()))
        quantization = {QUANTIZATION: INT8} if quantized else {}
        write_checkpoint(save_directory, {**own, **asdict(config), **quantization}, state, safe_serialization)
