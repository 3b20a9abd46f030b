"""Measures the package on this machine, and beside it another package with the same import paths.

python scripts/benchmark [--device cuda|cpu] [--peer DIR[:DIR]] [--only scan,block]
    [--json FILE] [--markdown FILE] [--plot FILE.svg] [--without OP/KERNEL,...] [--threads 1,2]

The peer is what is found first on that import path: upstream's mamba_ssm and causal_conv1d, or another version of this
package. Both sides run in turns, each in its own process, on the same inputs, in two modes: GPU keeps the GPU's queue
full, so that only its own time counts; call finds the GPU idle, so that the host's time counts too. Every result is
compared with a float64 reference before it is timed; a wrong one of ours is exit code 1. No figures of another day or
machine take part. On a CPU without --peer the comparison is with plain torch, in the same run; --only decode also
compares with llama.cpp where xllamacpp and gguf are installed.
"""

import argparse
import importlib
import importlib.util
import json
import os
import sys
import time
import traceback

import beside_llama_cpp
import cases
import comparison
import progress
import torch
from side import PACKAGES, installed
from sides import Failed, Sides
from table import cell, explanations, markdown, table

# Sections with a comparison and a table of their own, and their modules.
BESIDE_PLAIN_TORCH = {
    "plain-scan": "plain_scan",
    "plain-ssd": "plain_ssd",
    "plain-mamba3": "plain_mamba3",
    "plain-block": "plain_block",
    "transformers": "transformers_section",
}
SECTIONS = {
    "cuda": (*cases.CASES["cuda"], "transformers"),
    "cpu": (*cases.CASES["cpu"], *BESIDE_PLAIN_TORCH),
}


def parse(arguments):
    description, _, rest = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python scripts/benchmark",
        description=description,
        epilog=rest.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=tuple(SECTIONS), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--peer", metavar=f"DIR[{os.pathsep}DIR]", help="where the other package lies")
    names = ", ".join(dict.fromkeys(sum(SECTIONS.values(), ())))
    parser.add_argument("--only", metavar="SECTION,...", help=f"these sections: {names}")
    parser.add_argument("--quick", action="store_true", help="the first case of each section, few repetitions")
    parser.add_argument(
        "--without",
        metavar="OP/KERNEL,...",
        default="",
        help="kernels that our calls pass over; with this package as --peer too, what they are worth "
        "(`python -m mamba_ssm --kernels` lists them)",
    )
    parser.add_argument("--limit", type=float, default=120.0, metavar="SECONDS", help="of one step of a case (120)")
    parser.add_argument(
        "--threads",
        metavar="N,...",
        default="1,2",
        help="numbers of threads for the comparison with llama.cpp (1,2)",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    parser.add_argument("--markdown", metavar="FILE", help="also write the tables there")
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="also draw up to 12 of the cases there, as .svg or .png (needs matplotlib)",
    )
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device")
    options.peer = _peer(parser, options.peer)
    if not all(number.isdecimal() and int(number) for number in options.threads.split(",")):
        parser.error(f"--threads: positive integers with commas between, got {options.threads!r}")
    options.sections = _sections(parser, options)
    if options.plot and not options.plot.endswith((".svg", ".png")):
        parser.error(f"--plot: the file must end in .svg or .png, got {options.plot}")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error('--plot needs matplotlib: pip install matplotlib, or "mamba_ssm[plot]"')
    return options


def _peer(parser, value):
    """The peer's folders, in which one of its packages must lie."""
    if value is None:
        return []
    folders = [os.path.abspath(folder) for folder in value.split(os.pathsep)]
    for folder in folders:
        if not os.path.isdir(folder):
            parser.error(f"--peer: {folder} is no folder")
    if not installed(folders):
        parser.error(f"--peer: neither {' nor '.join(PACKAGES)} lies in {os.pathsep.join(folders)}")
    return folders


def _sections(parser, options):
    available = SECTIONS[options.device]
    if options.only:
        for name in options.only.split(","):
            if name not in available:
                parser.error(f"--only: on {options.device} the sections are {', '.join(available)}, got {name!r}")
        return options.only.split(",")
    if options.device == "cuda":
        chosen = list(available)
    else:
        chosen = list(cases.CASES["cpu"] if options.peer else BESIDE_PLAIN_TORCH)
    if "transformers" in chosen and importlib.util.find_spec("transformers") is None:
        chosen.remove("transformers")
        print("transformers is not installed: its section is left out")
    return chosen


def _measure(name, options, sides, machine, found, save):
    """(a section's tables, why a side failed where); `found` becomes the JSON's of it, saved after each case."""
    if name in BESIDE_PLAIN_TORCH:
        found["rows"] = importlib.import_module(BESIDE_PLAIN_TORCH[name]).measure(options.device)
        return [(name, found["rows"])], []
    if options.device == "cuda" and "ceilings" not in machine:
        machine["ceilings"] = sides.ours.ask("this machine's limits", "ceilings")
    section = cases.CASES[options.device][name]
    records = found["records"] = []
    for record in comparison.section(sides, section, options.device, machine.get("ceilings", {}), options.quick):
        records.append(record)
        save()
    failed = [(record["case"], side, why) for record in records for side, why in record["failed"].items()]
    progress.clear()
    print(*comparison.kernels(records), sep="\n")
    tables = comparison.tables(name, records, options.device, bool(options.peer))
    if name == "decode" and options.device == "cpu" and not options.peer:
        if not beside_llama_cpp.installed():
            print("llama.cpp (xllamacpp, gguf) is not installed: the comparison with it is left out")
        elif not options.quick:
            found["llama.cpp"] = beside_llama_cpp.measure([int(number) for number in options.threads.split(",")])
            tables.append(("decode beside llama.cpp", found["llama.cpp"]))
    return tables, failed


def _described(facts, words):
    """A side's packages in words, such as "{name} {version} in {folder}"."""
    packages = facts["packages"].items()
    return ", ".join(what.get("error") or words.format(name=name, **what) for name, what in packages)


def _start(sides, machine):
    """Start the processes, and say what is compared on what."""
    progress.section("start")
    for side in sides.all:
        side.start()
        machine[side.name] = side.facts
        progress.clear()
        print(f"{side.name}: {_described(side.facts, '{name} {version} in {folder}')}")
    facts = [{key: value for key, value in machine[side.name].items() if key != "packages"} for side in sides.all]
    print(", ".join(f"{key} {value}" for key, value in facts[0].items()))
    if facts[-1] != facts[0]:
        print(f"the peer differs: {', '.join(f'{key} {value}' for key, value in facts[-1].items())}")


def _limits(machine):
    ceilings = ", ".join(f"{by} {cell(value * 1e-9)} G" for by, value in machine["ceilings"].items())
    return f"this machine's limits, a second: {ceilings}"


def main(arguments=None):
    options = parse(arguments)
    machine = {"device": options.device}
    results, explained, wrong = {"machine": machine, "sections": {}}, {}, False
    written = []  # in Markdown

    def save():
        """Write the JSON: after each case, so that a run that is cut off leaves what it has."""
        if options.json:
            with open(options.json, "w", encoding="utf-8") as file:
                json.dump(results, file, indent=2)

    with Sides(options.device, options.peer, options.limit, options.without) as sides:
        try:
            _start(sides, machine)
        except Failed as error:
            progress.clear()
            sys.exit(f"a process did not start: {error}")
        title = [machine["ours"].get("machine", options.device)]
        title = "; ".join(title + [f"{side.name}: {_described(side.facts, '{name} {version}')}" for side in sides.all])
        for name in options.sections:
            start = time.perf_counter()
            progress.section(name)
            found = results["sections"][name] = {}
            try:
                shown, failed = _measure(name, options, sides, machine, found, save)
            except Exception:  # the other sections' figures are still wanted
                found["error"] = traceback.format_exc()
                shown, failed = [], [(name, "ours", found["error"])]
            found["seconds"] = time.perf_counter() - start
            save()
            wrong = wrong or any(side != "peer" for _, side, _ in failed)
            progress.clear()
            for heading, rows in shown:
                timed = f"{heading} ({found['seconds']:.0f} s)"
                print(f"\n{table(timed, rows, explained)}", flush=True)
                written.append(markdown(heading, rows))
            for case, side, why in failed:
                print(f"\n{case}: {side}: {why}", flush=True)
                written.append(f"{case}: {side}: {why.splitlines()[-1]}")
            if options.markdown:
                limits = [_limits(machine)] if "ceilings" in machine else []
                with open(options.markdown, "w", encoding="utf-8") as file:
                    text = f"# {title}", *limits, *written, "## Columns", explanations(explained)
                    print(*text, sep="\n\n", file=file)
    if "ceilings" in machine:
        print(f"\n{_limits(machine)}")
    if options.plot:
        import plot

        plot.draw(
            options.plot, plot.lines_of_results(results["sections"], bool(options.peer)), title, bool(options.peer)
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
