"""The examples print what their page shows, run shorter than by default, and refuse wrong arguments."""

import importlib
import os
import random
import re
import runpy
import struct
import subprocess
import sys
import xml.etree.ElementTree
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from _helpers import programs

from mamba_ssm import MambaLMHeadModel
from mamba_ssm.gguf import export_model
from mamba_ssm.models.config_mamba import MambaConfig

ROOT = Path(__file__).resolve().parents[2]


# Torch's own threads wait for each other on a busy machine. The docs' output is a CPU's, and there may be fewer GPUs
# than processes.
WITHOUT_GPU = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch is built without gloo"
)


def run(name, *words, status=0):
    """What an example prints, on one thread; its last line on stderr where it fails."""
    done = programs.run_script(ROOT / "examples" / name, *words)
    assert done.returncode == status, done.stderr
    if status:
        assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1] if status else done.stdout


# ---- what docs/examples.md shows ------------------------------------------------------------------------------------

SHOWN = re.findall(r"```bash\n([^\n]+)\n```\n\n```text\n(.*?)```", (ROOT / "docs/examples.md").read_text("utf-8"), re.S)
NUMBER = re.compile(r"\d+\.?\d*(?:e[+-]\d+)?")
PROCESSOR_SECONDS = 45  # the page says half a minute; some machines are slower


def test_every_example_is_shown():
    shown = {re.search(r"examples/(\w+\.py)", command)[1] for command, _ in SHOWN}
    assert shown == {path.name for path in (ROOT / "examples").glob("*.py")}


@pytest.mark.slow
@needs_gloo
@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=lambda text: text.split()[1] if "\n" not in text else "")
def test_output_is_what_the_page_shows(command, shown, tmp_path):
    """Words as typed, numbers within 5 % or 0.05: training magnifies the rounding of another CPU or torch.

    Not compared are what a model wrote, which is below an empty line, and a speed.
    """
    words = command.replace("examples/", f"{ROOT.as_posix()}/examples/").split()
    launcher = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}[words[0]]
    before = _children_seconds()
    done = subprocess.run(
        [*launcher, *words[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=600, env=WITHOUT_GPU
    )
    assert done.returncode == 0, done.stderr
    assert _children_seconds() - before < PROCESSOR_SECONDS
    printed, expected = (
        re.sub(r"[\d.]+ (times as fast|tokens a second)", "", text.split("\n\n")[0]) for text in (done.stdout, shown)
    )
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", expected).split()
    pairs = list(zip(map(float, NUMBER.findall(printed)), map(float, NUMBER.findall(expected)), strict=True))
    assert all(abs(now - then) <= max(0.05, 0.05 * then) for now, then in pairs), done.stdout
    assert ("\n\n" in done.stdout) == ("\n\n" in shown)


def _children_seconds():
    times = os.times()
    return times.children_user + times.children_system


# ---- shorter runs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_train_language_model(tmp_path, ending):
    pytest.importorskip("matplotlib")
    (tmp_path / "text").write_text("All models are wrong, some are useful. " * 20)
    plot = tmp_path / f"loss.{ending}"
    printed = run("train_language_model.py", tmp_path / "text", "--steps", 12, "--plot", plot, "--prompt", "All ")
    first, last = map(float, re.search(r"loss: ([\d.]+) at first, ([\d.]+) at last", printed).groups())
    assert last < first < 6  # an even guess among 256 bytes has 5.5
    assert printed.split(f"loss.{ending}\n\n")[1].startswith("All ")
    assert "sentences" not in printed  # that is for its own text
    if ending == "svg":
        picture = plot.read_text("utf-8")
        assert xml.etree.ElementTree.fromstring(picture).tag.endswith("svg")
        assert len(re.findall(r">\d<", picture)) >= 4  # ticks of the loss


@pytest.mark.gpu
def test_a_captured_step_trains_the_language_model(cuda):
    printed = run("train_language_model.py", "--steps", 100, "--graph")
    first, last = map(float, re.search(r"loss: ([\d.]+) at first, ([\d.]+) at last", printed).groups())
    assert last < 0.5 * first


def test_what_a_graph_would_replay_trains_with_batches_and_rates_in_place(monkeypatch):
    """captured in a stand-in: each call must read the step's two tensors anew, and give its loss in the same tensor."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module("train_language_model")
    loss = torch.zeros(())

    def captured(step):
        return lambda: loss.copy_(step())

    monkeypatch.setattr(example, "captured", captured)
    config = example.MambaConfig(d_model=16, n_layer=1, vocab_size=256, ssm_cfg={"layer": "Mamba2", "headdim": 16})
    found = []
    for graph in (False, True):
        torch.manual_seed(0)
        found.append(example.train(example.MambaLMHeadModel(config), example.read([]), 4, graph))
    assert found[0] == found[1] and found[0][3] < found[0][0]


def test_the_language_model_judges_its_own_sentences(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module("train_language_model")
    choose = random.Random(1).choice
    made = [example.sentence(choose) for _ in range(200)]
    assert len(set(made)) > 150 and all(map(example.is_right, made))
    assert example.is_right("The old boats near the river wait.")
    for wrong in (
        "The old boats near the river waits.",
        "The boat near the rivers wait.",
        "The oar near the river waits.",
    ):
        assert not example.is_right(wrong)
    assert bytes(example.read([]).tolist()).decode().startswith(example.sentence(random.Random(0).choice))


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("train_language_model.py", ["--steps", 0], "--steps must be at least 1, got 0"),
        ("train_language_model.py", ["--graph"], "--graph needs an NVIDIA GPU"),
        ("train_language_model.py", ["--prompt", ""], "--prompt must not be empty"),
        ("train_language_model.py", ["no such file"], "No such file or directory: 'no such file'"),
        ("train_language_model.py", [os.devnull], "the text has 0 bytes; it takes more than 129"),
        ("train_language_model.py", ["--plot", "loss.pdf"], "the file must end in .svg or .png, got loss.pdf"),
        ("train_language_model.py", ["--plot", "no/folder/loss.svg"], "no/folder/loss.svg cannot be written"),
        ("classify_sequences.py", ["--steps", 0], "--steps must be at least 1, got 0"),
        ("classify_images.py", ["--steps", -1], "--steps must be at least 1, got -1"),
        ("draw_attention.py", ["--steps", 0], "--steps must be at least 1, got 0"),
        ("draw_attention.py", ["--draw", "map.jpg"], "the file must end in .png, got map.jpg"),
        ("draw_attention.py", ["--draw", "no/folder/map.png"], "no/folder/map.png cannot be written"),
        ("stream_audio.py", ["--seconds", 2], "--seconds must be at least 3, got 2"),
        ("train_on_several_devices.py", [], "start it with torchrun"),
        ("generate_text.py", ["--tokens", 1], "--tokens must be at least 2, got 1"),
        ("generate_text.py", ["--threads", 0], "--threads must be at least 1, got 0"),
        ("generate_text.py", ["--prompt", ""], "--prompt must not be empty"),
        ("generate_text.py", ["--top-k", -1], "top_k must be an integer, 0 (off) or more, got -1"),
        ("generate_text.py", ["./no-such-folder"], "there is no folder './no-such-folder'"),
        ("generate_text.py", ["no-such.gguf"], "there is no file 'no-such.gguf'"),
    ],
)
def test_a_wrong_argument_gets_one_line_before_anything_is_trained(name, words, message, monkeypatch, capsys):
    if ".svg" in message:
        pytest.importorskip("matplotlib")
    if "GPU" in message and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
    with pytest.raises(SystemExit) as ended:  # in this process: another one takes seconds to import torch
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_generate_text(tmp_path):
    model = MambaLMHeadModel(MambaConfig(d_model=32, n_layer=1, vocab_size=300, ssm_cfg={"layer": "Mamba1"}))
    model.save_pretrained(tmp_path)
    words = "--tokens", 4, "--prompt", "7 299", "--top-k", 1
    printed = run("generate_text.py", tmp_path, *words, "--quantize", "--threads", 1)
    assert re.search(
        r"as int8: 0\.\d MB\n4 tokens behind a prompt of 2, \d+ tokens a second\n\n7 299( \d+){4}\n", printed
    )
    refused = run("generate_text.py", tmp_path, status=2)
    assert "the model has no tokenizer: --prompt must be numbers of tokens, got 'Once upon a time'" in refused
    pytest.importorskip("gguf")
    export_model(model, tmp_path / "model.gguf")
    again = run("generate_text.py", tmp_path / "model.gguf", *words)
    assert again.split("\n\n")[1] == run("generate_text.py", tmp_path, *words).split("\n\n")[1]


@pytest.mark.parametrize("name", ["classify_sequences.py", "classify_images.py"])
def test_one_step(name):
    assert "right of 1000" in run(name, "--steps", 1)


def test_classify_sequences():
    printed = run("classify_sequences.py", "--steps", 12)
    assert float(re.search(r"all +([\d.]+)% right of 1000", printed)[1]) > 30  # a guess has 25


def test_classify_images():
    printed = run("classify_images.py", "--steps", 60)
    assert float(re.search(r"([\d.]+)% right of 1000", printed)[1]) > 18  # a guess has 10


def test_stream_audio():
    printed = run("stream_audio.py", "--seconds", 8)
    assert [float(at) for at in re.findall(r"beep at +([\d.]+) s", printed)] == [2.0, 5.7]
    assert "2 beeps found, 2 made" in printed


def test_draw_attention(tmp_path):
    printed = run("draw_attention.py", "--steps", 2, "--draw", tmp_path / "map.png")
    shares = [int(share) for share in re.findall(r"head \d: (\d+)% of what", printed)]
    assert len(shares) == 4 and all(0 <= share <= 100 for share in shares)
    picture = (tmp_path / "map.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", picture[16:24])
    at = picture.index(b"IDAT")
    lines = zlib.decompress(picture[at + 4 : at + 4 + struct.unpack(">I", picture[at - 4 : at])[0]])
    rows = [lines[first + 1 : first + 1 + width] for first in range(0, len(lines), width + 1)]
    assert len(rows) == height == width and rows[0][-1] == 255 and min(map(min, rows)) == 0  # causal, and scaled


@needs_gloo
@pytest.mark.parametrize("options", [(), ("--context", 2, "--checkpoint")], ids=["ddp", "context"])
def test_train_on_several_devices(options):
    script, words = ROOT / "examples/train_on_several_devices.py", ("--steps", 12, *options)
    ranks = programs.run_ranks(script, 2, *words, environ=WITHOUT_GPU)
    assert [rank.returncode for rank in ranks] == [0, 0], [rank.stderr for rank in ranks]
    printed = "".join(rank.stdout for rank in ranks)
    assert printed.startswith("1 x 2" if options else "2 x 1")
    first, last = map(float, re.search(r"loss: ([\d.]+) at first, ([\d.]+) at last", printed).groups())
    assert last < first < 4  # an even guess among 16 tokens has 2.8


@needs_gloo
def test_processes_that_cannot_share_a_sequence():
    as_torchrun = {**WITHOUT_GPU, "TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "1"}
    done = programs.run_script(ROOT / "examples/train_on_several_devices.py", "--context", 3, environ=as_torchrun)
    assert done.returncode == 2
    assert "--context must divide the 1 processes and the length 32, got 3" in done.stderr
