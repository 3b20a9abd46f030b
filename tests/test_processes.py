"""Threads and processes: calls from many Python threads, native threads, and children forked after use."""

import multiprocessing
import sys
import threading

import pytest
import torch
from _helpers.cases import SCAN_CASES, ConvCase, ScanCase, case_id, outputs_and_gradients

from mamba_ssm import Mamba
from mamba_ssm.ops.causal_conv1d import causal_conv1d_fn
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn


def scan(**tensors):
    return selective_scan_fn(**tensors, delta_softplus=True, return_last_state=True)


@pytest.mark.parametrize("case", [*SCAN_CASES[-3:], ScanCase(1, 500, 100, groups=5), ScanCase(7, 30, 300)], ids=case_id)
def test_native_threads_change_nothing(case):
    tensors = case.inputs(torch.float32, "cpu")
    one = outputs_and_gradients(scan, tensors)
    conv = ConvCase(case.batch, case.dim, case.seqlen).inputs(torch.float32, "cpu")
    conv_one = outputs_and_gradients(causal_conv1d_fn, conv)
    for count in (2, 3, 16):
        torch.set_num_threads(count)
        for name, value in outputs_and_gradients(scan, tensors).items():
            torch.testing.assert_close(value, one[name], rtol=1e-4, atol=1e-4)
        for name, value in outputs_and_gradients(causal_conv1d_fn, conv).items():
            torch.testing.assert_close(value, conv_one[name], rtol=1e-4, atol=1e-4)


def test_python_threads(device):
    tensors = ScanCase(2, 32, 200).inputs(torch.float32, device)
    expected = outputs_and_gradients(scan, tensors)
    failures = []

    def work():
        try:
            for _ in range(5):
                for name, value in outputs_and_gradients(scan, tensors).items():
                    torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-4)
                with pytest.raises(TypeError, match="delta must have the dtype"):
                    scan(**{**tensors, "delta": tensors["delta"].half()})
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def scan_in_child(tensors, queue):
    torch.set_num_threads(2)  # for our kernels; torch's own OpenMP threads do not survive a fork
    out = scan(**tensors)[0]
    torch.set_num_threads(1)
    queue.put(out.double().sum().item())


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
def test_fork_after_use():
    tensors = ScanCase(4, 64, 300).inputs(torch.float32, "cpu")
    torch.set_num_threads(4)
    expected = scan(**tensors)[0].double().sum().item()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    children = [context.Process(target=scan_in_child, args=(tensors, queue)) for _ in range(2)]
    for child in children:
        child.start()
    try:
        results = [queue.get(timeout=60) for _ in children]
    finally:
        for child in children:
            child.join(10)
            child.kill()
    assert results == pytest.approx([expected] * 2, rel=1e-6)


class Scanned(torch.utils.data.Dataset):
    """Items that a worker computes with the kernels."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return scan(**ScanCase(1, 16, 100).inputs(torch.float32, "cpu", seed=index))[0]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
def test_dataloader_workers_after_use():
    dataset = Scanned()
    expected = torch.cat([dataset[i] for i in range(6)])
    batches = torch.utils.data.DataLoader(
        dataset, batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=60
    )
    found = torch.cat([batch.flatten(0, 1) for batch in batches])
    torch.testing.assert_close(found, expected)


def test_training_in_a_thread(device):
    module = Mamba(16).to(device)
    result = []

    def work():
        module(torch.randn(2, 70, 16, device=device)).sum().backward()
        result.append(module.in_proj.weight.grad.isfinite().all().item())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert result == [True]
