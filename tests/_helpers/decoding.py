"""What generation is compared with."""

import torch


def full_forward_tokens(model, tokens, max_length, vocab_size=None):
    """Greedy generation that reads everything again for each token."""
    with torch.no_grad():
        while tokens.shape[1] < max_length:
            logits = model(tokens).logits[:, -1, :vocab_size]
            tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
    return tokens
