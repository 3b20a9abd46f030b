"""Context parallel on processes with gloo: blocks and models with a sequence in parts against one process."""

import pytest
import torch.distributed as dist
from _helpers import context_parallel_checks, distributed_checks

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch is built without gloo"
)


@pytest.fixture(scope="module", params=[2, 4], ids=["2_processes", "4_processes"])
def results(request, tmp_path_factory):
    """Each rank's results."""
    folder = tmp_path_factory.mktemp("ranks")
    return distributed_checks.spawn(request.param, folder, checks=context_parallel_checks.__name__)


@pytest.mark.parametrize("check", context_parallel_checks.CHECKS)
def test_on_every_rank(check, results):
    for rank, result in enumerate(results):
        assert result[check] is None, f"rank {rank}: {result[check]}"


@pytest.mark.gpu
def test_nccl_on_one_gpu(cuda, tmp_path):
    """NCCL's own collectives, with as many ranks as there are GPUs to be sure of."""
    if not dist.is_nccl_available():
        pytest.skip("this torch is built without NCCL")
    names = ("mamba", "mamba2", "mamba3", "mamba2_groups", "language_model_mamba2")
    (result,) = distributed_checks.spawn(1, tmp_path, "nccl", "cuda", names, context_parallel_checks.__name__)
    assert result == dict.fromkeys(names), result
