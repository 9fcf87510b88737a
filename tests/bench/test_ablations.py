"""``daf bench ablations``: its stages do what they are called, and figures compare them."""

from __future__ import annotations

import gc
from itertools import pairwise
from typing import Any

import pytest
import torch
from daf._native import allocator as native
from daf_bench.ablations import run
from daf_bench.ablations.best_fit import ALIGNMENT, BestFitStore
from daf_bench.ablations.staged_codec import StagedCode
from daf_bench.ablations.stages import BITS, DAF, SAGE, STAGES
from daf_bench.harness.peer_methods import Setting, make_peer
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from daf.codecs import ranges
from daf.codecs.codes import ElementsCode, ValueCode
from daf.core.errors import CodecError, PoolFullError
from daf.core.policy import Method, Treatment
from daf.memory.recycling_allocator import unsupported_reason
from daf.pool.store import PlainStore

Batch = tuple[Tensor, Tensor]


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("count", [5, 4096, 10_001])
def test_staged_codes_round_to_steps_of_the_tensors_range_without_bias(
    bits: int, count: int
) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(count))
    step = float(values.max() - values.min()) / (2**bits - 1)
    store, total, repeats = PlainStore(), torch.zeros(count), 64
    for key in range(repeats):
        code, out = StagedCode(store, values, bits, key), torch.empty(count)
        assert code.nbytes == store.live_bytes
        code.decode(out)
        assert (out - values).abs().max() <= step * 1.001
        total += out
        del code
    assert store.live_bytes == 0
    # A rounding's deviation is half a step at most; six of the mean's are no accident.
    assert (total / repeats - values).abs().max() <= 6 * 0.5 * step / repeats**0.5


def test_widths_that_do_not_divide_a_byte_have_no_stages() -> None:
    with pytest.raises(CodecError, match="give 1, 2 or 4"):
        StagedCode(PlainStore(), torch.randn(8), 3, 0)


Asked = list[tuple[int, bool]]


@given(st.lists(st.tuples(st.integers(1, 4000), st.booleans()), max_size=60))
def test_pieces_never_overlap_and_holes_are_joined(asked: Asked) -> None:
    store, live = BestFitStore(2**16), []
    for count, is_freed in asked:
        if is_freed and live:
            live.pop(count % len(live))
            continue
        try:
            live.append(store.allocate_planes(count, 2, headers=False))
        except PoolFullError:
            continue
        spans = sorted((each._offset, each._offset + each.nbytes) for each in live)  # type: ignore[attr-defined]
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        assert all(begin % ALIGNMENT == 0 for begin, _ in spans)
        assert spans[-1][1] <= store.live_bytes <= 2**16
    live.clear()
    assert store._free == [(2**16, 0)]


def test_the_smallest_hole_that_is_large_enough_is_filled() -> None:
    store = BestFitStore(2**20)
    kept = [store.allocate_planes(8 * size, 1, headers=False) for size in (640, 64, 128, 64, 64)]
    small = kept[2]._offset  # type: ignore[attr-defined]
    kept[0] = kept[2] = None  # type: ignore[call-overload]
    again = store.allocate_planes(8 * 128, 1, headers=False)
    assert again._offset == small  # type: ignore[attr-defined]
    held = store.live_bytes
    also = store.allocate_planes(8 * 512, 1, headers=False)
    assert also._offset == 0  # type: ignore[attr-defined]
    assert store.live_bytes == held  # both lie in holes


def test_codes_are_the_same_wherever_they_lie() -> None:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    found = []
    for store in (PlainStore(), BestFitStore(2**20)):
        out = torch.empty_like(values)
        code = ValueCode(store, values, Treatment(Method.ROTATED, 3), 7)
        ValueCode(store, -values, Treatment(Method.ROTATED, 3), 8)  # dropped at once
        code.decode(out)
        found.append(out)
    assert torch.equal(*found)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 256, 10),
    )  # fmt: skip


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def stepped(name: str, batch: Batch) -> tuple[list[Tensor], int]:
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    peer = make_peer(name, Setting(made, optimizer, loss_fn), 0)
    peer.step(batch)
    held = peer.saved_peak_bytes()
    assert held is not None
    return [each.grad.clone() for each in made.parameters() if each.grad is not None], held


@pytest.fixture(scope="module")
def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 3, 16, 16, generator=generator)
    return x, torch.randint(0, 10, (32,), generator=generator)


@pytest.mark.skipif(bool(unsupported_reason()), reason=unsupported_reason() or "")
def test_a_stage_has_freed_blocks_used_again_while_it_lives(batch: Batch) -> None:
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    assert not native.is_installed()
    peer = make_peer("reduction", Setting(made, optimizer, loss_fn), 0)
    peer.step(batch)
    assert native.is_installed()
    del peer
    gc.collect()
    assert not native.is_installed()


def test_stages_of_sage_are_exact_and_hold_less_and_less(batch: Batch) -> None:
    made = model()
    loss_fn(made, batch).backward()
    plain = [each.grad for each in made.parameters()]
    held = []
    for name in SAGE:
        gradients, nbytes = stepped(name, batch)
        held.append(nbytes)
        for ours, theirs in zip(gradients, plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-5)
    assert held == sorted(held, reverse=True)
    assert held[-1] < 0.7 * held[0]


def test_stages_of_daf_differ_in_what_they_are_called_and_nothing_else(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []

    def noting(tensor: Tensor, cut: Any, name: str) -> Any:
        used.append(name)
        return kept(tensor, cut, name)

    kept = ranges.ends_by
    monkeypatch.setattr(ranges, "ends_by", noting)
    found = {name: stepped(name, batch) for name in DAF}
    whole, whole_bytes = found["as published"]
    assert set(used) == {"hybrid", "tree"}
    for name in ("ranges by tree", "codes in malloc", "codes by best fit"):
        assert all(map(torch.equal, found[name][0], whole)), name
    assert not all(map(torch.equal, found["staged packing"][0], whole))  # rounds by other numbers
    assert found["staged packing"][1] == pytest.approx(whole_bytes, rel=0.01)
    assert set(STAGES) == {*SAGE, *DAF}
    assert BITS == 4


def row(name: str, step: float, saved: int, peak: float) -> dict[str, Any]:
    found = {"workload": "w1", "contestant": name, "step_ratio": step, "peak_ratio": peak}
    return found | {"saved_bytes_peak": saved}


def test_figures_compare_with_plain_and_with_the_whole() -> None:
    rows = [
        row("plain", 1.0, 1000, 1.0),
        row(run.BASE, 0.5, 1000, 0.8),
        row("fusion", 0.6, 500, 0.4),
        row("as published", 1.0, 100, 0.2),
        row("staged packing", 3.0, 110, 0.3),
        {"workload": "w1", "contestant": "reduction", "failed": "no memory"},
    ]
    figures = run.figures_of(rows)
    assert figures["failed"] == 1
    assert figures["w1/fusion/saved_ratio"] == 2.0
    assert figures["w1/fusion/step_ratio"] == pytest.approx(1.2)
    assert figures["w1/fusion/peak_ratio"] == pytest.approx(2.0)
    assert figures["w1/staged packing/step_vs_whole"] == 3.0
    assert figures["w1/staged packing/saved_vs_whole"] == pytest.approx(1.1)
    assert "w1/reduction/saved_ratio" not in figures


def test_an_elements_code_of_integers_serves_the_stages() -> None:
    """What the stages hand over are planes that any back end reads."""
    code = StagedCode(PlainStore(), torch.linspace(0, 15, 16), 4, 0)
    assert isinstance(code._planes, ElementsCode)
    steps = torch.empty(16, dtype=torch.uint8)
    code._planes.decode(steps)
    assert steps.tolist() == list(range(16))
