"""Causal attention for hybrid models, on torch's scaled_dot_product_attention; upstream's parameter names."""

import functools
import itertools
import typing

import torch
import torch.nn as nn
import torch.nn.functional as F

from mamba_ssm._arguments import check_flags, check_integer, check_number
from mamba_ssm.modules._inputs import check_cu_seqlens, check_input, is_continued
from mamba_ssm.modules._submodules import conv_widths, convolve, convolve_step
from mamba_ssm.modules.inference import AttentionCache
from mamba_ssm.modules.padding import Padding, masked, roll


def _update_kv_cache(kv: torch.Tensor, inference_params: AttentionCache, layer_idx: int) -> torch.Tensor:
    """Writes kv (B, L, 2, kv heads, head_dim) into a layer's cache behind its seqlen_offset tokens, from row
    batch_size_offset on; returns these rows of the cache up to the last token written, without a gradient.

    Same as upstream's mamba_ssm.modules.mha._update_kv_cache.
    """
    cache = _rows_of_cache(kv, inference_params, layer_idx, getattr(inference_params, "batch_size_offset", 0))
    start, end = inference_params.seqlen_offset, inference_params.seqlen_offset + kv.shape[1]
    with torch.no_grad():
        cache[:, start:end] = kv
    return cache[:, :end]


def _rows_of_cache(kv: torch.Tensor, inference_params: AttentionCache, layer_idx: int | None, row: int) -> torch.Tensor:
    """The rows of a layer's kv_cache that kv (B, L, 2, kv heads, head_dim) is for, from `row` on."""
    caches = inference_params.key_value_memory_dict
    if layer_idx is None:
        raise ValueError("MHA: layer_idx must be given to the constructor to use inference_params")
    if layer_idx not in caches:
        raise ValueError(
            f"MHA: inference_params has no cache of layer {layer_idx}: put allocate_inference_cache's there first"
        )
    cache: torch.Tensor = caches[layer_idx][0]
    if kv.dim() != 5 or kv.shape[2:] != cache.shape[2:]:
        sizes = ", ".join(map(str, cache.shape[2:]))
        raise ValueError(f"MHA: kv must have shape (B, L, {sizes}), got {tuple(kv.shape)}")
    rows, length = row + kv.shape[0], inference_params.seqlen_offset + kv.shape[1]
    if rows > cache.shape[0] or length > cache.shape[1]:
        raise ValueError(
            f"MHA: the cache holds {cache.shape[0]} rows of {cache.shape[1]} tokens, got {rows} rows of {length}"
        )
    return cache[row:rows]


class MHA(nn.Module):
    """Attention with grouped key and value heads, rotary positions and a cache: (B, L, embed_dim) -> the same shape.

    Args:
        num_heads_kv: heads of keys and values, num_heads if None; divides num_heads. head_dim: embed_dim / num_heads if
            None. mlp_dim: width, rounded up to a multiple of 256, of a gated MLP's two halves computed beside the
            attention by the same projections; 0: none.
        qkv_proj_bias, out_proj_bias: of in_proj and out_proj. softmax_scale: 1/sqrt(head_dim) if None.
        causal: a position sees none after it. layer_idx: key of the inference cache.
        d_conv: width, 2..4, of a causal convolution over queries, keys and values; 0: none.
        rotary_emb_dim: how many of each head's first dimensions rotate (RoFormer, arXiv 2104.09864); 0: none.
        rotary_emb_base: of the frequencies. rotary_emb_interleaved: neighbours (0, 1), (2, 3), ... are a pair,
            instead of one from each half.

    in_proj gives queries, keys, values and the MLP's (up, gate), in this order. Same as upstream's
    mamba_ssm.modules.mha.MHA; +: seq_idx and cu_seqlens, packed sequences.
    """

    int8_weights = "in_proj", "out_proj"
    supports_context_parallel = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_heads_kv: int | None = None,
        head_dim: int | None = None,
        mlp_dim: int = 0,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        softmax_scale: float | None = None,
        causal: bool = False,
        layer_idx: int | None = None,
        d_conv: int = 0,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_interleaved: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, typing.Any] = {"device": device, "dtype": dtype}
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        self.layer_idx = layer_idx
        self.d_conv = d_conv
        self.rotary_emb_dim = rotary_emb_dim
        self.rotary_emb_base = rotary_emb_base
        self.rotary_emb_interleaved = rotary_emb_interleaved
        self.softmax_scale = softmax_scale
        self.causal = causal
        check_integer("MHA", "embed_dim", embed_dim)
        check_integer("MHA", "num_heads", num_heads)
        check_integer("MHA", "num_heads_kv", self.num_heads_kv)
        check_integer("MHA", "mlp_dim", mlp_dim, least=0)
        check_integer("MHA", "rotary_emb_dim", rotary_emb_dim, least=0)
        check_flags("MHA", qkv_proj_bias=qkv_proj_bias, out_proj_bias=out_proj_bias, causal=causal)
        check_flags("MHA", rotary_emb_interleaved=rotary_emb_interleaved)
        check_number("MHA", "rotary_emb_base", rotary_emb_base, least=1)
        if softmax_scale is not None:
            check_number("MHA", "softmax_scale", softmax_scale, least=0)
        if head_dim is not None:
            check_integer("MHA", "head_dim", head_dim)
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(f"MHA: num_heads ({num_heads}) must divide embed_dim ({embed_dim}), or give head_dim")
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        check_integer("MHA", "num_heads * head_dim", self.num_heads * self.head_dim)
        self.mlp_dim = -(-mlp_dim // 256) * 256
        if num_heads % self.num_heads_kv:
            raise ValueError(f"MHA: num_heads_kv ({self.num_heads_kv}) must divide num_heads ({num_heads})")
        if d_conv != 0:
            check_integer("MHA", "d_conv (unless 0)", d_conv, *conv_widths())
        if rotary_emb_dim % 2 or rotary_emb_dim > self.head_dim:
            raise ValueError(
                f"MHA: rotary_emb_dim must be even and at most head_dim ({self.head_dim}), got {rotary_emb_dim}"
            )

        self.q_dim = self.num_heads * self.head_dim
        self.kv_dim = self.num_heads_kv * self.head_dim
        qkv_dim = self.q_dim + 2 * self.kv_dim
        self.in_proj = nn.Linear(embed_dim, qkv_dim + self.mlp_dim, bias=qkv_proj_bias, **factory)
        if d_conv:
            self.conv1d = nn.Conv1d(qkv_dim, qkv_dim, kernel_size=d_conv, padding=d_conv - 1, groups=qkv_dim, **factory)
        self.out_proj = nn.Linear(self.q_dim + self.mlp_dim // 2, embed_dim, bias=out_proj_bias, **factory)

    def forward(
        self,
        x: torch.Tensor,
        inference_params: AttentionCache | None = None,
        seq_idx: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        attention_mask: torch.Tensor | Padding | None = None,
    ) -> torch.Tensor:
        """x (B, L, embed_dim) -> the same shape.

        inference_params: InferenceParams. With seqlen_offset 0 the call fills this layer's cache; with a positive one
            it continues at that position, or, where lengths_per_sample (B) int32 is given, a single token of each
            row at the row's own position: that one reads the position on the device, and so suits a CUDA graph, but
            attends over the whole cache under a mask.
        seq_idx: (B, L) int32, packed sequences: a position sees its own only. Not with inference_params.
        cu_seqlens: (sequences + 1) int32, where each sequence packed in x (1, total, embed_dim) starts, and where the
            last ends; with inference_params each sequence fills a row of the cache. The mask is (total, total).
        attention_mask: (B, L) bool or integers, 1 at real steps, 0 at padding before or behind them, which no step sees
            and which gives zeros. Not with seq_idx or cu_seqlens. With inference_params for the first call alone:
            positions count real steps, so these need lengths_per_sample for the steps that follow.
        """
        if attention_mask is None:
            return self._run(inference_params, seq_idx, cu_seqlens, x)
        check_input("MHA", self, x, self.embed_dim, ("in_proj", "out_proj"), in_torch=True)
        run = functools.partial(self._run, inference_params, None, None)
        packed = {"seq_idx": seq_idx, "cu_seqlens": cu_seqlens}
        return masked("MHA", x, attention_mask, inference_params, run, packed)

    def _run(
        self,
        inference_params: AttentionCache | None,
        seq_idx: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        x: torch.Tensor,
        padding: Padding | None = None,
    ) -> torch.Tensor:
        """forward; padding without seq_idx and cu_seqlens, and in a cache at the start of rows."""
        step = is_continued("MHA", inference_params)
        bounds = self._check(x, inference_params, seq_idx, cu_seqlens, step)
        batch, seqlen, _ = x.shape
        cache = conv_state = None
        if inference_params is not None:
            rows = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
            cache, conv_state = self._get_cache(inference_params, rows, x)

        qkv = self.in_proj(x)
        if self.mlp_dim:
            qkv, up, gate = qkv.split([qkv.shape[-1] - self.mlp_dim, self.mlp_dim // 2, self.mlp_dim // 2], dim=-1)
        sequence = None
        if cu_seqlens is not None:
            steps = torch.arange(seqlen, device=x.device, dtype=cu_seqlens.dtype)
            sequence = torch.bucketize(steps, cu_seqlens[1:], right=True)
            positions = steps - cu_seqlens[sequence]
            seq_idx = sequence[None].to(torch.int32)
        elif padding is not None:
            seq_idx = padding.seq_idx
            positions = (padding.real.cumsum(1) - 1).clamp(min=0)
        else:
            positions = self._positions(inference_params, batch, seqlen, x.device)
        if self.d_conv:
            qkv = self._convolve(qkv, conv_state, seq_idx, cu_seqlens, step, padding)
        q, k, v = qkv.split([self.q_dim, self.kv_dim, self.kv_dim], dim=-1)
        q = q.unflatten(-1, (self.num_heads, self.head_dim))
        k = k.unflatten(-1, (self.num_heads_kv, self.head_dim))
        v = v.unflatten(-1, (self.num_heads_kv, self.head_dim))
        if self.rotary_emb_dim:
            q, k = self._rotate(q, positions), self._rotate(k, positions)

        mask = None
        if inference_params is not None and cache is not None:
            if padding is None:
                self._write_cache(cache, k, v, positions, sequence, bounds, inference_params)
            else:
                self._write_real(cache, k, v, padding, inference_params)
            if step:
                k, v, mask = self._read_cache(cache, positions, inference_params.seqlen_offset + seqlen, q.dtype)
        if seq_idx is not None:  # never in a step
            mask = seq_idx[:, None, :, None] == seq_idx[:, None, None, :]
            if self.causal:
                mask = mask.tril()
        out = self._attend(q, k, v, mask, causal=self.causal and mask is None and not step)
        if self.mlp_dim:
            out = torch.cat([out, up * F.silu(gate)], dim=-1)
        return self.out_proj(out)

    def _check(
        self,
        x: torch.Tensor,
        inference_params: AttentionCache | None,
        seq_idx: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        step: bool,
    ) -> list[int] | None:
        """Returns the values of cu_seqlens, or None where they were not looked at."""
        check_input("MHA", self, x, self.embed_dim, ("in_proj", "out_proj"), seq_idx=seq_idx, in_torch=True)
        bounds = None
        if cu_seqlens is not None:
            # with a cache always, where a wrong bound would write beside it
            bounds = check_cu_seqlens("MHA", cu_seqlens, x, synchronize=inference_params is not None)
            if step:
                raise ValueError("MHA: cu_seqlens is for the first call with inference_params, not for a step")
        elif inference_params is not None and seq_idx is not None:
            raise ValueError("MHA: with inference_params packed sequences are given by cu_seqlens, not seq_idx alone")
        elif seq_idx is not None and seq_idx.shape != x.shape[:2]:
            raise ValueError(f"MHA: seq_idx must be (B, L) = {tuple(x.shape[:2])}, got {tuple(seq_idx.shape)}")
        if inference_params is not None:
            if bounds is None:
                end = inference_params.seqlen_offset + x.shape[1]
            else:
                end = max((end - start for start, end in itertools.pairwise(bounds)), default=0)
            if end > inference_params.max_seqlen:
                raise ValueError(
                    f"MHA: {end} tokens do not fit inference_params.max_seqlen = {inference_params.max_seqlen}"
                )
        return bounds

    def _get_cache(
        self, inference_params: AttentionCache, rows: int, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This layer's (kv_cache, conv_state) in inference_params, made if they are not there yet."""
        if self.layer_idx is None:
            raise ValueError("MHA: layer_idx must be given to the constructor to use inference_params")
        caches = inference_params.key_value_memory_dict
        if self.layer_idx not in caches:
            length = inference_params.max_seqlen
            caches[self.layer_idx] = self.allocate_inference_cache(rows, length, dtype=x.dtype, device=x.device)
        kv_cache, conv_state = caches[self.layer_idx]
        if kv_cache.device != x.device:
            raise ValueError(f"MHA: the cache must be on {x.device} like the input, got {kv_cache.device}")
        if kv_cache.shape[0] != rows:
            raise ValueError(f"MHA: the cache holds a batch of {kv_cache.shape[0]}, got a batch of {rows}")
        return kv_cache, conv_state

    def allocate_inference_cache(
        self,
        batch_size: int,
        max_seqlen: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Zeros (kv_cache (B, max_seqlen, 2, num_heads_kv, head_dim), conv_state (B, channels, d_conv) or None)."""
        weight = self.out_proj.weight
        if not isinstance(weight, torch.Tensor):  # a method of torch's quantised layers
            weight = weight()
        if dtype is None:
            dtype = weight.dtype if weight.is_floating_point() else torch.get_default_dtype()
        factory: dict[str, typing.Any] = {"device": weight.device if device is None else device, "dtype": dtype}
        kv_cache = torch.zeros(batch_size, max_seqlen, 2, self.num_heads_kv, self.head_dim, **factory)
        conv_state = None
        if self.d_conv:
            conv_state = torch.zeros(batch_size, self.q_dim + 2 * self.kv_dim, self.d_conv, **factory)
        return kv_cache, conv_state

    @torch.no_grad()
    def _write_cache(
        self,
        cache: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        sequence: torch.Tensor | None,
        bounds: list[int] | None,
        inference_params: AttentionCache,
    ) -> None:
        """Keys and values (B, L, kv heads, head_dim) to their positions; packed ones to their sequence's row."""
        start = inference_params.seqlen_offset
        if start == 0 and inference_params.lengths_per_sample is not None:
            cache.zero_()  # a step's mask hides what earlier sequences left there, but not a NaN
        new = torch.stack([k, v], dim=2).to(cache.dtype)
        if sequence is not None and bounds is not None:
            end = bounds[-1]  # not what lies behind the last sequence
            cache[sequence[:end], positions[:end].long()] = new[0, :end]
        elif positions.dim() == 2:
            cache[torch.arange(len(cache), device=cache.device)[:, None], positions.long()] = new
        else:
            cache[:, start : start + new.shape[1]] = new

    @torch.no_grad()
    def _write_real(
        self,
        cache: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        padding: Padding,
        inference_params: AttentionCache,
    ) -> None:
        """Keys and values of real steps to their positions, from 0 on; those of padding behind them, where a step's
        mask hides them until later steps write there.
        """
        if inference_params.lengths_per_sample is None:
            raise ValueError(
                "MHA: attention_mask with inference_params needs lengths_per_sample, since rows then have positions of "
                "their own: set it to attention_mask.sum(1, dtype=torch.int32), and add 1 after each step"
            )
        cache.zero_()  # a mask hides what earlier sequences left there, but not a NaN
        new = roll(padding.zero(torch.stack([k, v], dim=2)), padding.lengths())
        cache[:, : new.shape[1]] = new.to(cache.dtype)

    def _read_cache(
        self, cache: torch.Tensor, positions: torch.Tensor, end: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(keys, values, mask or None) that a step at these positions sees; `end` is its last position, plus one."""
        mask = None
        if positions.dim() == 2:
            mask = (torch.arange(cache.shape[1], device=cache.device) <= positions)[:, None, None]
        else:
            cache = cache[:, :end]
            if self.causal and len(positions) > 1:
                mask = torch.arange(end, device=cache.device) <= positions[:, None]
        keys, values = cache.to(dtype).unbind(dim=2)
        return keys, values, mask

    # ---- what upstream's forward is made of, for code that calls it --------------------------------------------------

    def _update_kv_cache(self, kv: torch.Tensor, inference_params: AttentionCache) -> torch.Tensor:
        """Writes kv (B, L, 2, kv heads, head_dim) into this layer's cache; returns all that is there now."""
        return _update_kv_cache(kv, inference_params, typing.cast(int, self.layer_idx))

    def _update_kvcache_attention(
        self, q: torch.Tensor, kv: torch.Tensor, inference_params: AttentionCache
    ) -> torch.Tensor:
        """Attention of q (B, L, heads, head_dim), of the same shape, after kv (B, L, 2, kv heads, head_dim) was written
        into this layer's cache. Positions are forward's: lengths_per_sample, if given, in a step of one token.
        """
        cache, start = _rows_of_cache(kv, inference_params, self.layer_idx, 0), inference_params.seqlen_offset
        batch, seqlen = kv.shape[:2]
        positions = self._positions(inference_params, batch, seqlen, q.device)
        keys, values = kv.unbind(2)
        self._write_cache(cache, keys, values, positions, None, None, inference_params)
        mask = None
        if start > 0:
            keys, values, mask = self._read_cache(cache, positions, start + seqlen, q.dtype)
        out = self._attend(q, keys, values, mask, causal=self.causal and mask is None and start == 0)
        return out.unflatten(-1, (self.num_heads, self.head_dim))

    def _apply_rotary_update_kvcache_attention(
        self, q: torch.Tensor, kv: torch.Tensor, inference_params: AttentionCache
    ) -> torch.Tensor:
        """_update_kvcache_attention of q and keys that are still to be turned to their positions."""
        if self.rotary_emb_dim:
            positions = self._positions(inference_params, q.shape[0], q.shape[1], q.device)
            keys, values = kv.unbind(2)
            q, kv = self._rotate(q, positions), torch.stack([self._rotate(keys, positions), values], dim=2)
        return self._update_kvcache_attention(q, kv, inference_params)

    # ------------------------------------------------------------------------------------------------------------------

    def _positions(
        self, inference_params: AttentionCache | None, batch: int, seqlen: int, device: torch.device
    ) -> torch.Tensor:
        """(L) of all rows, or (B, 1) in a step with lengths_per_sample."""
        steps = torch.arange(seqlen, device=device)
        if inference_params is None or inference_params.seqlen_offset == 0:
            return steps
        if inference_params.lengths_per_sample is not None:
            if seqlen != 1:
                raise ValueError(f"MHA: with lengths_per_sample a step takes one token, got {seqlen}")
            return inference_params.lengths_per_sample[:batch, None]
        return steps + inference_params.seqlen_offset

    def _convolve(
        self,
        qkv: torch.Tensor,
        conv_state: torch.Tensor | None,
        seq_idx: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        step: bool,
        padding: Padding | None,
    ) -> torch.Tensor:
        if conv_state is not None and step and qkv.shape[1] == 1:
            with torch.no_grad():
                return convolve_step(self.conv1d, qkv.squeeze(1), conv_state, None).unsqueeze(1)
        packed = seq_idx, conv_state, step, cu_seqlens
        return convolve(self.conv1d, qkv.transpose(1, 2), None, *packed, padding=padding).transpose(1, 2)

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x (B, L, heads, head_dim) at positions (L) or (B, L), the first rotary_emb_dim dimensions turned.

        Angles in float32 and made anew each time: a table kept in a buffer would be rounded by .to(dtype).
        """
        dim = self.rotary_emb_dim
        frequency = self.rotary_emb_base ** (-torch.arange(0, dim, 2, device=x.device, dtype=torch.float32) / dim)
        angle = (positions.to(torch.float32)[..., None] * frequency).unsqueeze(-2)  # a dimension for the heads
        cos, sin = angle.cos(), angle.sin()
        turned, rest = x[..., :dim].float(), x[..., dim:]
        if self.rotary_emb_interleaved:
            first, second = turned[..., ::2], turned[..., 1::2]
        else:
            first, second = turned.chunk(2, dim=-1)
        pair = first * cos - second * sin, first * sin + second * cos
        turned = torch.stack(pair, dim=-1).flatten(-2) if self.rotary_emb_interleaved else torch.cat(pair, dim=-1)
        return torch.cat([turned.to(x.dtype), rest], dim=-1)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool
    ) -> torch.Tensor:
        """q (B, L, heads, head_dim), k and v (B, T, kv heads, head_dim) -> (B, L, heads * head_dim)."""
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        batch, _, seqlen, _ = q.shape
        groups = self.num_heads // self.num_heads_kv
        if seqlen == 1:  # the heads that share keys become rows of one query: nothing is repeated
            q = q.reshape(batch, self.num_heads_kv, groups, self.head_dim)
            causal = False
        elif groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=self.softmax_scale)
        return out.reshape(batch, self.num_heads, seqlen, self.head_dim).transpose(1, 2).flatten(-2)
