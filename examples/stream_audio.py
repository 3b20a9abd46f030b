"""Finds beeps in a noisy stream of sound, chunk by chunk as it would come from a microphone, with SelectiveScan.

    python examples/stream_audio.py [--seconds 60]

The scan follows the sound's loudness with two time constants. A beep begins where the fast one rises above the slow
one. Nothing is trained: this shows how a stream carries its state, and that chunks give the same result as one call.
"""

import argparse
import time

import torch

from mamba_ssm.ops.streaming import SelectiveScan

RATE, CHUNK = 16000, 320  # samples a second; a chunk is 20 ms
TIMES = (0.02, 1.0)  # time constants of the two loudnesses, seconds
RATIO = 3.0  # a beep: the fast loudness is so many times the slow one


def sound(seconds):
    """Noise with a beep of 1 kHz and 0.1 s every few seconds: (samples), and the beeps' beginnings in seconds."""
    samples = 0.05 * torch.randn(seconds * RATE)
    beeps = torch.arange(2.0, seconds - 0.2, 3.7)
    tone = 0.5 * torch.sin(2 * torch.pi * 1000 / RATE * torch.arange(RATE // 10))
    for beep in beeps.tolist():
        first = int(beep * RATE)
        samples[first : first + len(tone)] += tone
    return samples, beeps.tolist()


class Loudness:
    """Mean squares of a stream over each of TIMES: a scan with one state a channel, h += (u - h) / (time * rate)."""

    def __init__(self):
        self.scan = SelectiveScan()
        self.A = -1 / torch.tensor(TIMES)[:, None]  # (D, N) = (2, 1)
        self.state = None

    def __call__(self, samples):
        """samples (L) -> (L, 2), continuing where the last call ended."""
        power = samples.square()[None, :, None] / torch.tensor(TIMES)  # (B, L, D)
        delta = torch.full_like(power, 1 / RATE)
        one = torch.ones(1, len(samples), 1)  # B and C (B, L, N)
        y, self.state = self.scan.forward_with_state(power, delta, self.A, one, one, None, self.state)
        return y[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="of sound")
    options = parser.parse_args()
    if options.seconds < 3:
        parser.error(f"--seconds must be at least 3, got {options.seconds}: the first beep comes after 2")

    torch.manual_seed(0)
    samples, beeps = sound(options.seconds)
    stream, results, inside, found = Loudness(), [], False, []
    start = time.perf_counter()
    for first in range(0, len(samples), CHUNK):
        loud = stream(samples[first : first + CHUNK])
        results.append(loud)
        fast, slow = loud.unbind(1)
        for step in ((fast > RATIO * slow) != inside).nonzero().flatten().tolist()[:1]:
            inside = not inside
            if inside and first + step > RATE:  # the first second is for the slow loudness to settle
                found.append((first + step) / RATE)
                print(f"beep at {found[-1]:6.2f} s")
    elapsed = time.perf_counter() - start

    whole = Loudness()(samples)
    difference = (torch.cat(results) - whole).abs().max() / whole.max()
    print(f"{len(found)} beeps found, {len(beeps)} made; chunks and one call differ by {difference:.0e} of the loudest")
    speed = options.seconds / elapsed
    print(f"{len(results)} chunks of {1000 * CHUNK // RATE} ms, {speed:.0f} times as fast as the sound")


if __name__ == "__main__":
    main()
