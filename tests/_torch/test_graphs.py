"""What a plan launches, as CUDA graphs: plans.py, graphs.py."""

import collections
import contextlib
import copy
import threading
from types import SimpleNamespace

import pytest
import torch
from _helpers.planned_calls import CALLS
from _torch.test_plans import check, draw

from mamba_ssm import Mamba2, Mamba3
from mamba_ssm._torch import dispatch, graphs, no_cuda_graphs, plans, private
from mamba_ssm.utils.kernels import launched

NODES = [name for name, call in CALLS.items() if any(operator.endswith("node") for operator in call.operators)]
OTHERS = ["linear_cross_entropy"]
TIMES = 10  # addresses that come the second time become a graph, and an allocator takes some steps to come to rest
ATOMICS = {"rtol": 1e-4, "atol": 1e-4}  # float32; they add in any order


@pytest.fixture(autouse=True)
def _no_plans_at_first():
    plans.forget()


def graphs_made():
    found = [plan for planned in dispatch.PLANNED.values() for plan in planned.plans.values()]
    tables = [plan.graphs.known for plan in found if isinstance(plan, plans.Plan) and plan.graphs is not None]
    return sum(type(one) is graphs._Graph for known in tables for one in known.values())


@pytest.fixture
def replays(monkeypatch):
    """Of each launch of a graph whether it was one."""
    found, launch = [], graphs._Graph.launch
    monkeypatch.setattr(graphs._Graph, "launch", lambda *given: found.append(launch(*given)) or found[-1])
    return found


def gradients(function, given):
    """Results, and gradients of all that are given; of a module's parameters too."""
    parameters = [*function.parameters()] if isinstance(function, torch.nn.Module) else []
    outs = function(**given)
    outs = outs if isinstance(outs, tuple) else (outs,)
    douts = [torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype) for out in outs]
    return [*(out.detach() for out in outs), *torch.autograd.grad(outs, [*given.values(), *parameters], douts)]


def without_graphs(function, given):
    with no_cuda_graphs():
        return gradients(function, given)


@pytest.mark.skipif(not private.GRAPHS_KNOWN, reason="torch before 2.8 has no pools of memory of one thread")
@pytest.mark.parametrize("name", NODES + OTHERS)
def test_all_memory_before_the_first_launch(monkeypatch, name):
    """On the CPU, where nothing becomes a graph, a plan that takes its memory so does what others do."""
    laid_out = []

    class Never:
        def __init__(self, call, device):
            laid_out.append(self)

        def launch(self, addresses, stream):
            return (stream,)

        def launch_steps(self, key, make):
            make(*key)

    monkeypatch.setattr(graphs, "Graphs", Never)
    monkeypatch.setattr(graphs, "DEVICE", "cpu")
    monkeypatch.setattr(private, "allocates_natively", lambda: True)
    call = CALLS[name]
    for turn in range(4):
        check(monkeypatch, call.function, draw(call, "cpu", turn), "cpu", call.differentiable)
    assert len(laid_out) >= (2 if name in NODES else 1)  # forward and backward


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call.differentiable])
def test_graphs_follow_their_inputs(name, cuda, replays):
    call = CALLS[name]
    given = {key: tensor.requires_grad_() for key, tensor in draw(call, cuda, 0).items()}
    for turn in range(TIMES):
        with torch.no_grad():
            for key, tensor in draw(call, cuda, turn).items():
                given[key].copy_(tensor)
        found = [tensor.cpu() for tensor in gradients(call.function, given)]
        expected = [tensor.cpu() for tensor in without_graphs(call.function, given)]
        torch.testing.assert_close(found, expected, **ATOMICS)
    assert replays.count(True) > graphs_made() > 0 or name not in NODES + OTHERS


def layer(device, kind=Mamba2, width=64):
    torch.manual_seed(0)
    return kind(width, d_state=16, headdim=16, device=device), torch.randn(2, 100, width, device=device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [Mamba2, Mamba3])
def test_training_is_the_same(kind, dtype, cuda):
    """Steps of an optimizer, which change weights in place, with a backward of its own for each half of the batch."""
    losses = []
    for graphs_on in (True, False):
        plans.forget()
        module, x = layer(cuda, kind)
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
        losses.append([])
        for _ in range(2 * TIMES):
            for half in x.chunk(2):
                with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
                    if graphs_on:
                        loss = module(half).float().square().mean()
                        loss.backward()
                    else:
                        with no_cuda_graphs():
                            loss = module(half).float().square().mean()
                            loss.backward()
                losses[-1].append(loss.item())
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        assert (graphs_made() > 0) == graphs_on
    # An update is rounded to float32, so what atomics make different stays small.
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-3, atol=1e-5)
    assert losses[0][-1] != losses[0][0]


def made_by_a_layer(device, **options):
    """(A layer, its input) of which forward and backward are graphs."""
    module, x = layer(device, **options)
    given = {"u": x.requires_grad_()}
    expected = without_graphs(module, given)
    for _ in range(TIMES):
        torch.testing.assert_close(gradients(module, given), expected, **ATOMICS)
    assert graphs_made() >= 2
    return module, given, expected


@pytest.mark.gpu
def test_memory_of_others_is_left_alone(cuda):
    """Where torch has given back cuBLAS' workspaces, which happens when it records graphs itself."""
    module, given, expected = made_by_a_layer(cuda, width=512)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [torch.full((1 << 22,), 7, dtype=torch.int32, device=cuda) for _ in range(32)]
    for _ in range(TIMES):
        torch.testing.assert_close(gradients(module, given), expected, **ATOMICS)
    assert all((other == 7).all() for other in others)


@pytest.mark.gpu
def test_within_a_graph_of_more(cuda):
    module, given, _ = made_by_a_layer(cuda)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(TIMES):
            gradients(module, given)
    torch.cuda.current_stream().wait_stream(stream)
    before = graphs_made()
    whole = torch.cuda.CUDAGraph()
    with torch.cuda.graph(whole, stream=stream):
        found = gradients(module, given)
    assert graphs_made() == before
    for scale in (1, 2):
        with torch.no_grad():
            given["u"].mul_(scale)
        whole.replay()
        torch.testing.assert_close(found, without_graphs(module, given), **ATOMICS)


@pytest.mark.gpu
def test_launches_are_counted(cuda):
    module, given, _ = made_by_a_layer(cuda)
    with launched() as found:
        gradients(module, given)
    assert {"ssd_forward", "ssd_backward"} <= {launch.kernel.op for launch in found}


@pytest.mark.gpu
def test_products_as_torch_is_told(cuda):
    """A graph of float32 products was recorded with all their bits."""
    module, given, expected = made_by_a_layer(cuda, width=256)
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        rounded = without_graphs(module, given)
        for _ in range(TIMES):
            torch.testing.assert_close(gradients(module, given), rounded, **ATOMICS)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    difference = max((one - other).abs().max() for one, other in zip(rounded, expected, strict=True))
    assert difference > 10 * ATOMICS["atol"] or torch.cuda.get_device_capability() < (8, 0)


@pytest.mark.gpu
def test_threads_with_streams_of_their_own(cuda):
    module, given, expected = made_by_a_layer(cuda)
    wrong = []

    def train():
        own, mine = copy.deepcopy(module), {"u": given["u"].detach().clone().requires_grad_()}
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(3 * TIMES):
                try:
                    torch.testing.assert_close(gradients(own, mine), expected, **ATOMICS)
                except (AssertionError, RuntimeError) as error:
                    wrong.append(error)
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one(replays):
    for _ in range(2):
        module, given, expected = made_by_a_layer(torch.device("cuda", 1))
        torch.cuda.empty_cache()
        torch.testing.assert_close(gradients(module, given), expected, **ATOMICS)
    assert torch.cuda.current_device() == 0 and replays.count(True) > graphs_made()


# ---- without a GPU ---------------------------------------------------------------------------------------------------


class Native:
    """Functions of a library that count what they are asked."""

    def __init__(self):
        self.made, self.launched, self.freed, self.fails = 0, [], [], ""

    def __getitem__(self, name):
        return lambda *given: getattr(self, name)(*given) or name == self.fails

    def graph_stream(self, device, stream):
        stream._obj.value = 99

    def graph_begin(self, device, stream):
        pass

    def graph_end(self, device, stream, graph):
        self.made += 1
        graph._obj.value = self.made

    def graph_launch(self, device, graph, stream):
        self.launched.append(graph)

    def graph_free(self, graph):
        self.freed.append(graph)


def check_code(functions, name, code):
    if code:
        raise RuntimeError(name)


@pytest.fixture
def native(monkeypatch):
    """A library, and a torch.cuda that does nothing."""
    nothing = contextlib.nullcontext()
    monkeypatch.setattr(torch.cuda, "device", lambda index: nothing)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nothing)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda stream, device: SimpleNamespace(cuda_stream=stream))
    monkeypatch.setattr(torch.cuda, "MemPool", object, raising=False)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool, device: nothing, raising=False)
    monkeypatch.setattr(graphs, "_SIDES", {})
    monkeypatch.setattr(graphs, "_MADE", collections.deque())
    return Native()


class Plan:
    """One of nothing but launches, which counts where they go."""

    def __init__(self, native):
        call = SimpleNamespace(where=(native, "linear"), check=check_code)
        self.graphs = graphs.Graphs(call, torch.device("cuda", 0))
        self.streams, self.error = [], None

    def launch(self, *addresses, stream=1):
        self.streams = []
        key = self.graphs.launch(addresses, stream)
        if key is not None:
            self.graphs.launch_steps(key, self.make)
        return "steps" if stream in self.streams else "graph"

    def make(self, stream):
        self.streams.append(stream)
        if self.error is not None and stream == 99:
            raise self.error


def test_addresses_that_come_again(monkeypatch, native):
    """The second time they become a graph. Of more than a table holds, they have to come more often."""
    monkeypatch.setattr(graphs, "_MOST", 4)
    plan = Plan(native)
    assert [plan.launch(1, 2) for _ in range(3)] == ["steps", "graph", "graph"]
    assert plan.launch(1, 3) == plan.launch(1, 2, stream=2) == "steps"
    with no_cuda_graphs():
        assert plan.launch(1, 2) == plan.launch(1, 3) == "steps"
    with monkeypatch.context() as others:
        others.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert plan.launch(1, 3) == plan.launch(1, 4) == plan.launch(1, 4) == "steps"
    assert plan.launch(1, 3) == "graph" and native.launched == [1, 1, 2]
    assert {plan.launch(address) for address in range(10, 20)} == {"steps"} and plan.graphs.patience > 1
    times = plan.graphs.patience
    assert [plan.launch(4) for _ in range(times + 1)] == ["steps"] * times + ["graph"]


@pytest.mark.parametrize("fails", ["graph_stream", "graph_begin", "graph_end", "make"])
def test_what_cannot_be_recorded_is_launched(fails, native):
    plan = Plan(native)
    native.fails, plan.error = fails, torch.OutOfMemoryError("of a workspace") if fails == "make" else None
    assert [plan.launch(1) for _ in range(4)] == ["steps"] * 4
    assert native.launched == [] and len(native.freed) == (fails in ("graph_end", "make"))
    native.fails, plan.error = "", None
    assert [plan.launch(2) for _ in range(2)] == ["steps", "graph"]


def test_the_oldest_graphs_go(monkeypatch, native):
    monkeypatch.setattr(graphs, "_MOST_GRAPHS", 3)
    both = [Plan(native), Plan(native)]
    for address in range(3):
        for plan in both:
            assert [plan.launch(address) for _ in range(2)] == ["steps", "graph"]
    assert native.freed == [1, 2, 3] and [plan.launch(2) for plan in both] == ["graph", "graph"]
    assert both[0].launch(0) == "steps"


def test_streams_without_end(native):
    """Each would keep a workspace."""
    plan = Plan(native)
    for stream in range(graphs._MOST_STREAMS):
        assert [plan.launch(1, stream=stream) for _ in range(2)] == ["steps", "graph"]
    assert [plan.launch(1, stream=90) for _ in range(3)] == ["steps"] * 3
