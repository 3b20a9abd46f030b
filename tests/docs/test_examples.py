"""The examples run as typed, shorter than by default, and do what they say."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]


def run(name, *words, launcher=()):
    """What an example prints, on one thread: torch's own threads wait for each other on a busy machine."""
    command = [sys.executable, *launcher, str(ROOT / "examples" / name), *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_train_language_model(tmp_path):
    (tmp_path / "text").write_text("All models are wrong, some are useful. " * 20)
    printed = run("train_language_model.py", tmp_path / "text", "--steps", 12, "--plot", tmp_path / "loss.svg")
    first, last = map(float, re.search(r"loss: ([\d.]+) at first, ([\d.]+) at last", printed).groups())
    assert last < first < 6  # an even guess among 256 bytes has 5.5
    assert printed.split("loss.svg\n\n")[1].startswith("The wheel ")
    assert xml.etree.ElementTree.parse(tmp_path / "loss.svg").getroot().tag.endswith("svg")


def test_classify_sequences():
    printed = run("classify_sequences.py", "--steps", 12)
    assert float(re.search(r"all +([\d.]+)% right of 1000", printed)[1]) > 30  # a guess has 25


def test_classify_images():
    printed = run("classify_images.py", "--steps", 40)
    assert float(re.search(r"([\d.]+)% right of 1000", printed)[1]) > 18  # a guess has 10


def test_stream_audio():
    printed = run("stream_audio.py", "--seconds", 8)
    assert [float(at) for at in re.findall(r"beep at +([\d.]+) s", printed)] == [2.0, 5.7]
    assert "2 beeps found, 2 made" in printed


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="this torch is built without gloo")
@pytest.mark.parametrize("options", [(), ("--context", 2, "--checkpoint")], ids=["ddp", "context"])
def test_train_on_several_devices(options):
    launcher = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    printed = run("train_on_several_devices.py", "--steps", 12, *options, launcher=launcher)
    assert printed.startswith("1 x 2" if options else "2 x 1")
    first, last = map(float, re.search(r"loss: ([\d.]+) at first, ([\d.]+) at last", printed).groups())
    assert last < first < 4  # an even guess among 16 tokens has 2.8
