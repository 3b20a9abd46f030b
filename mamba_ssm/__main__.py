"""`python -m mamba_ssm`: the doctor. Says what is installed, whether it fits this machine, and whether it computes.

Exit code 0: the files are those that were installed, and every device that torch can use works with this package.
1: something is wrong, and the verdict says what and what to do; or the report could not be written. Where Python finds
another mamba_ssm first, or this file is missing, `python -m mamba_ssm_doctor` does the same.
"""

import sys


def main(arguments: list[str] | None = None) -> int:
    try:
        from mamba_ssm._doctor import command
    except Exception as error:
        print(
            f"problem     the doctor cannot start: {error}. Its own files are missing or of another version. "
            "Reinstall mamba_ssm."
        )
        return 1
    return command.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
