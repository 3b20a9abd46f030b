"""What messages advise: drivers, and commands as the user's shell takes them.

Standard library alone: scripts, which run without torch, load this file by its path (scripts/wheel_build/advice.py).
"""

import shlex

# CUDA major version -> oldest NVIDIA driver whose CUDA matches it (NVIDIA's minor-version compatibility table).
DRIVER_FLOORS = {12: 525, 13: 580}


def driver_needed(cuda_major: int) -> str:
    """The driver that a wheel built with this CUDA needs, in words."""
    floor = DRIVER_FLOORS.get(cuda_major)
    return f"NVIDIA driver {floor} or newer" if floor else f"an NVIDIA driver for CUDA {cuda_major}"


def with_variables(platform: str, command: str = "", **variables: str) -> str:
    """How to set environment variables, and run a command with them, in the shell that this platform's users have."""
    if platform == "win32":  # PowerShell
        words = [f'$env:{name} = "{value}"' for name, value in variables.items()]
        return "; ".join([*words, command] if command else words)
    words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return " ".join([*words, command] if command else words)
