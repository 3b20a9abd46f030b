"""Devices and dtypes of a checkpoint, by their usual names; others are refused."""

import pytest
import torch

from mamba_ssm import MambaLMHeadModel
from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.utils import hf


@pytest.fixture
def folder(tmp_path):
    MambaLMHeadModel(MambaConfig(d_model=16, n_layer=1, vocab_size=21)).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["bfloat16", "torch.bfloat16", "float16", "half", "torch.float64"])
def test_dtype_by_name(folder, name):
    kind = getattr(torch, name.removeprefix("torch."))
    assert MambaLMHeadModel.from_pretrained(folder, dtype=name).lm_head.weight.dtype == kind
    assert hf.load_state_dict_hf(folder, dtype=name)["lm_head.weight"].dtype == kind


@pytest.mark.parametrize("dtype", ["bf16", "auto", "int8", "", "nn", torch.int8, torch.complex64, torch.bool, 16, True])
def test_dtypes_that_are_none(folder, dtype):
    for load in MambaLMHeadModel.from_pretrained, hf.load_state_dict_hf:
        with pytest.raises(
            ValueError, match=r'dtype must be one of torch.float32, .* such as "bfloat16", got'
        ) as error:
            load(folder, dtype=dtype)
        assert str(error.value).startswith(f"{load.__name__}: ") and str(error.value).endswith(f"got {dtype!r}")


@pytest.mark.parametrize("device", ["gpu", "GPU:0", "nvidia", "CUDA", "cuda:x", "cpu,cuda", "", -1, True, ["cpu"], 1.5])
def test_devices_that_are_none(folder, device):
    cure = '; did you mean "cuda"?' if str(device).lower()[:2] in ("gp", "nv", "cu") else ""
    for load in MambaLMHeadModel.from_pretrained, hf.load_state_dict_hf:
        with pytest.raises(ValueError, match=r'device must be a torch.device or its name, such as "cpu"') as error:
            load(folder, device=device)
        assert str(error.value).startswith(f"{load.__name__}: ") and str(error.value).endswith(f"{device!r}{cure}")


@pytest.mark.parametrize("device", ["cuda:99", torch.device("cuda:99"), 99, "xla"])
def test_devices_that_torch_cannot_use_here(folder, device):
    with pytest.raises(
        RuntimeError, match=r"cannot use the device .* here \(.+\)\. `python -m mamba_ssm` says"
    ) as error:
        MambaLMHeadModel.from_pretrained(folder, device=device)
    assert str(device) in str(error.value) and error.value.__cause__ is not None and len(str(error.value)) < 500
