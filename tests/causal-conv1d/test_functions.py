"""The distribution causal-conv1d: its functions by their places and numbers of arguments, against the reference."""

import inspect

import pytest
import torch
from _helpers.cases import ConvCase, assert_close_to_truth, outputs_and_gradients

import causal_conv1d
import causal_conv1d_cuda
from causal_conv1d import (
    causal_conv1d_fn,
    causal_conv1d_interface,
    causal_conv1d_update,
    causal_conv1d_varlen,
    cpp_functions,
)
from causal_conv1d.cpp_functions import (
    causal_conv1d_bwd_function,
    causal_conv1d_fwd_function,
    causal_conv1d_update_function,
)
from mamba_ssm.ops import causal_conv1d as ours


def names(function):
    return list(inspect.signature(function).parameters)


def test_names_and_places_of_arguments():
    assert causal_conv1d.__version__ == "1.7.0"
    assert names(causal_conv1d_fn) == (
        ["x", "weight", "bias", "seq_idx", "initial_states", "return_final_states", "final_states_out", "activation"]
    )
    assert names(causal_conv1d_interface.causal_conv1d_ref) == (
        ["x", "weight", "bias", "initial_states", "return_final_states", "final_states_out", "activation", "seq_idx"]
    )
    assert names(causal_conv1d_update)[:6] == ["x", "conv_state", "weight", "bias", "activation", "cache_seqlens"]
    assert names(causal_conv1d_varlen.causal_conv1d_varlen_states) == ["x", "cu_seqlens", "state_len"]


@pytest.mark.parametrize("option", ["final_states", "seq_idx"])
@pytest.mark.parametrize("channel_last", [False, True])
def test_values_and_gradients(channel_last, option, device):
    case = ConvCase(2, 6, 70, channel_last=channel_last, initial_states=True, **{option: True})
    tensors = case.inputs(torch.float32, device)
    found = outputs_and_gradients(causal_conv1d_fn, tensors)
    plain = outputs_and_gradients(ours.causal_conv1d_ref, tensors)
    truth = outputs_and_gradients(ours.causal_conv1d_ref, tensors, torch.float64)
    assert_close_to_truth(found, plain, truth)
    torch.testing.assert_close(causal_conv1d_interface.causal_conv1d_ref(**tensors), causal_conv1d_fn(**tensors))


def test_an_activation_in_fourth_place(device):
    """As in causal-conv1d 1.0."""
    x, weight = torch.randn(2, 6, 20, device=device), torch.randn(6, 4, device=device)
    expected = causal_conv1d_fn(x, weight, activation="silu")
    assert torch.equal(causal_conv1d_fn(x, weight, None, "silu"), expected)


def test_states_of_packed_sequences(device):
    x = torch.randn(12, 5, device=device)
    bounds = torch.tensor([0, 2, 7, 12], device=device)
    found = causal_conv1d_varlen.causal_conv1d_varlen_states(x, bounds, 3)
    assert torch.equal(found, causal_conv1d_varlen.causal_conv1d_varlen_states_ref(x, bounds, 3))


# ---- without autograd ------------------------------------------------------------------------------------------------


@pytest.fixture
def problem(device):
    """x, weight, bias, dout, initial states, gradient of final states, and results in plain torch."""
    return Problem(device)


class Problem:
    def __init__(self, device):
        torch.manual_seed(0)
        self.x, self.dout = torch.randn(2, 2, 6, 21, device=device)
        self.weight, self.bias = torch.randn(6, 4, device=device), torch.randn(6, device=device)
        self.initial, self.dfinal = torch.randn(2, 2, 6, 3, device=device)
        self.seq_idx = (torch.arange(21, device=device) // 8).to(torch.int32).expand(2, -1).contiguous()
        self.three = self.x, self.weight, self.bias

    def expected(self, silu=False, seq_idx=False, states=False):
        """(out, final states, [dx, dweight, dbias, and of initial states])"""
        leaves = [t.clone().requires_grad_() for t in (*self.three, self.initial)]
        out, final = ours.causal_conv1d_ref(
            *leaves[:3],
            seq_idx=self.seq_idx if seq_idx else None,
            initial_states=leaves[3] if states else None,
            return_final_states=True,
            activation="silu" if silu else None,
        )
        loss = (out * self.dout).sum() + ((final * self.dfinal).sum() if states else 0)
        used = leaves if states else leaves[:3]
        return out.detach(), final.detach(), torch.autograd.grad(loss, used)


def close(found, expected):
    torch.testing.assert_close(list(found), list(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("silu", [False, True])
def test_fwd_by_number_of_arguments(problem, silu):
    p, fwd = problem, causal_conv1d_cuda.causal_conv1d_fwd
    close([fwd(*p.three, silu)], [p.expected(silu)[0]])
    close([fwd(*p.three, p.seq_idx, silu)], [p.expected(silu, seq_idx=True)[0]])
    close([fwd(*p.three, None, silu)], [p.expected(silu)[0]])
    final, out = torch.empty_like(p.initial), torch.empty_like(p.x)
    close([fwd(*p.three, None, p.initial, final, silu), final], p.expected(silu, states=True)[:2])
    final.zero_()
    assert fwd(*p.three, None, p.initial, out, final, silu) is None
    close([out, final], p.expected(silu, states=True)[:2])
    assert fwd(*p.three, p.seq_idx, None, out, None, silu) is None
    close([out], [p.expected(silu, seq_idx=True)[0]])


@pytest.mark.parametrize("silu", [False, True])
def test_bwd_by_number_of_arguments(problem, silu):
    p, bwd = problem, causal_conv1d_cuda.causal_conv1d_bwd
    four = *p.three, p.dout
    close(bwd(*four, None, silu), p.expected(silu)[2])
    wide = torch.zeros(2, 12, 21, device=p.x.device)
    dx = wide[:, 6:]
    found = bwd(*four, p.seq_idx, dx, silu)
    assert found[0] is dx and (wide[:, :6] == 0).all()
    close(found, p.expected(silu, seq_idx=True)[2])
    close(bwd(*four, None, p.initial, p.dfinal, None, True, silu), p.expected(silu, states=True)[2])
    assert bwd(*four, None, None, None, dx, False, silu)[3] is None
    given = [torch.zeros_like(t) for t in (*p.three, p.initial)]
    assert bwd(*four, None, p.initial, p.dfinal, *given, silu) is None
    close(given, p.expected(silu, states=True)[2])
    assert bwd(*four, p.seq_idx, None, None, *given[:3], None, silu) is None
    close(given[:3], p.expected(silu, seq_idx=True)[2])


@pytest.mark.parametrize("silu", [False, True])
def test_update_by_number_of_arguments(problem, silu):
    p, update = problem, causal_conv1d_cuda.causal_conv1d_update
    x, rows = p.x[:, :, 0].contiguous(), torch.tensor([3, 1], dtype=torch.int32, device=p.x.device)
    seqlens = torch.tensor([2, 5], dtype=torch.int32, device=p.x.device)
    cache = torch.randn(4, 6, 5, device=p.x.device)
    for more in ((), (seqlens,), (seqlens, rows), (None, rows)):
        state = (cache if len(more) == 2 else cache[:2]).clone()
        other = state.clone()
        expected = ours.causal_conv1d_update_ref(x, other, p.weight, p.bias, "silu" if silu else None, *more)
        close([update(x, state, p.weight, p.bias, silu, *more), state], [expected, other])
    state, other, out = cache.clone(), cache.clone(), torch.empty_like(x)
    expected = ours.causal_conv1d_update_ref(x, other, p.weight, p.bias, "silu" if silu else None, None, rows)
    assert update(x, state, p.weight, p.bias, out, silu, None, rows) is None
    close([out, state], [expected, other])


def test_cpp_functions(problem):
    p = problem
    final, dx = torch.empty_like(p.initial), torch.empty_like(p.x)
    found = causal_conv1d_fwd_function(*p.three, None, p.initial, final, True)
    out, states, gradients = p.expected(True, states=True)
    close([found, final], [out, states])
    found = causal_conv1d_bwd_function(*p.three, p.dout, None, p.initial, p.dfinal, dx, True, True)
    assert isinstance(found, tuple) and found[0] is dx
    close(found, gradients)
    state, other, x = p.initial.clone(), p.initial.clone(), p.x[:, :, 0].contiguous()
    found = causal_conv1d_update_function(x, state, p.weight, p.bias, False, None, None)
    close([found, state], [ours.causal_conv1d_update_ref(x, other, p.weight, p.bias), other])


def test_cpp_functions_that_write_into_given_tensors(problem):
    """By name, as causal-conv1d's own code calls its operators: packed sequences, the first of which has a state."""
    p = problem
    out = torch.full_like(p.x, 7.0)
    packed = {"bias": p.bias, "seq_idx": p.seq_idx, "initial_states": p.initial, "silu_activation": True}
    assert cpp_functions._causal_conv1d_fwd_cpp(p.x, p.weight, out=out, final_states_out=None, **packed) is None
    given = [torch.full_like(t, 7.0) for t in (*p.three, p.initial)]
    grads = dict(zip(("dx", "dweight", "dbias", "dinitial_states"), given, strict=True))
    backward = {**packed, **grads, "dout": p.dout, "dfinal_states": None}
    assert cpp_functions._causal_conv1d_bwd_cpp(p.x, p.weight, **backward) is None
    leaves = [t.clone().requires_grad_() for t in (*p.three, p.initial)]
    expected = ours.causal_conv1d_ref(*leaves[:3], p.seq_idx, leaves[3], activation="silu")
    close([out, *given], [expected, *torch.autograd.grad(expected, leaves, p.dout)])
    state, other, x = p.initial.clone(), p.initial.clone(), p.x[:, :, 0].contiguous()
    out = torch.empty_like(x)
    step = {"out": out, "silu_activation": False, "cache_seqlens": None, "conv_state_indices": None}
    assert cpp_functions._causal_conv1d_update_cpp(x, state, p.weight, p.bias, **step) is None
    close([out, state], [ours.causal_conv1d_update_ref(x, other, p.weight, p.bias), other])
    assert cpp_functions.LIBRARY_NAME == "DaoAILab"


class Context:
    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors


@pytest.mark.parametrize("states", [False, True])
def test_the_autograd_function_with_a_ctx_of_the_callers(states, problem):
    p, function, ctx = problem, causal_conv1d_interface.CausalConv1dFn, Context()
    given = *p.three, None, p.initial if states else None, states, None, "silu"
    out, final, gradients = p.expected(True, states=states)
    found = function.forward(ctx, *given)
    close(found if states else [found], [out, final] if states else [out])
    grads = function.backward(ctx, p.dout, *([p.dfinal] if states else []))
    assert len(grads) == 8
    close([grad for grad in grads if grad is not None], gradients)
    applied = function.apply(*given)
    close(applied if states else [applied], [out, final] if states else [out])


def test_a_kernel_in_triton_says_what_to_call(problem):
    kernel = causal_conv1d_varlen._causal_conv1d_varlen_states
    message = r"kernel of upstream's causal_conv1d.*: call causal_conv1d_varlen_states"
    with pytest.raises(NotImplementedError, match=message):
        kernel[(1, 1, 1)](problem.x)


def test_errors_say_what_is_wrong(problem):
    p = problem
    with pytest.raises(TypeError, match=r"causal_conv1d_fwd takes 4, 5, 7 or 8 arguments.* and got 6"):
        causal_conv1d_cuda.causal_conv1d_fwd(*p.three, None, None, False)
    with pytest.raises(TypeError, match=r"causal_conv1d_bwd takes 6, 7, 10 or 12 arguments.* and got 0"):
        causal_conv1d_cuda.causal_conv1d_bwd()
    with pytest.raises(TypeError, match=r"causal_conv1d_update takes 5 to 8 arguments.* and got 9"):
        causal_conv1d_cuda.causal_conv1d_update(*range(9))
    with pytest.raises(ValueError, match=r"causal_conv1d: out must have shape \(2, 6, 21\), got"):
        causal_conv1d_cuda.causal_conv1d_fwd(*p.three, None, None, p.x[:1].clone(), None, False)
