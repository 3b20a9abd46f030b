"""One token of the blocks as a CUDA graph: replayed, it does what the call does."""

import pytest
import torch

from mamba_ssm import Mamba, Mamba2, Mamba3

BLOCKS = {
    "mamba": (Mamba, {}),
    "mamba2": (Mamba2, {}),
    "mamba3": (Mamba3, {}),
    "mamba3_mimo": (Mamba3, {"is_mimo": True, "mimo_rank": 2, "is_outproj_norm": True}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("block", BLOCKS)
def test_cuda_graph_of_a_step(block, cuda):
    make, options = BLOCKS[block]
    module = make(64, **options).to(cuda)
    ours, theirs = module.allocate_inference_cache(2, 9), module.allocate_inference_cache(2, 9)
    x = torch.randn(2, 1, 64, device=cuda)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        module.step(x, *ours)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        out = module.step(x, *ours)[0]
    for state in ours:
        state.zero_()
    for _ in range(4):
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.testing.assert_close(out, module.step(x, *theirs)[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
