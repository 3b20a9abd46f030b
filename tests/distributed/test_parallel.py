"""Tensor and sequence parallelism on 2 and 4 processes with gloo: outputs and gradients of one process.

The processes of one size start once and run every check; each check is then a test.
"""

import pytest
import torch.distributed as dist
from _helpers.distributed_checks import CHECKS
from _helpers.ranks import spawn

from mamba_ssm.distributed.distributed_utils import get_dim_for_local_rank

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch is built without gloo"
)


@pytest.fixture(scope="module", params=[2, 4], ids=["2_processes", "4_processes"])
def results(request, tmp_path_factory):
    """Each rank's results."""
    return spawn(request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("check", CHECKS)
def test_on_every_rank(check, results):
    for rank, result in enumerate(results):
        assert result[check] is None, f"rank {rank}: {result[check]}"


@pytest.mark.gpu
def test_nccl_on_one_gpu(cuda, tmp_path):
    """NCCL's own collectives, with as many ranks as there are GPUs to be sure of."""
    if not dist.is_nccl_available():
        pytest.skip("this torch is built without NCCL")
    names = ("linear_layers", "linear_layers_sequence_parallel", "mamba2", "mamba2_sequence_parallel", "mamba3")
    names += ("loss_of_a_divided_vocabulary", "language_model")
    (result,) = spawn(1, tmp_path, "nccl", "cuda", names)
    assert result == dict.fromkeys(names), result


def test_dimensions_of_ranks():
    assert [get_dim_for_local_rank(10, 4, rank) for rank in range(4)] == [3, 3, 2, 2]
    assert [get_dim_for_local_rank(48, 4, rank, 16) for rank in range(4)] == [16, 16, 16, 0]
    with pytest.raises(ValueError, match=r"dim \(10\) must be a multiple of multiple_of \(4\)"):
        get_dim_for_local_rank(10, 2, 0, 4)
