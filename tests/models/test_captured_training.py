"""Training steps as CUDA graphs: the losses and parameters are those of the same steps without a graph."""

import copy

import pytest
import torch

from mamba_ssm import Mamba, Mamba2, Mamba3, MambaLMHeadModel
from mamba_ssm.models.config_mamba import MambaConfig

WARM_UP, STEPS = 3, 6
LAYERS = {
    "mamba": {"layer": "Mamba1"},
    "mamba2": {"layer": "Mamba2", "headdim": 16, "d_state": 16, "chunk_size": 32},
    "mamba3": {"layer": "Mamba3", "headdim": 16, "d_state": 16},
}
# Adam divides by a gradient's own size: where the order of atomic additions decides a small gradient's sign, a
# parameter moves by the whole learning rate the other way. So losses, means over all tokens, are compared.
CLOSE = {"rtol": 2e-3, "atol": 2e-3}


class Training:
    """A model whose step reads its batch and learning rate from tensors: as it is, or with a GradScaler in float16."""

    def __init__(self, model, scaled):
        device = model.lm_head.weight.device
        self.model, self.tokens = model, torch.empty(2, 40, dtype=torch.long, device=device)
        self.rate = torch.tensor(1e-3, device=device)
        on_gpu = {"fused": True, "capturable": True} if device.type == "cuda" else {}
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=self.rate, **on_gpu)
        self.scaler = torch.amp.GradScaler(device.type, init_scale=256.0) if scaled else None

    def feed(self, number):
        generator = torch.Generator().manual_seed(number % 2)  # two batches, which it learns
        self.tokens.copy_(torch.randint(128, self.tokens.shape, generator=generator))
        self.rate.fill_(1e-3 / (1 + number))

    def step(self):
        dtype = torch.bfloat16 if self.scaler is None else torch.float16
        with torch.autocast(self.tokens.device.type, dtype):
            loss = self.model(self.tokens, labels=self.tokens).loss
        if self.scaler is None:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def losses(self, step, first):
        found = []
        for number in range(first, first + STEPS):
            self.feed(number)
            found.append(step().clone())
        return torch.stack(found)


def make(kind, device):
    torch.manual_seed(0)
    return MambaLMHeadModel(MambaConfig(d_model=64, n_layer=2, vocab_size=128, ssm_cfg=LAYERS[kind]), device=device)


def on_a_stream(function):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            function()
    torch.cuda.current_stream().wait_stream(stream)


@pytest.fixture(params=[False, True], ids=["clipped", "scaled"])
def scaled(request):
    if request.param and not hasattr(torch.amp, "GradScaler"):
        pytest.skip("torch.amp.GradScaler needs torch 2.3")
    return request.param


@pytest.mark.gpu
@pytest.mark.parametrize("kind", LAYERS)
def test_a_captured_step_trains_as_an_eager_one(kind, scaled, cuda):
    model = make(kind, cuda)
    ours, theirs = Training(model, scaled), Training(copy.deepcopy(model), scaled)
    for training in (ours, theirs):
        training.feed(0)
        on_a_stream(training.step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = ours.step()

    def replay():
        graph.replay()
        return loss

    found, expected = ours.losses(replay, 1), theirs.losses(theirs.step, 1)
    torch.testing.assert_close(found, expected, **CLOSE)
    assert expected[-2:].mean() < expected[:2].mean() - 10 * CLOSE["atol"]  # so that it shows whether steps were taken


@pytest.mark.gpu
@pytest.mark.parametrize("kind", LAYERS)
def test_the_compilers_graphs_train_as_eager_steps(kind, cuda):
    model = make(kind, cuda)
    ours, theirs = Training(model, False), Training(copy.deepcopy(model), False)
    torch.compiler.reset()
    ours.model = torch.compile(model, mode="reduce-overhead")

    def step():
        torch.compiler.cudagraph_mark_step_begin()
        return ours.step()

    found, expected = ours.losses(step, 0), theirs.losses(theirs.step, 0)
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("kind", LAYERS)
def test_the_step_that_would_be_captured_trains(kind, scaled):
    training = Training(make(kind, "cpu"), scaled)
    found = training.losses(training.step, 1)
    assert found[-2:].mean() < found[:2].mean() - 10 * CLOSE["atol"]


@pytest.mark.gpu
@pytest.mark.parametrize("make_block", [Mamba, Mamba2, Mamba3])
def test_make_graphed_callables(make_block, cuda):
    torch.manual_seed(0)
    block = make_block(d_model=64).to(cuda)
    plain = copy.deepcopy(block)
    sample = torch.randn(2, 40, 64, device=cuda, requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(block, (sample,))
    for _ in range(2):
        x = torch.randn(2, 40, 64, device=cuda, requires_grad=True)
        y = torch.randn(2, 40, 64, device=cuda)
        found, expected = graphed(x), plain(x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        parameters = list(block.parameters()), list(plain.parameters())
        found = torch.autograd.grad(found, [x, *parameters[0]], y)
        expected = torch.autograd.grad(expected, [x, *parameters[1]], y)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * max(1.0, theirs.abs().max().item()))
