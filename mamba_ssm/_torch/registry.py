"""What torch knows of this package's operators, which outlives an import.

torch lets no operator be defined twice in a process. So that the package can be imported again when its modules were
deleted from sys.modules, torch calls the latest import's functions.
"""

import torch

_KEPT = vars(torch.ops.mamba_ssm)
LIBRARY = _KEPT.get("library") or torch.library.Library("mamba_ssm", "DEF")
_KEPT["library"] = LIBRARY
SCHEMAS = _KEPT.setdefault("schemas", {})  # name -> schema
LATEST = _KEPT.setdefault("latest", {})  # (name, what torch calls it for) -> function


def defaults_of(name):
    """What the dispatcher leaves out of an operator's last arguments, with something in the place of the others."""
    declared = SCHEMAS[name].partition(") ->")[0].split(", ")
    return [None if argument.endswith("=None") else False for argument in declared]


def run_implementation(op, arguments):
    """What torch's dispatcher runs for an operator of this package, of the arguments that a dispatch mode gets."""
    name = op.name().removeprefix("mamba_ssm::")
    return LATEST[name, "CPU"](*arguments, *defaults_of(name)[len(arguments) :])
