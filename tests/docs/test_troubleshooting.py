"""docs/troubleshooting.md quotes the errors that people search for, letter by letter, and is right about them."""

import inspect
from pathlib import Path

import pytest
import torch

from mamba_ssm import Mamba

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
OF_FORKS = ("bimamba_type", "if_devide_out", "if_divide_out", "nslices", "init_layer_scale")


@pytest.mark.parametrize(
    "message",
    [
        "Mamba.__init__() got an unexpected keyword argument 'bimamba_type'",
        *(f"'{name}'" for name in OF_FORKS),
        "No module named 'selective_scan_cuda'",
        "No module named 'causal_conv1d_cuda'",
        "No module named 'triton'",
        "causal_conv1d_fwd(): incompatible function arguments",
        "undefined symbol: _ZN",
        "NameError: name 'bare_metal_version' is not defined",
        "DLL load failed while importing selective_scan_cuda",
        "cannot import name 'GreedySearchDecoderOnlyOutput'",
        "The fast path is not available because one of",
    ],
)
def test_the_page_quotes_it(message):
    assert message in PAGE.split("## Everywhere")[0]


def test_these_arguments_are_no_error_here():
    assert set(OF_FORKS) <= set(inspect.signature(Mamba).parameters)
    Mamba(16, bimamba_type="v2", if_devide_out=True, init_layer_scale=0.1)
    Mamba(16, bimamba_type="v3", nslices=4)
    assert "got an unexpected keyword argument 'attention_mask'" in PAGE
    assert "attention_mask" in inspect.signature(Mamba.forward).parameters


@pytest.mark.parametrize("kind", ["none", "v3"])
def test_pan_mambas_argument(kind):
    """Its v3 cannot be told from SegMamba's when the layer is made, but when it is called."""
    message = "extra_emb is an argument of Pan-Mamba's"
    assert f"`{message}`" in PAGE and "got an unexpected keyword argument 'extra_emb'" in PAGE
    layer, x = Mamba(16, bimamba_type=kind, nslices=2), torch.randn(2, 4, 16)
    assert torch.equal(layer(x, extra_emb=None), layer(x))
    with pytest.raises(TypeError, match=f"Mamba: {message} .* own mamba_simple.py"):
        layer(x, extra_emb=x)
