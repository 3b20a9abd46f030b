"""LayerNorm and RMSNorm, with the residual's addition (forward, backward) or a gate (gated); SwiGLU and softplus."""
