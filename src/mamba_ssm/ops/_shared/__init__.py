"""What several operators share: argument checks, gradients in parts, the references' dtype. Private to mamba_ssm."""
