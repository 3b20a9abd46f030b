"""A copy of mamba_ssm in another project, before this one on the path or copied over it, runs on this one's kernels."""

import json

import pytest
from _helpers.copies import CONVOLUTION, SITES, install, install_convolution, python, write_copy

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
    whose, file, others = json.loads(python([tmp_path, *SITES], "-c", CODE.format(first=first)))
    assert (whose, file) == ("a copy", str(tmp_path / "mamba_ssm" / "__init__.py"))
    assert others == []  # nothing else of this package gets into the copy


def test_a_copy_over_this_package(tmp_path):
    write_copy(install(tmp_path))
    assert json.loads(python([tmp_path], "-c", CODE.format(first="selective_scan_cuda")))[0] == "a copy"


CONVOLVE = """
import {first}
import torch, mamba_ssm, causal_conv1d, causal_conv1d_cuda
from mamba_ssm.ops import selective_scan_interface as copy
assert copy.causal_conv1d_fn is causal_conv1d.causal_conv1d_fn and copy.causal_conv1d_cuda is causal_conv1d_cuda
x, weight = torch.randn(2, 6, 20), torch.randn(6, 4)
expected = torch.nn.functional.conv1d(x, weight[:, None], padding=3, groups=6)[..., :20]
torch.testing.assert_close(copy.causal_conv1d_fn(x, weight), expected)
torch.testing.assert_close(copy.causal_conv1d_cuda.causal_conv1d_fwd(x, weight, None, None, False), expected)
print(mamba_ssm.WHOSE)
"""


@pytest.mark.parametrize("first", ["causal_conv1d", "causal_conv1d_cuda", "mamba_ssm"])
def test_the_convolution_of_a_copy(tmp_path, first):
    """The copy imports from causal_conv1d, which may be importing the copy just then."""
    write_copy(tmp_path)
    assert python([tmp_path, *SITES, CONVOLUTION], "-c", CONVOLVE.format(first=first)) == "a copy\n"


def test_causal_conv1d_without_mamba_ssm(tmp_path):
    install_convolution(tmp_path)
    code = "try:\n    import causal_conv1d\nexcept ModuleNotFoundError as error:\n    print(error.name, error)"
    printed = python([tmp_path], "-S", "-c", code)
    assert printed.startswith("mamba_ssm this causal_conv1d calls mamba_ssm, which is not installed here")


def test_importing_again_adds_no_second_finder():
    code = """
import sys, selective_scan_cuda
before = len(sys.meta_path)
for name in [name for name in sys.modules if name.startswith(("mamba_ssm", "_mamba_ssm", "selective_scan_cuda"))]:
    del sys.modules[name]
import selective_scan_cuda
print(len(sys.meta_path) - before)
"""
    assert python(SITES, "-c", code) == "0\n"
