"""Problems that the tests share, and how results are judged. Imports torch only.

Letters: B batch, D channels, L length, N dstate, G groups, H heads, P headdim, W conv width.
"""

from dataclasses import dataclass, fields, replace

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def dtype_id(dtype):
    return str(dtype).replace("torch.", "")


def case_id(case):
    """What differs from the defaults, e.g. "B2-D6-L70-N5-z"."""
    letters = {"batch": "B", "dim": "D", "seqlen": "L", "dstate": "N", "groups": "G", "width": "W"}
    letters.update({"heads": "H", "headdim": "P"})
    words = []
    for field in fields(case):
        value = getattr(case, field.name)
        if field.name in ("batch", "dim", "seqlen", "heads", "headdim"):
            words.append(f"{letters[field.name]}{value}")
        elif value != field.default:
            if isinstance(value, bool):
                words.append(field.name if value else "no_" + field.name)
            else:
                words.append(f"{letters.get(field.name, field.name)}{value}")
    return "-".join(words)


@dataclass(frozen=True)
class ScanCase:
    """One selective scan problem; inputs() makes its tensors."""

    batch: int
    dim: int
    seqlen: int
    dstate: int = 16
    groups: int = 1
    variable_B: bool = True
    variable_C: bool = True
    D: bool = True
    z: bool = True
    delta_bias: bool = True
    softplus: bool = True
    initial_state: bool = False
    seq_idx: bool = False
    reverse: bool = False

    def inputs(self, dtype, device, seed=0):
        """Keyword arguments of selective_scan_fn, except delta_softplus, return_last_state and reverse.

        Values are drawn on the CPU, so that every device sees the same problem.
        """
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape, dtype=dtype):
            return torch.randn(*shape, generator=generator).to(dtype)

        wide = (self.batch, self.dim, self.seqlen)
        matrix = (self.batch, self.groups, self.dstate, self.seqlen)
        constant = (self.dim, self.dstate)
        f32 = torch.float32
        delta = 0.5 * torch.rand(*wide, generator=generator).to(f32) + (-1.0 if self.softplus else 0.0)
        tensors = {
            "u": normal(*wide),
            "delta": delta.to(dtype),
            "A": -0.5 - torch.rand(*constant, generator=generator),
            "B": normal(*matrix) if self.variable_B else normal(*constant, dtype=f32),
            "C": normal(*matrix) if self.variable_C else normal(*constant, dtype=f32),
            "D": normal(self.dim, dtype=f32) if self.D else None,
            "z": normal(*wide) if self.z else None,
            "delta_bias": 0.1 * normal(self.dim, dtype=f32) if self.delta_bias else None,
            "initial_state": normal(self.batch, self.dim, self.dstate, dtype=f32) if self.initial_state else None,
            "seq_idx": self._seq_idx(generator) if self.seq_idx else None,
        }
        return {name: None if tensor is None else tensor.to(device) for name, tensor in tensors.items()}

    def _seq_idx(self, generator):
        starts = torch.rand(self.batch, self.seqlen, generator=generator) < 0.1
        return starts.cumsum(1).to(torch.int32)


# Lengths around 64 (the distance of checkpoints) and its multiples; dstate of every kernel specialisation and odd ones.
SCAN_CASES = (
    ScanCase(2, 6, 70),
    ScanCase(1, 1, 1, dstate=1),
    ScanCase(3, 5, 2, dstate=3),
    ScanCase(2, 33, 63, dstate=8),
    ScanCase(1, 17, 64, dstate=16, z=False),
    ScanCase(2, 16, 65, dstate=16, D=False),
    ScanCase(2, 8, 129, dstate=32, delta_bias=False),
    ScanCase(1, 4, 200, dstate=64, softplus=False),
    ScanCase(1, 3, 97, dstate=128),
    ScanCase(1, 2, 66, dstate=256),
    ScanCase(1, 7, 70, dstate=37, initial_state=True),
    ScanCase(2, 12, 70, groups=3, initial_state=True),
    ScanCase(2, 12, 130, groups=12, seq_idx=True),
    ScanCase(2, 9, 150, seq_idx=True, initial_state=True),
    ScanCase(2, 6, 70, variable_B=False),
    ScanCase(2, 6, 70, variable_C=False, groups=2),
    ScanCase(2, 20, 77, variable_B=False, variable_C=False, dstate=8),
    ScanCase(1, 6, 70, D=False, z=False, delta_bias=False, softplus=False),
    ScanCase(5, 40, 31, dstate=4),
    ScanCase(2, 64, 256),
    # Few channels and more than 512 steps: CUDA splits the length into segments.
    ScanCase(1, 6, 1031, initial_state=True),
    ScanCase(1, 6, 1031, seq_idx=True),
    ScanCase(1, 6, 1031, variable_B=False, variable_C=False),
    ScanCase(1, 4, 1024, dstate=100),
    ScanCase(1, 12, 1031, groups=3, seq_idx=True, initial_state=True),
)
# From the last step to the first: whole and partial tiles and vectors, all kinds of B and C, split lengths.
REVERSE_CASES = tuple(
    replace(case, reverse=True)
    for case in (
        ScanCase(1, 1, 1, dstate=1),
        ScanCase(3, 5, 2, dstate=3),
        ScanCase(2, 6, 70, initial_state=True),
        ScanCase(1, 17, 64, z=False),
        ScanCase(2, 16, 65, D=False, initial_state=True),
        ScanCase(1, 4, 200, dstate=64, softplus=False),
        ScanCase(1, 2, 97, dstate=130, initial_state=True),
        ScanCase(2, 12, 131, dstate=8, groups=3, seq_idx=True, initial_state=True),
        ScanCase(2, 20, 77, variable_B=False, variable_C=False),
        ScanCase(2, 64, 256),
        ScanCase(1, 6, 1031, initial_state=True),
        ScanCase(1, 12, 1024, groups=3, seq_idx=True, initial_state=True),
    )
)


@dataclass(frozen=True)
class SsdCase:
    """One scan of Mamba-2."""

    batch: int
    seqlen: int
    heads: int
    headdim: int
    dstate: int = 16
    groups: int = 1
    D: str = "head"  # "head", "dim" (a value for each of a head's channels) or ""
    z: bool = False
    dt_bias: bool = True
    softplus: bool = True
    dt_limit: tuple = (0.0, float("inf"))
    initial_states: bool = False
    seq_idx: bool = False
    dt_dtype: str = "same"  # as x's, or a dtype's name

    def inputs(self, dtype, device, seed=0):
        """Tensors by the names of mamba_chunk_scan_combined's arguments; options() has the other arguments."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape, dtype=dtype):
            return torch.randn(*shape, generator=generator).to(dtype)

        f32 = torch.float32
        x_shape = (self.batch, self.seqlen, self.heads, self.headdim)
        matrix = (self.batch, self.seqlen, self.groups, self.dstate)
        dt = 0.5 * torch.rand(*x_shape[:3], generator=generator).to(f32) + (-1.0 if self.softplus else 0.0)
        D_shape = x_shape[2:] if self.D == "dim" else x_shape[2:3]
        states = (self.batch, self.heads, self.headdim, self.dstate)
        tensors = {
            "x": normal(*x_shape),
            "dt": dt.to(dtype if self.dt_dtype == "same" else getattr(torch, self.dt_dtype)),
            "A": -0.2 - torch.rand(self.heads, generator=generator),
            "B": normal(*matrix),
            "C": normal(*matrix),
            "D": normal(*D_shape, dtype=f32) if self.D else None,
            "z": normal(*x_shape) if self.z else None,
            "dt_bias": 0.1 * normal(self.heads, dtype=f32) if self.dt_bias else None,
            "initial_states": normal(*states, dtype=f32) if self.initial_states else None,
            "seq_idx": self._seq_idx(generator) if self.seq_idx else None,
        }
        return {name: None if tensor is None else tensor.to(device) for name, tensor in tensors.items()}

    def options(self):
        return {"chunk_size": 64, "dt_softplus": self.softplus, "dt_limit": self.dt_limit}

    def _seq_idx(self, generator):
        starts = torch.rand(self.batch, self.seqlen, generator=generator) < 0.05
        return starts.cumsum(1).to(torch.int32)


# Lengths around 64 (the CPU's chunk) and its multiples, headdim and dstate of every register block and odd ones.
SSD_CASES = (
    SsdCase(2, 70, 4, 16),
    SsdCase(1, 1, 1, 1, dstate=1),
    SsdCase(3, 2, 2, 5, dstate=3, initial_states=True),
    SsdCase(2, 63, 6, 32, dstate=8, groups=2, D=""),
    SsdCase(1, 64, 3, 64, dstate=64, z=True),
    SsdCase(2, 65, 2, 25, dstate=17, D="dim", dt_bias=False),
    SsdCase(1, 200, 2, 64, dstate=128, initial_states=True),
    SsdCase(1, 131, 2, 128, dstate=64, softplus=False, dt_limit=(0.05, 0.4)),
    SsdCase(1, 66, 1, 256, dstate=256),
    SsdCase(1, 130, 4, 72, dstate=200, groups=2, D="dim", initial_states=True),
    SsdCase(1, 257, 4, 16, groups=4, D="dim", z=True, initial_states=True),
    SsdCase(2, 150, 4, 20, dstate=24, seq_idx=True),
    SsdCase(2, 300, 2, 33, dstate=40, groups=2, seq_idx=True, initial_states=True, z=True),
    SsdCase(1, 70, 2, 16, D="", dt_bias=False, softplus=False),
    SsdCase(2, 70, 4, 16, dt_limit=(0.3, 0.45)),
    SsdCase(2, 100, 4, 16, dt_dtype="float32"),
    SsdCase(2, 100, 2, 48, dstate=100, dt_dtype="bfloat16"),
    SsdCase(3, 31, 8, 8, dstate=4),
    SsdCase(1, 600, 2, 16, dstate=16, initial_states=True),
)


@dataclass(frozen=True)
class ConvCase:
    """One causal convolution problem."""

    batch: int
    dim: int
    seqlen: int
    width: int = 4
    bias: bool = True
    silu: bool = True
    channel_last: bool = False
    seq_idx: bool = False
    initial_states: bool = False
    final_states: bool = False

    def inputs(self, dtype, device, weight_dtype=torch.float32, seed=0):
        """Keyword arguments of causal_conv1d_fn."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape, dtype=dtype):
            return torch.randn(*shape, generator=generator).to(device, dtype)

        x = normal(self.batch, self.dim, self.seqlen)
        if self.channel_last:
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        starts = torch.rand(self.batch, self.seqlen, generator=generator) < 0.2
        return {
            "x": x,
            "weight": normal(self.dim, self.width, dtype=weight_dtype),
            "bias": normal(self.dim, dtype=weight_dtype) if self.bias else None,
            "seq_idx": starts.cumsum(1).to(torch.int32).to(device) if self.seq_idx else None,
            "initial_states": normal(self.batch, self.dim, self.width - 1) if self.initial_states else None,
            "return_final_states": self.final_states,
            "activation": "silu" if self.silu else None,
        }


CONV_CASES = (
    ConvCase(2, 6, 70),
    ConvCase(1, 1, 1, width=2),
    ConvCase(3, 5, 2, width=4, initial_states=True, final_states=True),
    ConvCase(2, 33, 63, width=3, bias=False),
    ConvCase(2, 16, 64, silu=False),
    ConvCase(1, 7, 1025, width=2, silu=False, bias=False),
    ConvCase(2, 64, 130, channel_last=True),
    ConvCase(2, 37, 51, width=3, channel_last=True, initial_states=True, final_states=True),
    ConvCase(2, 24, 99, seq_idx=True),
    ConvCase(2, 8, 512, seq_idx=True),
    ConvCase(3, 13, 40, width=3, seq_idx=True, channel_last=True, silu=False),
    ConvCase(4, 9, 61, seq_idx=True, initial_states=True),
    ConvCase(3, 8, 1, width=3, seq_idx=True, initial_states=True),
    ConvCase(3, 16, 300, seq_idx=True, channel_last=True, initial_states=True),
    ConvCase(2, 8, 256, initial_states=True),
    ConvCase(1, 8, 3, final_states=True),
)


def leaf(tensor, dtype=None):
    """A copy of a floating-point tensor that records gradients; anything else as it is."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        return tensor
    copy = tensor.detach().clone(memory_format=torch.preserve_format) if dtype is None else tensor.detach().to(dtype)
    return copy.requires_grad_()


def outputs_and_gradients(function, arguments, dtype=None):
    """function's outputs, and the gradients of a fixed sum over them, by name; dtype: compute it all in that dtype."""
    leaves = {name: leaf(value, dtype) for name, value in arguments.items()}
    outputs = function(**leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    results = {f"out{i}": output.detach() for i, output in enumerate(outputs)}
    wanted = {name: value for name, value in leaves.items() if isinstance(value, torch.Tensor) and value.requires_grad}
    grads = torch.autograd.grad(fixed_sum(*outputs), list(wanted.values()), allow_unused=True)
    results.update({f"d{name}": grad for name, grad in zip(wanted, grads, strict=True) if grad is not None})
    return results


def grads_of(function, x, parameters):
    """What it makes of x, and the gradients of x and the parameters."""
    x = x.detach().requires_grad_()
    out = function(x)
    return [out, *torch.autograd.grad(out.float().square().sum(), [x, *parameters])]


def assert_all_close(found, expected, tolerance):
    """To the largest value of each."""
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * max(1.0, theirs.abs().max().item()))


def fixed_sum(*outputs):
    """The sum whose gradients outputs_and_gradients takes."""
    loss = 0
    for i, output in enumerate(outputs):
        generator = torch.Generator().manual_seed(100 + i)
        weights = torch.randn(output.shape, generator=generator).to(output.dtype).to(output.device)
        loss = loss + (output * weights).sum()
    return loss


def output_and_kept(function, tensors):
    """function's output, and {data_ptr: bytes} of the tensors that autograd keeps for its backward."""
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.update({t.data_ptr(): t.nbytes}) or t, lambda t: t):
        return function(**tensors), kept


def assert_close_to_truth(found, plain, truth, atol=2e-5, cancelled=None):
    """Each result's error against float64 is at most twice that of plain torch on the same inputs, plus a rounding.

    found, plain, truth: {name: tensor} of the kernels, of the reference on the same low-precision inputs, and of the
    reference in float64. atol, relative to the largest true value, is for sums in another order and, on CUDA, hardware
    exponentials (2 ulp): results near plain torch's own luckiest cases must not fail.
    cancelled: {name: size of the terms that all but cancel in that result}; four float32 roundings of them are allowed,
    since what is left may be smaller than a rounding.
    """
    assert found.keys() == truth.keys() == plain.keys()
    for name, true in truth.items():
        true = true.double().cpu()
        ours, theirs = found[name].double().cpu(), plain[name].double().cpu()
        assert ours.shape == true.shape, f"{name}: shape {tuple(ours.shape)}, expected {tuple(true.shape)}"
        if true.numel() == 0:
            continue
        error, plain_error = (ours - true).abs().max().item(), (theirs - true).abs().max().item()
        limit = 2 * plain_error + atol * true.abs().max().item()
        limit += 4 * torch.finfo(torch.float32).eps * (cancelled or {}).get(name, 0.0)
        assert error <= limit, f"{name}: error {error:.3e}, plain torch's {plain_error:.3e}, limit {limit:.3e}"


# Widths of which CUDA's backward of the norms copies three rows ahead, fewer or none, by dtypes and the GPU's memory.
NORM_WIDTHS = (40, 1536, 8192, 12288, 16384)


def norm_rows(width, device):
    """So many rows that each block of that backward, one a multiprocessor, takes rows at least four times."""
    blocks = torch.cuda.get_device_properties(device).multi_processor_count if device == "cuda" else 1
    return blocks * max(1, 8192 // width) * 4 + 1
