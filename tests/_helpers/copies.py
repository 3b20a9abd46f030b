"""This package installed in a folder, and another project's copy of mamba_ssm that lies before or over it."""

import base64
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import mamba_ssm
from _helpers.programs import run_code

SITE = Path(mamba_ssm.__file__).parents[1]
COMPAT = SITE / "compat" if (SITE / "compat").is_dir() else SITE  # a checkout, or where a wheel was installed
SITES = [SITE] if COMPAT == SITE else [SITE, COMPAT]
MODULES = (
    "_mamba_ssm_finder",
    "mamba_ssm_doctor",
    "selective_scan_cuda",
    "selective_scan_cuda_core",
    "selective_scan_cuda_oflex",
    "selective_scan_cuda_oflex_rh",
)
CONVOLUTION = Path(__file__).resolve().parents[2] / "causal-conv1d" / "src"
# In the manner of upstream's 1.x.
COPY = {
    "__init__.py": "from mamba_ssm.ops.selective_scan_interface import selective_scan_fn\nWHOSE = 'a copy'\n",
    "ops/__init__.py": "# a copy's\n",
    "ops/selective_scan_interface.py": """
import torch
import selective_scan_cuda
try:
    from causal_conv1d import causal_conv1d_fn
    import causal_conv1d_cuda
except ImportError:
    causal_conv1d_fn = causal_conv1d_cuda = None

class SelectiveScanFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False):
        ctx.softplus = delta_softplus
        out, x, *rest = selective_scan_cuda.fwd(u, delta, A, B, C, D, z, delta_bias, delta_softplus)
        ctx.save_for_backward(u, delta, A, B, C, D, z, delta_bias, x, out)
        return rest[0] if rest else out

    @staticmethod
    def backward(ctx, dout):
        *inputs, x, out = ctx.saved_tensors
        grads = selective_scan_cuda.bwd(*inputs, dout, x, out, None, ctx.softplus, False)
        du, ddelta, dA, dB, dC, dD, ddelta_bias, *rest = grads
        return du, ddelta, dA, dB, dC, dD, rest[0] if rest else None, ddelta_bias, None

def selective_scan_fn(*tensors_and_softplus):
    return SelectiveScanFn.apply(*tensors_and_softplus)

def selective_scan_ref(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False):
    from mamba_ssm.ops.selective_scan.reference import selective_scan_ref
    return selective_scan_ref(u, delta, A, B, C, D, z, delta_bias, delta_softplus)
""",
}


def write_copy(folder):
    for name, text in COPY.items():
        (folder / "mamba_ssm" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "mamba_ssm" / name).write_text(text)


def install(folder):
    """This package's files as pip leaves them, with the CPU library."""
    shutil.copytree(
        SITE / "mamba_ssm", folder / "mamba_ssm", ignore=shutil.ignore_patterns("*cuda.so", "*.dll", "__pycache__")
    )
    for module in MODULES:
        shutil.copy(COMPAT / f"{module}.py", folder)
    return folder


def record(site, name, version, *files):
    """What pip writes beside the files of a distribution; returns the .dist-info."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"{info.name}/RECORD,,\n"]
    for file in files:
        data = file.read_bytes()
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{file.relative_to(site).as_posix()},sha256={digest},{len(data)}\n")
    (info / "RECORD").write_text("".join(lines), encoding="utf-8")
    return info


def files_of(site):
    """This package's files in a folder that install() made."""
    package = [path for path in sorted((site / "mamba_ssm").rglob("*")) if path.is_file()]
    return [*package, *(site / f"{module}.py" for module in MODULES)]


def install_convolution(folder):
    """The same for causal-conv1d."""
    shutil.copytree(CONVOLUTION, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


def python(path, *words):
    """What Python prints with these folders first on its path."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    if words[0] == "-c":
        done = run_code(words[1], cwd=path[0], environ=environ)
    else:
        done = subprocess.run([sys.executable, *words], env=environ, cwd=path[0], capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return done.stdout
