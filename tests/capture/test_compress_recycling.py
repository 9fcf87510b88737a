"""``compress`` has freed blocks used again while it lives, and leaves the process as it was."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch
from daf._native import allocator as native
from torch import nn

import daf
from daf.memory import process_memory
from daf.memory.recycling_allocator import unsupported_reason

pytestmark = pytest.mark.skipif(bool(unsupported_reason()), reason=unsupported_reason() or "")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers, *layers[1:], *layers, *layers[1:], nn.Conv2d(8, 8, 3))


def step(model: nn.Module, coded: daf.compress) -> None:
    with coded:
        loss = model(torch.randn(16, 8, 64, 64)).square().mean()
    loss.backward()


@pytest.mark.parametrize("bits", ["exact", 2])
def test_blocks_of_one_step_serve_the_next(bits: str | int) -> None:
    gc.collect()  # what another test left may recycle, too
    assert not native.is_installed()
    model = network()
    coded = daf.compress(model, bits=bits)
    assert not native.is_installed()  # nothing before the first step
    step(model, coded)
    step(model, coded)
    assert native.is_installed()
    before = native.statistics()
    step(model, coded)
    after = native.statistics()
    more = {name: after[name] - before[name] for name in after}
    fresh, asked = more["fresh_bytes"], more["allocations"]
    assert more["hits"] > 0.9 * asked > 0
    assert more["hits"] + more["assembled"] == asked
    assert fresh < 2**21  # one block of 2 MB in a step that makes dozens
    del coded
    assert not native.is_installed()
    assert native.statistics()["recycled_bytes.current"] == 0


def test_several_end_with_the_last() -> None:
    gc.collect()
    model = network()
    first, second = daf.compress(model, bits="exact"), daf.compress(network(), bits=1)
    step(model, first)
    with second:
        pass
    del first
    assert native.is_installed()
    del second
    assert not native.is_installed()


def test_what_only_counts_leaves_the_process_alone() -> None:
    gc.collect()
    model = network()
    step(model, daf.compress(model, bits="plain"))
    assert not native.is_installed()


def test_tensors_outlive_it() -> None:
    model = network()
    coded = daf.compress(model, bits="exact")
    with coded:
        found = model(torch.ones(4, 8, 32, 32))
    loss = found.sum()
    del coded
    loss.backward()  # codes and blocks are still there
    assert all(each.grad is not None and each.grad.isfinite().all() for each in model.parameters())


PEAK = """
import sys
import torch
from torch import nn
import daf
from daf.memory import process_memory

torch.manual_seed(0)
blocks = [(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(8)]
model = nn.Sequential(*(layer for block in blocks for layer in block))
coded = daf.compress(model, bits=sys.argv[1])
x = torch.randn(32, 16, 64, 64)
for step in range(5):
    if step == 1:
        process_memory.reset_peak()
    with coded:
        loss = model(x).square().mean()
    loss.backward()
print(process_memory.peak_bytes())
"""


@pytest.mark.skipif(not process_memory.peak_is_exact(), reason="no high-water mark to reset")
def test_a_process_holds_less_for_exact_steps_than_for_plain_ones() -> None:
    """Not in its account alone: gaps in glibc's heap used to take what was saved."""
    peaks = {
        bits: int(subprocess.check_output([sys.executable, "-c", PEAK, bits], text=True))
        for bits in ("plain", "exact")
    }
    saved_by_half_bytes = 8 * 32 * 16 * 64 * 64 * 4  # a tensor of each block
    assert peaks["plain"] - peaks["exact"] > 0.6 * saved_by_half_bytes
