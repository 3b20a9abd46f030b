"""Parts of the benchmark that as a whole need a GPU: modes, limits, tables, plot, on given figures and clocks."""

import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from _helpers.small_benchmark import FOLDER, load


@pytest.fixture
def flat(monkeypatch):
    """The benchmark's modules import each other as a script's."""
    monkeypatch.syspath_prepend(str(FOLDER))


def record(gpu, call, dry=False, **more):
    modes = {"gpu": gpu, "call": call}
    sides = {
        mode: {side: {"seconds": seconds, "dry": dry and mode == "gpu"} for side, seconds in times.items()}
        for mode, times in modes.items()
    }
    return {"case": "a case", "beside": "peer", "passes": {"fwd": sides}, "failed": {}, "limits": {}, **more}


def test_a_queue_that_ran_dry_is_host_bound_in_place_of_an_x(flat):
    comparison = load("comparison")
    limit = {"fwd": {"seconds": 0.5, "by": "exp"}}
    good = record({"ours": 1.0, "peer": 3.0}, {"ours": 2.0, "peer": 3.0}, limits=limit)
    dry = record({"ours": 1.0, "peer": 3.0}, {"ours": 2.0, "peer": 3.0}, dry=True, limits=limit)
    ((_, rows),) = comparison.tables("scan", [good, dry], "cuda", True)
    assert (rows[0]["GPU x"], rows[0]["call x"], rows[0]["limit"], rows[0]["of limit"]) == (3.0, 1.5, "exp", 0.5)
    assert (rows[1]["GPU x"], rows[1]["call x"], rows[1]["of limit"]) == ("host-bound", 1.5, "host-bound")
    assert all(len(line) <= 120 for line in load("table").table("scan", rows).splitlines())


def test_limits_are_the_work_over_what_the_machine_can_do(flat):
    comparison, kinds, layers = load("comparison"), load("kinds"), load("layer_kinds")
    ceilings = {"copy": 4.2e12, "exp": 4.18e12, "tensor": 8e14}
    scan = comparison.limits(kinds.Scan(8, 2048, 4096, 16), ceilings)
    assert scan["fwd"]["by"] == "exp" and scan["fwd"]["seconds"] == pytest.approx(0.257e-3, rel=0.01)
    assert kinds.Scan(8, 2048, 4096, 16).work("fwd").bytes / ceilings["copy"] == pytest.approx(0.13e-3, rel=0.05)
    ssd = comparison.limits(kinds.Ssd(8, 2048, 64, 64, 128), ceilings)
    assert ssd["fwd"]["by"] == "copy" and ssd["fwd"]["seconds"] == pytest.approx(0.064e-3, rel=0.1)
    assert kinds.Ssd(8, 2048, 64, 64, 128).work("fwd").flops == pytest.approx(43e9, rel=0.01)
    update = comparison.limits(kinds.Update(128, 0, 4096, 16, "float32"), ceilings)
    assert update["step"]["seconds"] == pytest.approx(2 * 128 * 4096 * 16 * 4 / 4.2e12)
    assert comparison.limits(layers.Train("Mamba2", 4, 2048), ceilings)["step"]["by"] == "tensor"
    # of the 24-layer model of width 768, 130 M parameters in bfloat16 read once: 62 us at 4.2 TB/s
    assert layers.Decode("Mamba2", 1).work("step").bytes == pytest.approx(260e6, rel=0.1)


def test_work_of_mamba3_counts_what_the_heads_share_once(flat):
    kinds, layers = load("kinds"), load("layer_kinds")
    siso, mimo = kinds.Mamba3Scan(8, 2048, 64), kinds.Mamba3Scan(8, 2048, 64, rank=4)
    # V, Z and the result; and, for all heads, Q and K, each of 128 states and 4 rows, of 2 bytes
    assert siso.work("fwd").bytes == pytest.approx(3 * 8 * 2048 * 4096 * 2, rel=0.1)
    assert mimo.work("fwd").bytes - siso.work("fwd").bytes == 8 * 2048 * 2 * 3 * 128 * 2
    assert mimo.work("bwd").flops == 4 * siso.work("bwd").flops == 12 * siso.work("fwd").flops
    assert kinds.Mamba3Step(128, 64).work("step").bytes == 2 * 128 * 64 * 64 * 128 * 2
    one, two = (layers.Bidirectional(layer, 8, 2048, 768).work("fwd") for layer in ("Mamba", "Mamba v2"))
    assert two.exponentials == 2 * one.exponentials and one.flops < two.flops < 1.2 * one.flops


def test_what_is_compared_with_ours_is_named_and_no_factor_against_the_peer(flat):
    comparison = load("comparison")
    times = {"ours": 4.0, "one way": 3.0}
    two_ways = record(times, times, beside="one way", limits={"fwd": {"seconds": 0.5, "by": "exp"}})
    for with_peer in (False, True):
        ((_, (row,)),) = comparison.tables("bidirectional", [two_ways], "cuda", with_peer)
        assert row["GPU one way ms"] == 3000 and row["GPU x"] == 0.75 and "GPU peer ms" not in row
        load("table").table("title", [row])
    plot, sections = load("plot"), {"bidirectional": {"records": [two_ways]}}
    assert plot.lines_of_results(sections, True) == []
    assert plot.lines_of_results(sections, False) == [("bidirectional", "a case", "fwd", {"gpu": 0.125})]


def test_memory_of_a_training_step_is_a_table_of_its_own(flat):
    comparison = load("comparison")
    memory = {"ours": {"kept": 80.0, "peak": 120.0}, "peer": {"kept": 100.0, "peak": 100.0}}
    given = {"case": "a case", "beside": "peer", "passes": {"memory": {"memory": memory}}, "failed": {}, "limits": {}}
    ((title, (row,)),) = comparison.tables("block", [given], "cuda", True)
    assert title == "block: memory of a training step"
    assert (row["kept ours / peer"], row["peak ours / peer"]) == (0.8, 1.2)
    load("table").table(title, [row])


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_plot(flat, tmp_path, ending):
    pytest.importorskip("matplotlib")
    plot = load("plot")
    limits = {"fwd": {"seconds": 0.5, "by": "exp"}}
    fast = {**record({"ours": 1.0, "peer": 3.0}, {"ours": 2.0, "peer": 3.0}, limits=limits), "case": "B8 L64"}
    dry = {**record({"ours": 1.0, "peer": 3.0}, {"ours": 2.0, "peer": 3.0}, dry=True), "case": "B1 L64"}
    sections = {"scan": {"records": [fast, dry]}, "ssd": {"records": [dry]}, "transformers": {"rows": []}}
    lines = plot.lines_of_results(sections, True)
    assert plot.bars(lines) == [("Mamba scan, forward", "gpu", 3.0), ("Mamba-2 scan, forward", "call", 1.5)]
    assert plot.bars(plot.lines_of_results(sections, False)) == [("Mamba scan, forward", "gpu", 0.5)]
    file = tmp_path / f"speed.{ending}"
    plot.draw(file, lines, "title")
    assert file.read_bytes()[:5] in (b"<?xml", b"\x89PNG\r")


def test_the_picture_of_the_docs_shows_their_tables(flat, request):
    """At most 12 bars, each in words and with the table's figure, on a background of its own."""
    plot, docs = load("plot"), request.config.rootpath / "docs"
    bars = plot.bars(plot.lines_of_page((docs / "benchmarks.md").read_text(encoding="utf-8")))
    assert len(bars) == 12
    picture = (docs / "speed.svg").read_text(encoding="utf-8")
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", picture)
    for words, _, value in bars:
        assert words in texts and f"{value:.2f}" in texts
    assert "times as fast as upstream" in texts and not any("peer" in text for text in texts)
    assert 'style="fill: #ffffff"' in picture.split("axes_1")[0]


def test_a_table_of_long_headings_stays_narrow_and_needs_every_column_explained():
    module = load("table")
    columns = [name for name in module.EXPLANATIONS if name.endswith(("ms", " x"))][:10]
    row = {"case": "B1 L131072 D4096 N16 bfloat16", **dict.fromkeys(columns, 1234.5)}
    text = module.table("title", [row])
    assert len("  ".join(row)) > 120 and max(map(len, text.splitlines())) <= 120, text
    lines = module.markdown("title", [row]).splitlines()
    assert lines[0] == "## title" and len({line.count("|") for line in lines[2:]}) == 1 and "1234" in lines[-1]
    with pytest.raises(KeyError, match="unheard"):
        module.table("title", [{"case": "", "unheard of": 1}])


def test_a_training_step_has_the_gpus_time_beside_the_wall_clocks_and_tokens_a_second(flat):
    comparison, layers = load("comparison"), load("layer_kinds")
    case = layers.Train("Mamba3", 4, 2048, mode="captured")
    assert case.measurements("cuda") == [("memory", "memory"), ("step", "call"), ("step", "busy")]
    assert case.measurements("cpu") == [("step", "call")]
    times = {mode: {"ours": {"seconds": seconds, "dry": False}} for mode, seconds in (("busy", 0.03), ("call", 0.04))}
    given = {"case": case.name, "beside": "peer", "passes": {"step": times}, "failed": {}}
    given |= {"limits": {"step": {"seconds": 0.015, "by": "tensor"}}, "tokens of a step": case.tokens_of_step}
    given["passes"]["memory"] = {"memory": {"ours": {"kept": None, "peak": 120.0}}}
    (_, (row,)), (_, (memory,)) = comparison.tables("train", [given], "cuda", False)
    assert (row["GPU ours ms"], row["call ours ms"], row["of limit"]) == pytest.approx((30, 40, 0.5))
    assert row["ours tokens/s"] == pytest.approx(4 * 2048 / 0.04)
    assert (memory["kept ours MB"], memory["peak ours MB"]) == (None, 120.0)
    for title, shown in (("train", row), ("memory", memory)):
        load("table").table(title, [shown])


@pytest.fixture
def training(flat, monkeypatch):
    """prepare of a small training step, its compiler and its graph replaced by what works on any CPU."""
    train, layers, side = load("problems/train"), load("layer_kinds"), load("side")
    compiler = torch.compile
    monkeypatch.setattr(train.torch, "compile", lambda function, mode: compiler(function, backend="aot_eager"))

    def captured(step, replayed=None):
        for _ in range(train.WARM_UP):
            step()
        call = replayed or (lambda: step())
        call.pool_bytes = 5e6
        return call

    monkeypatch.setattr(train, "captured", captured)
    monkeypatch.setattr(train.torch.optim, "AdamW", lambda parameters, lr, **_: torch.optim.Adam(parameters, lr))

    def prepare(mode):
        return train.prepare(layers.Train("Mamba2", 2, 16, 64, 1, mode), "cpu", side.Side())

    prepare.train, prepare.captured = train, captured
    return prepare


@pytest.mark.parametrize("mode", ["compiled", "reduce-overhead", "captured"])
def test_a_training_step_of_each_mode_is_compared_with_eager_ones(training, mode):
    calls = training(mode)
    first, second = (calls["step"][0]() for _ in range(2))
    assert second < first
    if mode == "captured":
        assert calls["memory"]() == {"kept": None, "peak": 5.0}


def test_a_replay_that_trains_nothing_is_refused(training, monkeypatch):
    value = torch.tensor(10.8)
    monkeypatch.setattr(training.train, "captured", lambda step: training.captured(step, lambda: value))
    with pytest.raises(Exception, match="losses of steps: relative error"):
        training("captured")


def test_the_gpu_is_busy_where_any_kernel_runs(flat, monkeypatch):
    timing = load("timing")
    assert timing.covered([(5, 7), (0, 2), (1, 3), (1, 2), (7, 8)]) == pytest.approx(6e-6)
    cuda, cpu = timing.DeviceType.CUDA, timing.DeviceType.CPU

    def event(start, end, kind=cuda, name="kernel", **more):
        return SimpleNamespace(time_range=SimpleNamespace(start=start, end=end), device_type=kind, name=name, **more)

    events = [event(0, 1000), event(3000, 4000), event(0, 9000, cpu), event(0, 9000, name="Optimizer.step#AdamW.step")]
    events.append(event(0, 9000, is_user_annotation=True))
    found = nullcontext(SimpleNamespace(events=lambda: events))
    monkeypatch.setattr(timing.torch.profiler, "profile", lambda activities: found)
    SimulatedGpu().install(monkeypatch, timing)
    watch = timing.Stopwatch([lambda: None], "busy", "cuda")
    watch.whole = 1e-3
    assert watch.times(5) == ([pytest.approx(2e-3)] * timing.PROFILED, False)
    events.clear()
    with pytest.raises(RuntimeError, match="recorded no kernels"):
        watch.times(5)


class SimulatedGpu:
    """A clock, and a GPU that works through its queue while the host goes on; the only time is what it is told."""

    def __init__(self):
        self.now = self.free = 0.0

    def call(self, host, gpu, waits=False):
        """A call that takes so many seconds of the host, then of the GPU; waits: the host waits for the GPU in it."""

        def run():
            self.now += host
            self.queue(gpu)
            if waits:
                self.synchronize()

        return run

    def queue(self, seconds):
        self.free = max(self.free, self.now) + seconds

    def synchronize(self):
        self.now = max(self.now, self.free)

    def install(self, monkeypatch, timing):
        gpu = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = max(gpu.free, gpu.now)

            def query(self):
                return gpu.now >= self.at

            def synchronize(self):
                gpu.now = max(gpu.now, self.at)

            def elapsed_time(self, stop):
                return (stop.at - self.at) * 1e3

        monkeypatch.setattr(timing.torch.cuda, "Event", Event)
        monkeypatch.setattr(timing.torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(timing.torch.cuda, "_sleep", lambda cycles: self.queue(cycles / timing.SLEEP_CYCLES))
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)


@pytest.mark.parametrize("host", [20e-6, 5e-3], ids=["fast_host", "slow_host"])
@pytest.mark.parametrize("gpu", [5e-6, 2e-3], ids=["short_call", "long_call"])
def test_gpu_mode_leaves_the_hosts_time_out_and_call_mode_holds_it(flat, monkeypatch, host, gpu):
    timing, simulated = load("timing"), SimulatedGpu()
    simulated.install(monkeypatch, timing)
    call = simulated.call(host, gpu)
    for mode, expected in (("gpu", gpu), ("call", host + gpu), ("tokens", host + gpu)):
        seconds, dry = timing.Stopwatch([call], mode, "cuda").times(5)
        assert seconds == pytest.approx([expected] * 5) and not dry, mode


def test_a_call_that_waits_for_the_gpu_is_host_bound(flat, monkeypatch):
    timing, simulated = load("timing"), SimulatedGpu()
    simulated.install(monkeypatch, timing)
    assert timing.Stopwatch([simulated.call(1e-4, 1e-4, waits=True)], "gpu", "cuda").times(3)[1]


def test_a_long_call_is_repeated_less(flat, monkeypatch):
    timing, simulated = load("timing"), SimulatedGpu()
    simulated.install(monkeypatch, timing)
    assert len(timing.Stopwatch([simulated.call(0.0, 0.3)], "call", "cuda").times(20)[0]) == 3
    assert len(timing.Stopwatch([simulated.call(0.0, 7.0)], "call", "cuda").times(20)[0]) == 1


def test_a_factor_widens_the_rule_for_errors_and_no_further(flat):
    validate = load("validate")
    exact = torch.ones(1000, dtype=torch.float64)
    off = exact + 2e-2 * torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(500)
    validate.check("a", off, exact, torch.bfloat16, factor=5.0)
    with pytest.raises(validate.Mismatch, match=r"a: rms error 2.00e-02 \(limit 1e-02\)"):
        validate.check("a", off, exact, torch.bfloat16, factor=2.0)
