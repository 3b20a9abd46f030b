"""One side of the comparison, inside its process: where its functions come from, and how its results are judged."""

import importlib
import importlib.machinery
import os
import sys

import validate

PACKAGES = ("mamba_ssm", "causal_conv1d")
PEER_LIMIT = 0.1  # how a peer rounds is its own matter: this says that it computed the same


def installed(folders):
    """Which of the packages lie in a peer's folders."""
    return [name for name in PACKAGES if importlib.machinery.PathFinder.find_spec(name, folders)]


class Lacking(Exception):
    """This side has no such function."""


class Side:
    """folders: where a peer's packages must lie; none for ours, which is the mamba_ssm of this environment."""

    def __init__(self, folders=()):
        self.folders = [os.path.abspath(folder) for folder in folders]

    def packages(self):
        """{name: {"version", "folder"}} of this side's packages, or {"error"}: why one cannot be imported."""
        found = {}
        for name in installed(self.folders) if self.folders else PACKAGES[:1]:
            try:
                package = self._imported(name)
            except Lacking as error:
                found[name] = {"error": str(error)}
            else:
                folder = os.path.dirname(package.__file__)
                found[name] = {"version": getattr(package, "__version__", "without a version"), "folder": folder}
        return found

    def function(self, *places):
        """The first that there is of places like "mamba_ssm.ops.triton.softplus:softplus".

        causal_conv1d is a package of its own on a peer's side, and a module of mamba_ssm on ours.
        """
        reasons = []
        for place in places:
            path, name = place.split(":")
            if not self.folders and not path.startswith("mamba_ssm"):
                continue
            try:
                return getattr(self._imported(path), name)
            except (Lacking, AttributeError) as error:
                reasons.append(str(error))
        raise Lacking("; ".join(reasons))

    def _imported(self, path):
        """The module, which must be this side's own: what the peer lacks may lie elsewhere on the import path."""
        name = path.partition(".")[0]
        try:
            module = importlib.import_module(path)
        except Exception as error:  # what a broken installation raises is anything
            if not self.folders:
                raise
            raise Lacking(f"no {path}: {type(error).__name__}: {error}") from error
        file = os.path.abspath(sys.modules[name].__file__ or "")
        if self.folders and not any(file.startswith(folder + os.sep) for folder in self.folders):
            raise Lacking(f"no {name} in {os.pathsep.join(self.folders)}")
        return module

    def check(self, name, got, expected, dtype, factor=1.0):
        """Raise Mismatch unless got agrees with the float64 reference: ours to its dtype's rounding, times factor."""
        if self.folders:
            validate.check_roughly(name, got, expected, PEER_LIMIT)
        else:
            validate.check(name, got, expected, dtype, factor)

    def check_roughly(self, name, got, expected, limit=0.03):
        """The same for what went through layers in a low precision."""
        validate.check_roughly(name, got, expected, PEER_LIMIT if self.folders else limit)
