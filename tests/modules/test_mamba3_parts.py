"""A decode step of Mamba-3 that is put together from upstream's parts: the block's own step."""

import pytest
import torch

from mamba_ssm import Mamba3
from mamba_ssm.ops.cute.mamba3.mamba3_step_fn import mamba3_step_fn
from mamba_ssm.ops.triton.mamba3.mamba3_mimo_rotary_step import apply_rotary_qk_inference_fwd
from mamba_ssm.utils.generation import InferenceParams

KINDS = {
    "siso": {},
    "siso-norm-groups": {"is_outproj_norm": True, "ngroups": 2},
    "mimo": {"is_mimo": True, "mimo_rank": 2},
    "mimo-norm-softplus": {
        "is_mimo": True, "mimo_rank": 2, "is_outproj_norm": True, "ngroups": 4, "A_activation": "softplus",
    },
}  # fmt: skip


def step(module, u, angle_state, ssm_state, k_state, v_state):
    """As upstream's own step composes them; out and the states that are not written in place."""
    z, x, B, C, dt, A, trap, angles = module.in_proj(u).split(module._parts, dim=-1)
    DT, B, C, x, z, trap, A, angles = module._preprocess(A, dt, B, C, x, z, trap, angles)
    biases = {"bias_q": module.C_bias.transpose(0, 1), "bias_k": module.B_bias.transpose(0, 1)}
    C, B, angle = apply_rotary_qk_inference_fwd(
        C, B, angle_state, angles, DT, **biases, rotate_pairwise=not module.is_mimo
    )
    ones = torch.ones(module.mimo_rank, module.nheads, module.headdim, device=u.device)
    projections = (module.mimo_x, module.mimo_z, module.mimo_o) if module.is_mimo else (ones.transpose(0, 1),) * 3
    xpj, zpj, outpj = (projection.transpose(0, 1) for projection in projections)
    given = ssm_state, k_state, v_state, A, B, C, module.D, x, DT, trap, xpj
    if module.is_outproj_norm:
        y = torch.empty(len(u), module.mimo_rank, module.nheads, module.headdim, device=u.device)
        mamba3_step_fn(*given, out=y)
        y = module._postprocess(y, outpj, z, zpj, module.headdim)
    else:
        y = torch.empty_like(x)
        mamba3_step_fn(*given, outproj=outpj, out=y, z=z, zproj=zpj)
    return module.out_proj(y.flatten(1)), angle, B, x


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_step_of_the_parts(kind, device):
    torch.manual_seed(0)
    module = Mamba3(16, d_state=8, headdim=8, layer_idx=3, **KINDS[kind], device=device)
    for name, parameter in module.named_parameters():
        if name.endswith(("bias", "mimo_x", "mimo_z", "mimo_o", "D")):
            parameter.copy_(torch.rand_like(parameter) - 0.3)
    params = InferenceParams(max_seqlen=8, max_batch_size=2)
    states = module._get_states_from_cache(params, 2)
    assert params.key_value_memory_dict[3] is states and all(state.eq(0).all() for state in states)
    for state in states:
        state.copy_(torch.rand_like(state))
    expected, before = [state.clone() for state in states], [state.clone() for state in states]
    u = torch.randn(2, 16, device=device)
    wanted = module.step(u, *expected)[0]
    out, angle, k, v = step(module, u, *before)
    torch.testing.assert_close(out, wanted)
    turn = 2 * torch.pi
    torch.testing.assert_close(angle.remainder(turn), expected[0].remainder(turn))
    for found, state in zip((before[1], k, v), expected[1:], strict=True):
        torch.testing.assert_close(found, state)
    again = module._get_states_from_cache(params, 2, initialize_states=True)
    assert again is states and all(state.eq(0).all() for state in states)


def test_errors(device):
    module = Mamba3(16, d_state=8, headdim=8, device=device)
    row = torch.ones(1, 1, 4, 8, device=device)
    with pytest.raises(ValueError, match=r"_postprocess .* is_outproj_norm=True"):
        module._postprocess(row, row[0], row[0], row[0], 8)
    with pytest.raises(ValueError, match="layer_idx must be given"):
        module._get_states_from_cache(InferenceParams(8, 2), 2)
