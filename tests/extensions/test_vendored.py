"""A copy of mamba_ssm in another project, before this one on the path or copied over it, runs on this one's kernels."""

import json

import pytest
from _helpers.copies import SITE, install, python, write_copy

CODE = """
import {first}
import json, sys, torch, mamba_ssm, selective_scan_cuda, selective_scan_cuda_core, selective_scan_cuda_oflex
torch.manual_seed(0)
tensors = u, delta, A, B, C = [
    t.requires_grad_() for t in (*torch.randn(2, 2, 6, 70), -torch.rand(6, 4), *torch.randn(2, 2, 1, 4, 70))
]
options = None, None, None, True
out = mamba_ssm.selective_scan_fn(*tensors, *options)
grads = torch.autograd.grad(out.sum(), tensors)
from mamba_ssm.ops.selective_scan.reference import selective_scan_ref
expected = selective_scan_ref(*tensors, *options)
torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
torch.testing.assert_close(grads, torch.autograd.grad(expected.sum(), tensors), rtol=1e-3, atol=1e-3)
for module in selective_scan_cuda_core, selective_scan_cuda_oflex:
    torch.testing.assert_close(module.fwd(*tensors, None, None, True, 1)[0], out)
ours = sorted(name for name in sys.modules if name.startswith("mamba_ssm.mod"))
print(json.dumps([mamba_ssm.WHOSE, mamba_ssm.__file__, ours]))
"""


@pytest.mark.parametrize("first", ["mamba_ssm", "selective_scan_cuda_oflex"])
def test_a_copy_before_this_package(tmp_path, first):
    write_copy(tmp_path)
    whose, file, others = json.loads(python([tmp_path, SITE], "-c", CODE.format(first=first)))
    assert (whose, file) == ("a copy", str(tmp_path / "mamba_ssm" / "__init__.py"))
    assert others == []  # nothing else of this package gets into the copy


def test_a_copy_over_this_package(tmp_path):
    write_copy(install(tmp_path))
    assert json.loads(python([tmp_path], "-c", CODE.format(first="selective_scan_cuda")))[0] == "a copy"
