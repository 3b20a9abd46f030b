"""The Windows gate: NVIDIA's own Windows compiler on Linux. `python scripts/windows_gate --help` says what it does."""
