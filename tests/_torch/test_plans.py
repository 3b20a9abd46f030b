"""Calls by plans give what calls without plans give, in every operator that has plans, and refuse what those refuse."""

import copy
import threading
import warnings
from random import Random

import pytest
import torch
from _helpers.planned_calls import CALLS, B, D, L, N
from _helpers.public_ops import PUBLIC_OPS
from torch.utils import _python_dispatch

from mamba_ssm._torch import dispatch, plan_memory, plan_steps, plans
from mamba_ssm._torch.private import MODES_KEEP_INFERENCE
from mamba_ssm.ops.linear.linear import linear
from mamba_ssm.ops.norm import layer_norm_fn, swiglu
from mamba_ssm.ops.state_update import selective_state_update

TIMES = 4  # a kind of call is recorded when it comes the second time


@pytest.fixture(autouse=True)
def _no_plans_at_first():
    plans.forget()


def name_of(op):
    return op if isinstance(op, str) else str(op).split(".")[1]


def recorded():
    """The names of operators that have plans now."""
    return {
        name_of(op)
        for op, planned in dispatch.PLANNED.items()
        if any(type(plan) is plans.Plan for plan in planned.plans.values())
    }


def draw(call, device, seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(*shape, generator=generator).to(device) for name, shape in call.shapes.items()}


def results_of(function, given, differentiable=False):
    """Results, tensors that may have been written, and gradients."""
    with torch.no_grad():
        results = [function(**given), [value for value in given.values() if isinstance(value, torch.Tensor)]]
    if differentiable:
        leaves = [tensor.detach().requires_grad_() for tensor in given.values()]
        outs = function(**dict(zip(given, leaves, strict=True)))
        outs = outs if isinstance(outs, tuple) else (outs,)
        douts = [torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape) for out in outs]
        results.append(torch.autograd.grad(outs, leaves, douts))
    return results


def check(monkeypatch, function, given, device, differentiable=False):
    found = results_of(function, copy.deepcopy(given), differentiable)
    with monkeypatch.context() as patched:
        patched.setattr(dispatch, "PLANNED", {})
        expected = results_of(function, given, differentiable)
    exact = {"rtol": 0, "atol": 0} if device == "cpu" else {"rtol": 1e-4, "atol": 1e-4}  # atomics add in any order
    torch.testing.assert_close(found, expected, **exact)


@pytest.mark.parametrize("name", CALLS)
def test_calls_by_plans(monkeypatch, device, name):
    call = CALLS[name]
    for turn in range(TIMES):
        check(monkeypatch, call.function, draw(call, device, turn), device, call.differentiable)
    if device == "cpu" and name in ("selective_state_update, several", "normed_linear"):
        call = call._replace(operators=())
    assert recorded() >= set(call.operators)


def test_every_planned_operator_has_a_call():
    names = {name_of(op) for op in dispatch.PLANNED}
    assert names == {name for call in CALLS.values() for name in call.operators}


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if not name.startswith("ssd_varlen")])
def test_layouts_in_turns(monkeypatch, device, name):
    """Each tensor by turns dense, every second of a larger one's elements, and 4 bytes past a multiple of 16."""
    call = CALLS[name]

    def spread(tensor):
        return torch.zeros(*tensor.shape, 2, device=device)[..., 1].copy_(tensor)

    def shifted(tensor):
        return torch.zeros(tensor.numel() + 1, device=device)[1:].view(tensor.shape).copy_(tensor)

    for turn in range(TIMES):
        for argument in call.shapes:
            for layout in (spread, shifted):
                given = draw(call, device, turn)
                given[argument] = layout(given[argument])
                check(monkeypatch, call.function, given, device, call.differentiable)


@pytest.mark.parametrize("name", PUBLIC_OPS)
def test_public_operators(monkeypatch, device, name):
    op = PUBLIC_OPS[name]
    for turn in range(TIMES):
        torch.manual_seed(turn)
        given = op.arguments()
        given = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in given.items()}

        def function(turn=turn, **given):
            torch.manual_seed(turn)  # of dropout
            return op.function(**given)

        check(monkeypatch, function, given, device)


def test_slices_of_one_tensor(monkeypatch, device):
    """B and C are mostly slices of a product: each lies within what the other spans. A plan holds for slices that lie
    to each other alike.
    """
    call = CALLS["selective_scan"]
    for turn in range(3 * TIMES):
        given = draw(call, device, turn)
        slices = list(torch.cat((given["B"], given["C"], given["B"]), dim=1).split(N, dim=1))
        given["B"], given["C"] = [slices[:2], slices[1::-1], slices[::2]][turn // TIMES]
        check(monkeypatch, call.function, given, device)
        assert "selective_scan" in recorded() or turn < 1


def test_copies_in_inference_mode(device):
    """As in a layer's prefill: slices of a product whose channels are neighbours, which the kernels do not take."""
    call = CALLS["selective_scan"]
    for turn in range(TIMES):
        given = draw(call, device, turn)
        product = torch.cat((given["B"], given["C"]), dim=1).transpose(1, 2).contiguous().transpose(1, 2)
        given["B"], given["C"] = product.split(N, dim=1)
        with torch.inference_mode():
            found = call.function(**given)
        torch.testing.assert_close(found, call.function(**given), rtol=0, atol=0)
    (plan,) = dispatch.PLANNED[torch.ops.mamba_ssm.selective_scan.default].plans.values()
    assert type(plan) is plans.Plan or not MODES_KEEP_INFERENCE


def test_one_tensor_twice(monkeypatch, device):
    call = CALLS["rms_norm_fn"]
    for turn in range(TIMES):
        given = draw(call, device, turn)
        check(monkeypatch, call.function, given | {"residual": given["x"]}, device)
        check(monkeypatch, call.function, given, device)


def test_one_tensor_twice_that_is_copied(monkeypatch, device):
    """One copy stands for both, in that call but not in later ones."""
    call = CALLS["rms_norm_fn"]
    for turn in range(2 * TIMES):
        given = draw(call, device, turn)
        given["x"], given["residual"] = (
            torch.stack((given[name], given[name]), -1)[..., 1] for name in ("x", "residual")
        )
        if turn < TIMES:
            given["residual"] = given["x"]
        check(monkeypatch, call.function, given, device)
    assert "add_norm" in recorded()


def test_values_are_looked_at_in_every_call():
    state, x = torch.zeros(4, D, N), torch.rand(B, D)
    matrix, A = torch.rand(B, N), torch.rand(D, N)
    for _ in range(TIMES):
        selective_state_update(state, x, x, A, matrix, matrix, state_batch_indices=torch.tensor([3, 1]))
        with pytest.raises(ValueError, match="less than the number of rows"):
            selective_state_update(state, x, x, A, matrix, matrix, state_batch_indices=torch.tensor([3, 4]))


def test_what_is_written_in_place_is_noticed(device):
    call = CALLS["selective_state_update"]
    for turn in range(TIMES):
        given = draw(call, device, turn)
        product = given["state"] * torch.ones((), device=device, requires_grad=True)
        call.function(**given)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


def test_negated_views_and_meta_tensors():
    xy = torch.rand(B, L, 2 * D)
    negated = torch.view_as_complex(torch.rand(B, L, 2 * D, 2)).conj().imag
    assert negated.is_neg()
    for _ in range(TIMES):
        swiglu(xy)
        torch.testing.assert_close(swiglu(negated), swiglu(negated.resolve_neg()))
        assert swiglu(xy.to("meta")).is_meta


def test_native_errors_are_raised(monkeypatch):
    """Also by calls that have a plan."""
    call = CALLS["linear"]
    given = draw(call, "cpu", 0)
    for _ in range(TIMES):
        linear(**given)
    (planned,) = [planned for op, planned in dispatch.PLANNED.items() if name_of(op) == "linear"]
    (plan,) = planned.plans.values()
    monkeypatch.setattr(plan.calls[0], "function", lambda params: 2)
    with pytest.raises(NotImplementedError, match="linear"):
        linear(**given)


def test_threads_options_and_modes_are_told_apart(monkeypatch):
    xy = torch.rand(B, L, 2 * D)
    (planned,) = [planned for op, planned in dispatch.PLANNED.items() if str(op) == "mamba_ssm.swiglu.default"]
    for _ in range(TIMES):
        swiglu(xy)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        swiglu(xy)
    finally:
        torch.set_num_threads(before)
    assert len(planned.plans) == 2
    with torch.inference_mode():
        assert swiglu(xy).is_inference()
    assert not swiglu(xy).is_inference()


def test_threads_that_record_at_once_leave_nothing_on():
    """torch keeps whether a dispatch mode is on in variables of the process too, which threads would mix up."""
    first_in, second_in, first_out = (threading.Event() for _ in range(3))

    def first(x):
        first_in.set()
        assert second_in.wait(10)
        return x

    def second(x):
        second_in.set()
        assert first_out.wait(10)
        return x

    def record_second():
        assert first_in.wait(10)
        plans._record(second, (torch.rand(2),))

    other = threading.Thread(target=record_second)
    other.start()
    plans._record(first, (torch.rand(2),))
    first_out.set()
    other.join()
    on = {name: value for name, value in vars(_python_dispatch).items() if name.startswith("_is_in_")}
    assert not any(on.values()), on


def test_a_call_that_is_being_made_is_forgotten_too(monkeypatch):
    """Its plan may have been made for what another thread has just changed."""
    xy = torch.rand(B, L, 2 * D)
    (planned,) = [planned for op, planned in dispatch.PLANNED.items() if str(op) == "mamba_ssm.swiglu.default"]
    swiglu(xy)

    def implementation(*arguments, call=planned.implementation):
        results = call(*arguments)
        plans.forget()
        return results

    monkeypatch.setattr(planned, "implementation", implementation)
    swiglu(xy)
    assert not planned.plans


def test_plans_are_bounded(monkeypatch):
    monkeypatch.setattr(plans, "_MOST", 8)
    (planned,) = [planned for op, planned in dispatch.PLANNED.items() if str(op) == "mamba_ssm.swiglu.default"]
    for length in range(1, 30):
        swiglu(torch.rand(length, 4))
        assert len(planned.plans) <= 8


def test_more_kinds_than_a_table_holds_are_seldom_recorded(monkeypatch):
    """But one that comes again and again is: recording takes as long as several calls."""
    records = []
    monkeypatch.setattr(plans, "_record", lambda *given, record=plans._record: records.append(given) or record(*given))
    monkeypatch.setattr(plans, "_MOST", 8)
    (planned,) = [planned for op, planned in dispatch.PLANNED.items() if str(op) == "mamba_ssm.swiglu.default"]
    xy, others, generator = torch.rand(B, 2 * D), [torch.rand(length, 4) for length in range(30)], Random(0)
    for other in generator.choices(others, k=1000):
        swiglu(other)
    assert len(records) < 20  # of 133 without patience
    for other in generator.choices(others, k=5):
        for _ in range(2 * plans._PATIENCE):
            swiglu(xy)
        swiglu(other)
    assert any(type(plan) is plans.Plan for plan in [*planned.plans.values(), *(one.plan for one in planned.recent)])


def _unlike(x):
    """Tensors that a plan for x is not for."""
    with torch.inference_mode():
        inference = x.clone()
    memory, without_memory = torch.empty(x.numel() + 1), torch.empty_like(x)
    without_memory.untyped_storage().resize_(0)
    return {
        "shape": x[:1],
        "strides": x.t().contiguous().t(),
        "dtype": x.double(),
        "device": x.to("meta"),
        "parameter": torch.nn.Parameter(x),
        "requires_grad": x.clone().requires_grad_(),
        "inference mode": inference,
        "negated": torch._neg_view(x),
        "alignment": memory[1:].view(x.shape),
        "no memory": without_memory,
        "nested": torch.nested.nested_tensor([x[0], x[1]]),
        "sparse": x.to_sparse(),
        "no tensor": None,
    }


def test_recent_kinds_are_told_apart():
    x, tensors = torch.rand(4, 6), [torch.rand(3), torch.rand(5, 2), torch.rand(4, 6)]
    seen, settings = [1, False], [None, 2.0]

    def types_of(arguments):
        return [*map(type, arguments)]

    recent = plans.Recent(None, seen, types_of([*tensors, *settings]), [*tensors, *settings])
    if recent.check is None:
        pytest.skip("this torch compares no tensors at once")

    def addresses(*arguments, seen=seen):
        return recent.addresses(seen, types_of(arguments), arguments)

    others = [tensor.clone() for tensor in tensors]
    assert addresses(*others, *settings) == [*(tensor.data_ptr() for tensor in others), None, None]
    assert addresses(*tensors, *settings, seen=[1, True]) is None
    for changed in ([x, 2.0], [None, 2], [None, 3.0]):
        assert addresses(*tensors, *changed) is None
    taken = [name for name, y in _unlike(x).items() if addresses(*tensors[:2], y, *settings) is not None]
    assert not taken


def test_a_kind_among_many_becomes_recent(monkeypatch):
    (planned,) = [planned for op, planned in dispatch.PLANNED.items() if str(op) == "mamba_ssm.add_norm.default"]
    weight, bias = torch.rand(16), torch.rand(16)

    def call(length):
        return layer_norm_fn(torch.rand(length, 16), weight, bias, residual=torch.rand(length, 16))

    for length in range(1, 2 * plans._MOST_RECENT):
        for _ in range(TIMES):
            call(length)
    if not planned.recent:
        pytest.skip("this torch compares no tensors at once")
    found, addresses = [], plans.Recent.addresses
    monkeypatch.setattr(plans.Recent, "addresses", lambda *given: found.append(addresses(*given)) or found[-1])
    for _ in range(plans._LATE + TIMES):
        found.clear()
        call(99)
    assert found[-1] is not None and len(planned.recent) <= plans._MOST_RECENT
    plans.forget()
    assert not planned.recent


def test_kinds_that_are_never_recent_do_not_get_in():
    (planned,) = [planned for op, planned in dispatch.PLANNED.items() if str(op) == "mamba_ssm.add_norm.default"]
    rows = torch.rand(3 * 16 + 1)[1:].view(3, 16)  # at an odd address
    for _ in range(3 * plans._LATE):
        layer_norm_fn(rows, torch.rand(16), torch.rand(16), residual=rows.clone())
    assert not planned.recent
    assert not any(plan.compared for plan in planned.plans.values())


def test_what_watches_sees_operators():
    xy = torch.rand(B, L, 2 * D)
    for _ in range(TIMES):
        swiglu(xy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            swiglu(xy)
    assert any("mamba_ssm::swiglu" in event.name for event in profile.events())


class _Native(plans.Call):
    """A native call in name only, of these numbered tensors."""

    def __init__(self, *numbers):
        self.numbers = set(numbers)


def test_memory_that_native_calls_share():
    """What is needed at the same time lies apart."""
    random, device = Random(0), torch.device("cpu")
    for _ in range(50):
        steps, sizes = [], {}
        for number in range(8):
            sizes[number] = random.randint(1, 4000)
            steps.append(plan_steps.Allocation(number, ((sizes[number],), (1,), torch.uint8, device), sizes[number]))
            steps.append(_Native(*random.sample(range(number + 1), min(2, number + 1))))
        plan_memory.give_back(steps, 0, set())
        first = {step.number: at for at, step in enumerate(steps) if type(step) is plan_steps.Allocation}
        last = {number: at for at, step in enumerate(steps) for number in step.last}
        plan_memory.allocate_together(steps, device)
        whole, *others = [step for step in steps if type(step) is plan_steps.Allocation]
        begins = {0: 0} | {step.number: step.begin for step in steps if type(step) is plan_steps.Within}
        assert not others and begins.keys() == sizes.keys() and whole.number == 0
        assert [step.last for step in steps if 0 in step.last] == [steps[max(last.values())].last]
        for one in sizes:
            assert begins[one] % 512 == 0 and begins[one] + sizes[one] <= whole.layout[0][0]
            for other in range(one):
                together = first[one] <= last[other] and first[other] <= last[one]
                apart = begins[one] >= begins[other] + sizes[other] or begins[other] >= begins[one] + sizes[one]
                assert apart or not together
