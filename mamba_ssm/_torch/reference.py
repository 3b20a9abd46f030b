"""Whether operators run their plain torch references instead of kernels: for what the kernels do not do."""

import contextlib
import os
import typing

on = os.environ.get("MAMBA_SSM_REFERENCE", "") == "1"
exporting = False  # while on: the scans and the convolution of sequences are still operators of this package


@contextlib.contextmanager
def plain_torch(enabled: bool = True) -> typing.Iterator[None]:
    """Within it this package's operators, and so its blocks and models, are ordinary torch operators, step after step:
    float64, any width of the convolution, derivatives of any order, complex A in the selective scan, export to formats
    that know torch's operators alone. Slow, and with the memory that autograd takes.

    For all threads; what was computed inside keeps its derivatives outside. The variable MAMBA_SSM_REFERENCE=1, read at
    import, says the same for a whole process.
    """
    global on
    before, on = on, enabled
    try:
        yield
    finally:
        on = before


@contextlib.contextmanager
def for_exporter() -> typing.Iterator[None]:
    """plain_torch in which selective_scan, ssd and causal_conv1d stay operators, which the exporter translates."""
    global exporting
    before, exporting = exporting, True
    try:
        with plain_torch():
            yield
    finally:
        exporting = before
