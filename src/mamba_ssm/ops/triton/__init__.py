"""Upstream's import paths: thin aliases of this package's own operators. Triton is never imported."""
