"""python -m mamba_ssm.gguf: a checkpoint's folder to a GGUF file, and back."""

import argparse
import sys

from mamba_ssm.gguf.export import TYPES, export_folder
from mamba_ssm.gguf.load import import_file


def main(arguments: list[str] | None = None) -> None:
    """Runs the command; ends the process with the message of an error that a user can cure."""
    parser = argparse.ArgumentParser(prog="python -m mamba_ssm.gguf", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("export", help="write a GGUF file, which llama.cpp runs")
    export.add_argument("folder", help="with config.json and weights, or a repository of the Hugging Face hub")
    export.add_argument("file")
    export.add_argument("--type", choices=TYPES, help="of the large weights; by default as they are")
    load = commands.add_parser("import", help="read a GGUF file of architecture mamba or mamba2")
    load.add_argument("file")
    load.add_argument("folder", help="to make, for MambaLMHeadModel.from_pretrained")
    given = parser.parse_args(arguments)
    try:
        if given.command == "export":
            print(export_folder(given.folder, given.file, type=given.type))
        else:
            print(import_file(given.file, given.folder))
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
