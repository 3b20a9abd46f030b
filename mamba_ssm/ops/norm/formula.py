"""The derivatives of the norms and of SwiGLU beyond the kernels' first ones: in plain torch."""

import torch.nn.functional as F

from mamba_ssm._torch import derivatives
from mamba_ssm.ops._shared.reference import working_dtype
from mamba_ssm.ops.norm.backward import add_norm_backward_op
from mamba_ssm.ops.norm.forward import add_norm_op
from mamba_ssm.ops.norm.gated import gated_norm_op
from mamba_ssm.ops.norm.gated_backward import gated_norm_backward_op
from mamba_ssm.ops.norm.reference import gated_norm_ref, layer_norm_ref, normalize, swiglu_ref
from mamba_ssm.ops.norm.swiglu import swiglu_backward_op, swiglu_op


def _add_norm(x, residual, weight, bias, eps, want_sum, sum_in_fp32, is_rms_norm, _):
    """The operator's results, without statistics."""
    out, total = layer_norm_ref(x, weight, bias, residual, eps=eps, prenorm=True, is_rms_norm=is_rms_norm)
    if residual is None:
        wide = working_dtype(x)
        total = x.to(wide) if sum_in_fp32 and x.dtype != wide else None
    return out, total if want_sum else None, None, None


def _add_norm_gradients(dout, dsum, total, weight, bias, mean, rstd, is_rms_norm):
    """The backward operator's results."""

    def norm(total, weight, bias):
        wide = total.to(working_dtype(total))
        return (normalize(wide, weight, bias, _eps(wide, rstd, is_rms_norm), is_rms_norm).to(dout.dtype),)

    dtotal, dweight, dbias = derivatives.vjp(norm, (total, weight, bias), (dout,))
    if dsum is not None:
        dtotal = dtotal + dsum.to(dtotal.dtype)
    return dtotal.to(dout.dtype), None if total.dtype == dout.dtype else dtotal, dweight, dbias


def _eps(x, rstd, is_rms_norm):
    """What forward has added to the variance (..., 1) of each row to get rstd."""
    x = x.detach()
    if not is_rms_norm:
        x = x - x.mean(-1, keepdim=True)
    return rstd.detach() ** -2 - x.square().mean(-1, keepdim=True)


def _gated_norm(x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm, _):
    """The operator's results, without statistics."""
    options = {"group_size": group_size, "norm_before_gate": norm_before_gate, "is_rms_norm": is_rms_norm}
    return gated_norm_ref(x, weight, bias, z, eps, **options), None, None


def _gated_norm_gradients(dout, x, weight, bias, z, mean, rstd, group_size, norm_before_gate, is_rms_norm):
    """The backward operator's results."""

    def norm(x, weight, bias, z):
        dtype = working_dtype(x)
        wide, gate = x.to(dtype), None if z is None else F.silu(z.to(dtype))
        if gate is not None and not norm_before_gate:
            wide = wide * gate
        groups = -1, max(group_size, 1)
        wide, weight, bias = (None if given is None else given.unflatten(-1, groups) for given in (wide, weight, bias))
        wide = normalize(wide, weight, bias, _eps(wide, rstd[..., None], is_rms_norm), is_rms_norm).flatten(-2)
        if gate is not None and norm_before_gate:
            wide = wide * gate
        return (wide.to(x.dtype),)

    return tuple(derivatives.vjp(norm, (x, weight, bias, z), (dout,)))


def _swiglu_gradients(dout, xy, want_out, gate_last):
    """The backward operator's results."""
    (dxy,) = derivatives.vjp(lambda xy: (swiglu_ref(xy, gate_last),), (xy,), (dout,))
    return dxy, swiglu_ref(xy, gate_last) if want_out else None


derivatives.extend(add_norm_op, _add_norm)
derivatives.extend(gated_norm_op, _gated_norm)
derivatives.extend(swiglu_op, swiglu_ref)
derivatives.extend_backward(add_norm_backward_op, _add_norm_gradients)
derivatives.extend_backward(gated_norm_backward_op, _gated_norm_gradients)
derivatives.extend_backward(swiglu_backward_op, _swiglu_gradients)
