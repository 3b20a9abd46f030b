"""names.txt beside this holds what others import: every name is there, with hints, and no public name is left out."""

import importlib
import inspect

import pytest
from _helpers.names import KERNELS, PATHS


@pytest.mark.parametrize("path", PATHS)
def test_names(path):
    module = importlib.import_module(path)
    for name in PATHS[path]:
        assert hasattr(module, name), f"{path}.{name}"
    assert set(getattr(module, "__all__", [])) <= set(PATHS[path]), "add the new names to names.txt"
    assert not hasattr(module, "no_such_name")


@pytest.mark.parametrize("path", [path for path in KERNELS if KERNELS[path]])
def test_kernels(path):
    """Code that imports one beside what it needs goes on; one that launches it is told what to call."""
    module = importlib.import_module(path)
    for name in KERNELS[path]:
        kernel = getattr(module, name)
        for launch in (lambda kernel=kernel: kernel[(1,)](None), kernel):
            with pytest.raises(NotImplementedError, match=rf"{path}\.{name} is a \w+ kernel .* call (\w+)") as error:
                launch()
        instead = str(error.value).split(" call ")[1].removesuffix(" instead").split(" or ")[0]
        assert instead in PATHS[path], instead


def public_functions(thing):
    """A function itself; of a class its constructor and public methods, those of its bases in this package too."""
    if not inspect.isclass(thing):
        return [thing] if inspect.isroutine(thing) else []
    owners = [owner for owner in thing.__mro__ if owner.__module__.startswith("mamba_ssm")]
    names = {name for owner in owners for name in vars(owner) if name == "__init__" or not name.startswith("_")}
    return [member for member in (getattr(thing, name) for name in sorted(names)) if inspect.isroutine(member)]


@pytest.mark.parametrize("path", PATHS)
def test_hints_are_complete(path):
    """py.typed promises them; whether they are true is for mypy to say."""
    module = importlib.import_module(path)
    without = []
    for function in (function for name in PATHS[path] for function in public_functions(getattr(module, name))):
        signature = inspect.signature(function)
        unknown = [part.name for part in signature.parameters.values() if part.annotation is part.empty]
        unknown += ["the result"] if signature.return_annotation is signature.empty else []
        without += [f"{function.__qualname__}: {name}" for name in unknown if name not in ("self", "cls")]
    assert without == []
