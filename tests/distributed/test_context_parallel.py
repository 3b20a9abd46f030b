"""Context parallel on processes with gloo: blocks and models with a sequence in parts against one process."""

import subprocess
import sys

import pytest
import torch.distributed as dist
from _helpers import context_parallel_checks, ranks

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch is built without gloo"
)


@pytest.fixture(scope="module", params=[2, 4], ids=["2_processes", "4_processes"])
def results(request, tmp_path_factory):
    """Each rank's results."""
    folder = tmp_path_factory.mktemp("ranks")
    return ranks.spawn(request.param, folder, checks=context_parallel_checks.__name__)


@pytest.mark.parametrize("check", context_parallel_checks.CHECKS)
def test_on_every_rank(check, results):
    for rank, result in enumerate(results):
        assert result[check] is None, f"rank {rank}: {result[check]}"


def test_a_group_ends_when_it_is_destroyed(tmp_path):
    """With its threads. The compiler, if loaded while there is a group, would hold it."""
    code = """
import sys
import weakref

import torch
import torch.distributed as dist
from mamba_ssm import Mamba, Mamba2, Mamba3
from mamba_ssm.distributed.context_parallel import context_parallel

dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)
for layer in Mamba(16), Mamba2(16, headdim=8, d_state=8), Mamba3(16, headdim=8, d_state=8):
    context_parallel(layer, dist.group.WORLD)(torch.randn(1, 5, 16)).sum().backward()
    context_parallel(layer, None)
group = weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
sys.exit(group() is not None)
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "store"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_nccl_on_one_gpu(cuda, tmp_path):
    """NCCL's own collectives, with as many ranks as there are GPUs to be sure of."""
    if not dist.is_nccl_available():
        pytest.skip("this torch is built without NCCL")
    names = ("mamba", "mamba2", "mamba3", "mamba2_groups", "language_model_mamba2")
    (result,) = ranks.spawn(1, tmp_path, "nccl", "cuda", names, context_parallel_checks.__name__)
    assert result == dict.fromkeys(names), result
