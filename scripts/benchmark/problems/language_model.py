"""A language model with random weights, and what decoding and training have in common about it."""

import torch

WARM_UP = 2  # calls before a capture: what is allocated once is then there


def make(case, device, side, dtype):
    config_class = side.function("mamba_ssm.models.config_mamba:MambaConfig")
    model_class = side.function("mamba_ssm.models.mixer_seq_simple:MambaLMHeadModel")
    torch.manual_seed(0)
    config = config_class(d_model=case.d_model, n_layer=case.n_layer, ssm_cfg={"layer": case.layer})
    return model_class(config, device=device, dtype=dtype)


def random_tokens(case, device, seqlen):
    generator = torch.Generator(device=device).manual_seed(0)
    return torch.randint(0, 50277, (case.batch, seqlen), device=device, generator=generator)


def captured(step):
    """A call that replays the step as a CUDA graph and returns what it writes at every replay.

    pool_bytes, an attribute: the memory that the graph reserved for itself.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.empty_cache()
    reserved, graph = torch.cuda.memory_reserved(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def replay():
        graph.replay()
        return out

    replay.pool_bytes = torch.cuda.memory_reserved() - reserved
    return replay
