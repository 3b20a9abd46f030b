"""Generation and checkpoints in upstream's names."""
