"""Which rows of the tables of kernels the tests have run, over several runs. A row that no case reaches fails.

With MAMBA_KERNELS_REACHED=FILE each pytest process adds to FILE what it launched (conftest.py). Afterwards, with the
same library (MAMBA_EMULATED_CUDA):

    python tests/_helpers/reached.py FILE [--any-dtype]

lists the rows that were not reached for one of their dtypes, or with --any-dtype for none. Exit status 1 if there are
any.
"""

import os
import sys


def write(path):
    """Add this process's launches, if it has the library."""
    from _helpers import cuda_library
    from mamba_ssm._native import loader
    from mamba_ssm.utils import kernels

    if cuda_library.EMULATED is not None:
        loader.libraries["cuda"] = cuda_library.emulated_functions()
    if loader.loaded("cuda"):
        lines = "".join(f"{one.kernel.id} {one.dtype}\n" for one in kernels.launches())
        with open(path, "a", encoding="utf-8") as file:
            file.write(lines)


def missed(rows, lines, any_dtype):
    """Texts that name the rows of a table (kernels()) without a line."""
    reached = {tuple(line.split()) for line in lines}
    for row in rows:
        missing = [dtype for dtype in row.dtypes if (row.id, dtype) not in reached]
        if missing and (not any_dtype or len(missing) == len(row.dtypes)):
            yield row.id if any_dtype else f"{row.id} for {', '.join(missing)}"


def main(words):
    if len(words) not in (1, 2) or words[1:] not in ([], ["--any-dtype"]):
        print(__doc__, file=sys.stderr)
        return 2
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from _helpers import cuda_library
    from mamba_ssm._native import loader
    from mamba_ssm.utils import kernels

    if cuda_library.EMULATED is not None:
        loader.libraries["cuda"] = cuda_library.emulated_functions()
    with open(words[0], encoding="utf-8") as file:
        found = list(missed(kernels.kernels(), file, len(words) == 2))
    print(*(f"no test runs the kernel {one}" for one in found), sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
