"""The backward operator of Mamba-2's scan: gradients of every input but z, from the inputs alone.

States are computed again. The gate is not part of it: see mamba_ssm.ops.ssd.
"""

from mamba_ssm._native import abi
from mamba_ssm._native.launch import place, pointer, run
from mamba_ssm._torch import define
from mamba_ssm.ops._shared import checks
from mamba_ssm.ops.ssd.arguments import allocate_workspace, check, fill, kernel_layout

_NAME = "ssd_backward"


def _check_backward(dout, dfinal_states, inputs, dt_min, dt_max):
    x, dt, A, B, C, D, dt_bias, initial_states, seq_idx = inputs
    sizes = check(x, dt, A, B, C, D, None, dt_bias, initial_states, seq_idx, dt_min, dt_max)
    batch, _, nheads, headdim, _, dstate = sizes
    checks.check_same(_NAME, "dout", dout, x.shape, x, "x", "(B, L, H, P)")
    if dfinal_states is not None:
        states = (batch, nheads, headdim, dstate)
        checks.check_float32(_NAME, "dfinal_states", dfinal_states, states, x, "x", "(B, H, P, N)")
    return sizes


def _allocate(sizes, inputs, need_dinitial_states):
    """The operator's outputs, without values."""
    batch, _, nheads, headdim, _, dstate = sizes
    x, dt, A, B, C, D, dt_bias, _, _ = inputs
    dx, ddt, dB, dC = (tensor.new_empty(tensor.shape) for tensor in (x, dt, B, C))
    return (
        dx,
        ddt,
        A.new_empty(A.shape),
        dB,
        dC,
        None if D is None else D.new_empty(D.shape),
        None if dt_bias is None else dt_bias.new_empty(dt_bias.shape),
        A.new_empty((batch, nheads, headdim, dstate)) if need_dinitial_states else None,
    )


def _backward(
    dout,
    dfinal_states,
    x,
    dt,
    A,
    B,
    C,
    D,
    dt_bias,
    initial_states,
    seq_idx,
    dt_softplus,
    dt_min,
    dt_max,
    need_dinitial_states,
):
    inputs = x, dt, A, B, C, D, dt_bias, initial_states, seq_idx
    sizes = _check_backward(dout, dfinal_states, inputs, dt_min, dt_max)
    grads = _allocate(sizes, inputs, need_dinitial_states)
    if x.numel() == 0:
        for grad in grads:
            if grad is not None:
                grad.zero_()
        if need_dinitial_states and dfinal_states is not None:
            grads[7].copy_(dfinal_states)
        return grads
    dout = checks.unit_last_stride(dout)
    dfinal_states = checks.contiguous(dfinal_states)
    tensors = kernel_layout(x, dt, A, B, C, D, None, dt_bias, initial_states, seq_idx)
    launch_backward(sizes, dout, dfinal_states, tensors, (dt_softplus, dt_min, dt_max), grads)
    return grads


def launch_backward(sizes, dout, dfinal_states, tensors, options, grads):
    """Runs the kernels, which write grads. tensors: x to seq_idx in kernel layout, z None. dout, x, dt, B, C and their
    gradients may be Views.
    """
    dx, ddt, dA, dB, dC, dD, ddt_bias, dinitial_states = grads
    params = abi.MambaSsdBackward()
    A = tensors[2]
    functions = place(params, A)
    fill(params, sizes, tensors, *options)
    workspace = allocate_workspace(functions["ssd_backward_workspace"], params.forward, A)
    params.dout = dout.data_ptr()
    params.dout_batch_stride, params.dout_len_stride, params.dout_head_stride, _ = dout.stride()
    params.dfinal_state = pointer(dfinal_states)
    params.dx = dx.data_ptr()
    params.dx_batch_stride, params.dx_len_stride, params.dx_head_stride, _ = dx.stride()
    params.ddt = ddt.data_ptr()
    params.ddt_batch_stride, params.ddt_len_stride, params.ddt_head_stride = ddt.stride()
    params.dA = dA.data_ptr()
    params.dB = dB.data_ptr()
    params.dB_batch_stride, params.dB_len_stride, params.dB_group_stride, _ = dB.stride()
    params.dC = dC.data_ptr()
    params.dC_batch_stride, params.dC_len_stride, params.dC_group_stride, _ = dC.stride()
    params.dD = pointer(dD)
    params.ddt_bias = pointer(ddt_bias)
    params.dinitial_state = pointer(dinitial_states)
    run(functions, "ssd_backward", params)
    del workspace  # held until here: the kernels have it now


def _backward_fake(dout, dfinal_states, *arguments):
    *inputs, _, dt_min, dt_max, need_dinitial_states = arguments
    sizes = _check_backward(dout, dfinal_states, inputs, dt_min, dt_max)
    return _allocate(sizes, inputs, need_dinitial_states)


ssd_backward_op = define(
    "ssd_backward(Tensor dout, Tensor? dfinal_states, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, "
    "Tensor? dt_bias, Tensor? initial_states, Tensor? seq_idx, bool dt_softplus, float dt_min, float dt_max, "
    "bool need_dinitial_states) -> (Tensor dx, Tensor ddt, Tensor dA, Tensor dB, Tensor dC, Tensor dD, "
    "Tensor ddt_bias, Tensor dinitial_states)",
    _backward,
    _backward_fake,
)
