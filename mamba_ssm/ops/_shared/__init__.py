"""What several operators share: gradients in parts, indices, the references' dtype. Private to mamba_ssm."""
