"""mamba_ssm in a torch that lacks a name: run in a process that has not imported mamba_ssm."""

import torch


def check(rank, path):
    """The name is gone while mamba_ssm is imported, and back afterwards, since torch needs it itself."""
    torch.set_num_threads(1)
    *owners, name = path.split(".")
    owner = torch
    for step in owners:
        owner = getattr(owner, step)
    value = getattr(owner, name)
    delattr(owner, name)
    import mamba_ssm  # noqa: F401

    setattr(owner, name, value)
    torch.manual_seed(0)
    leaves = [torch.randn(*shape) for shape in [(2, 8, 37), (2, 8, 37), (8, 4), (2, 4, 37), (2, 4, 37)]]
    check_values(leaves)
    check_modules()
    check_transforms(leaves, path)


def check_values(leaves):
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn, selective_scan_ref

    results = []
    for function in selective_scan_fn, selective_scan_ref:
        u, delta, A, B, C = (leaf.clone().requires_grad_() for leaf in leaves)
        out = function(u, delta, -A.exp(), B, C, delta_softplus=True)
        results.append([out, *torch.autograd.grad(out.square().sum(), [u, delta, A, B, C])])
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(selective_scan_fn(*leaves), selective_scan_ref(*leaves), rtol=1e-4, atol=1e-4)


def check_modules():
    from mamba_ssm import Mamba, Mamba2, MambaLMHeadModel
    from mamba_ssm.models.config_mamba import MambaConfig

    for block in Mamba(16, d_state=4), Mamba2(16, d_state=4, headdim=8):
        x = torch.randn(1, 5, 16, requires_grad=True)
        block(x).sum().backward()
        assert x.grad.isfinite().all() and x.grad.abs().max() > 0
        block(x.detach())

    config = MambaConfig(d_model=16, n_layer=1, vocab_size=16, ssm_cfg={"layer": "Mamba2", "headdim": 16})
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


def check_transforms(leaves, path):
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn, selective_scan_ref

    dual = torch.autograd.forward_ad
    with dual.dual_level():
        for u in dual.make_dual(leaves[0], leaves[0]), leaves[0].clone().requires_grad_():
            out = selective_scan_fn(u, *leaves[1:])
            assert u.requires_grad or dual.unpack_dual(out).tangent is not None, "a tangent was lost"
    if path == "_C._are_functorch_transforms_active":  # then the operator does not see that it is in a transform
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
