"""scripts/wgmma_check.py: what it finds in machine code, and that ours has none of it."""

import _helpers.publish_extra  # noqa: F401  (skips where the scripts could not be imported)
import pytest
import wgmma_check

from mamba_ssm._native import loader

PRODUCT = "HGMMA.64x32x16.F32 R24, R8, gdesc[UR4], R24, gsb0"  # reads R8 to R11, writes R24 to R39
WAIT, WAIT_FOR_ALL_BUT_ONE = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x1"
LOAD, USE = "LDSM.16.M88.4 R8, [R100+0x20]", "FADD R40, R24, R25"


def listing(*instructions):
    lines = [f"        /*{16 * at:04x}*/    {text} ;    /* 0x0 */" for at, text in enumerate(instructions)]
    return ["\t\tFunction : kernel", *lines]


@pytest.mark.parametrize(
    "instructions, faults",
    [
        ([LOAD, PRODUCT, WAIT, USE, LOAD], []),
        ([PRODUCT, LOAD, WAIT], ["0x10 LDSM.16.M88.4 R8, [R100+0x20]: writes what products read, R8"]),
        ([PRODUCT, USE, WAIT], ["0x10 FADD R40, R24, R25: reads what products write, R24"]),
        ([PRODUCT, "MOV R39, RZ", WAIT], ["0x10 MOV R39, RZ: writes what products write, R39"]),
        ([PRODUCT, "MOV R40, RZ", "MOV R12, RZ", "MOV R7, R8", WAIT], []),
        ([PRODUCT, "STG.E.128 [R2.64], R20", WAIT], []),
        ([PRODUCT, "STG.E.128 [R2.64], R24", WAIT], ["0x10 STG.E.128 [R2.64], R24: reads what products write, R24"]),
        (
            [PRODUCT, "ISETP.GE.AND P0, PT, R24, R9, PT", WAIT],
            ["0x10 ISETP.GE.AND P0, PT, R24, R9, PT: reads what products write, R24"],
        ),
        ([PRODUCT, "@!P0 LDS.64 R10, [R3]", WAIT], ["0x10 LDS.64 R10, [R3]: writes what products read, R10"]),
        ([PRODUCT.replace("R24", "R64"), PRODUCT, WAIT_FOR_ALL_BUT_ONE, "MOV R64, RZ", "MOV R65, R10", WAIT], []),
        (
            [PRODUCT, PRODUCT.replace("R24", "R64"), WAIT_FOR_ALL_BUT_ONE, "MOV R64, RZ", WAIT],
            ["0x30 MOV R64, RZ: writes what products write, R64"],
        ),
        # One group of two products, and one of which the group is not closed.
        ([PRODUCT.replace("R24", "R64").replace(", gsb0", ""), PRODUCT, WAIT, "MOV R64, RZ"], []),
        ([PRODUCT.replace(", gsb0", ""), WAIT, "MOV R24, RZ"], ["0x20 MOV R24, RZ: writes what products write, R24"]),
        # Round a loop, and past the wait.
        ([LOAD, PRODUCT, "@P0 BRA 0x0", WAIT], ["0x0 LDSM.16.M88.4 R8, [R100+0x20]: writes what products read, R8"]),
        ([LOAD, PRODUCT, WAIT, "@P0 BRA 0x0", "EXIT"], []),
        ([PRODUCT, "@P0 BRA 0x30", WAIT, USE, WAIT], ["0x30 FADD R40, R24, R25: reads what products write, R24"]),
        ([PRODUCT, "BRA 0x30", USE, WAIT], []),
        (
            [PRODUCT, "BRA.DIV UR4, 0x30", LOAD, WAIT],
            ["0x20 LDSM.16.M88.4 R8, [R100+0x20]: writes what products read, R8"],
        ),
        # Behind a computed branch, and across one.
        (["BRXU UR4 -0x10", PRODUCT, LOAD], ["0x20 LDSM.16.M88.4 R8, [R100+0x20]: writes what products read, R8"]),
        ([PRODUCT, "BRXU UR4 -0x20", WAIT], ["0x10 BRXU UR4 -0x20: leads to where is not known, while products run"]),
        ([PRODUCT] * 20 + [LOAD], ["0x140 LDSM.16.M88.4 R8, [R100+0x20]: writes what products read, R8"]),
    ],
)
def test_what_is_found(instructions, faults):
    ((name, kernel),) = wgmma_check.kernels(listing(*instructions))
    assert name == "kernel" and len(kernel) == len(instructions)
    assert wgmma_check.faults(kernel) == faults


def test_no_kernel_touches_registers_that_products_use():
    cuobjdump = wgmma_check.find_cuobjdump()
    library = loader.library_path("cuda")
    if cuobjdump is None or not library.exists():
        pytest.skip("no cuobjdump" if cuobjdump is None else "mamba_ssm is installed without CUDA kernels")
    kernels, faults = wgmma_check.check(library, cuobjdump)
    assert not faults
    if kernels == 0:
        pytest.skip("built for other architectures than 90a")
