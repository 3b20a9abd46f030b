"""A language model with random weights, and what decoding and training have in common about it."""

import torch


def make(case, device, side, dtype):
    config_class = side.function("mamba_ssm.models.config_mamba:MambaConfig")
    model_class = side.function("mamba_ssm.models.mixer_seq_simple:MambaLMHeadModel")
    torch.manual_seed(0)
    config = config_class(d_model=case.d_model, n_layer=case.n_layer, ssm_cfg={"layer": case.layer})
    return model_class(config, device=device, dtype=dtype)


def random_tokens(case, device, seqlen):
    generator = torch.Generator(device=device).manual_seed(0)
    return torch.randint(0, 50277, (case.batch, seqlen), device=device, generator=generator)
