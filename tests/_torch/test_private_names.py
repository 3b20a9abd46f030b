"""A torch without one of the private names that mamba_ssm._torch looks up: operators compute and differentiate."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mamba_ssm
from mamba_ssm._torch import private

# The name is gone while mamba_ssm is imported, and back afterwards, since torch needs it itself.
CODE = """
import torch

owner, name = torch, {name!r}
for step in name.split(".")[:-1]:
    owner = getattr(owner, step)
name = name.split(".")[-1]
value = getattr(owner, name)
delattr(owner, name)
import mamba_ssm

setattr(owner, name, value)

from mamba_ssm import Mamba, Mamba2
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn, selective_scan_ref

torch.manual_seed(0)
leaves = [torch.randn(*shape) for shape in [(2, 8, 37), (2, 8, 37), (8, 4), (2, 4, 37), (2, 4, 37)]]
results = []
for function in selective_scan_fn, selective_scan_ref:
    u, delta, A, B, C = (leaf.clone().requires_grad_() for leaf in leaves)
    out = function(u, delta, -A.exp(), B, C, delta_softplus=True)
    results.append([out, *torch.autograd.grad(out.square().sum(), [u, delta, A, B, C])])
for ours, reference in zip(*results):
    torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-4)
with torch.no_grad():
    torch.testing.assert_close(selective_scan_fn(*leaves), selective_scan_ref(*leaves), rtol=1e-4, atol=1e-4)
for block in Mamba(16, d_state=4), Mamba2(16, d_state=4, headdim=8):
    x = torch.randn(1, 5, 16, requires_grad=True)
    block(x).sum().backward()
    assert x.grad.isfinite().all() and x.grad.abs().max() > 0
    block(x.detach())

from mamba_ssm import MambaLMHeadModel
from mamba_ssm.models.config_mamba import MambaConfig

config = MambaConfig(d_model=16, n_layer=1, vocab_size=16, ssm_cfg={{"layer": "Mamba2", "headdim": 16}})
model = MambaLMHeadModel(config, dtype=torch.bfloat16)
tokens = model.generate(torch.zeros(1, 2, dtype=torch.long), 8)
model.backbone.layers[0].register_forward_hook(lambda *_: None)  # no recorded steps
assert torch.equal(model.generate(torch.zeros(1, 2, dtype=torch.long), 8), tokens)

try:  # values on the CPU are checked, whatever torch says
    Mamba2(16, d_state=4, headdim=8)(torch.randn(1, 7, 16), cu_seqlens=torch.tensor([0, 6, 4], dtype=torch.int32))
except ValueError as error:
    assert "must rise from 0" in str(error)
else:
    raise AssertionError("cu_seqlens that falls went through")

dual = torch.autograd.forward_ad
with dual.dual_level():
    for u in dual.make_dual(leaves[0], leaves[0]), leaves[0].clone().requires_grad_():
        out = selective_scan_fn(u, *leaves[1:])
        assert u.requires_grad or dual.unpack_dual(out).tangent is not None, "a tangent was lost"
if {name!r} == "_C._are_functorch_transforms_active":  # then the operator does not see that it is in a transform
    try:
        torch.func.grad(lambda u: selective_scan_fn(u, *leaves[1:]).sum())(leaves[0])
    except RuntimeError:
        pass
    else:
        raise AssertionError("torch.func.grad went through")
else:
    found = torch.func.grad(lambda u: selective_scan_fn(u, *leaves[1:]).sum())(leaves[0])
    expected = torch.func.grad(lambda u: selective_scan_ref(u, *leaves[1:]).sum())(leaves[0])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
"""

# `_C._FunctionBase` is a built-in class, from which nothing can be taken away.
NAMES = [name for name in private.LOOKED_UP if name != "_C._FunctionBase.apply"]


@pytest.mark.parametrize("name", NAMES)
def test_without(name):
    if private._find(name) is None:
        pytest.skip("this torch has no such name")
    done = subprocess.run([sys.executable, "-c", CODE.format(name=name)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def private_uses(path):
    """Underscored names of torch that a file imports, or reads as an attribute: `torch._C`, `nn.Module._parameters`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None)
            for alias in node.names:
                name = f"{module}.{alias.name}" if module else alias.name
                if name.split(".")[0] == "torch":
                    yield from (part for part in name.split(".") if part.startswith("_"))
                    modules.add(alias.asname or alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            root = node
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in modules:
                yield ast.unparse(node)


PACKAGE = Path(mamba_ssm.__file__).parent


@pytest.mark.parametrize("file", sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")))
def test_private_names_are_used_in_one_file(file):
    found = set(private_uses(PACKAGE / file))
    assert bool(found) == (file == "_torch/private.py"), f"{file} uses {found}"
