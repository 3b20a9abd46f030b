"""Language models in upstream's names, checkpoint layout and state dicts."""
