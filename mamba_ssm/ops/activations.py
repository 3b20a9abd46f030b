"""SwiGLU and softplus."""

import torch
import torch.nn.functional as F

from mamba_ssm.ops.norm_reference import swiglu_ref


def swiglu(xy):
    """silu(x) * y, where x and y are the halves of xy's last dimension.

    Args:
        xy: (..., 2 N) float32, float16 or bfloat16.

    Returns:
        (..., N) of xy's dtype.

    Same as upstream's mamba_ssm.ops.triton.k_activations.swiglu.
    """
    return swiglu_ref(xy)


def softplus(x):
    """log(1 + exp(x)), and x itself above 20, as torch.nn.functional.softplus; of x's shape and dtype.

    Upstream's mamba_ssm.ops.triton.softplus.softplus is the same function for use inside triton kernels.
    """
    return F.softplus(x)


def _swiglu_fwd(xy, out=None):
    """swiglu without gradients, into out (like the result) if it is given."""
    with torch.no_grad():
        result = swiglu(xy)
        return result if out is None else out.copy_(result)


def _swiglu_bwd(xy, dout, dxy=None, recompute_output=False, out=None):
    """The gradient of xy for dout (..., N), into dxy (like xy) if it is given.

    Returns dxy; with recompute_output (dxy, swiglu(xy)), the latter in out if it is given.
    """
    with torch.enable_grad():
        leaf = xy.detach().requires_grad_()
        result = swiglu(leaf)
        (gradient,) = torch.autograd.grad(result, leaf, dout)
    dxy = gradient if dxy is None else dxy.copy_(gradient)
    if not recompute_output:
        return dxy
    result = result.detach()
    return dxy, result if out is None else out.copy_(result)
