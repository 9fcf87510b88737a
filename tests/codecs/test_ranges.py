"""Ranges of tensors and channels: PyTorch's, whoever is chosen; chosen by times, once."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import coding_by_triton
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.codecs import ranges
from daf.codecs.ranged import WHOLE, Cut
from daf.codecs.ranges import LEAST_ELEMENTS, PYTORCH, STRATEGIES, Ranges, all_finite, bounds
from daf.core.policy import Method, policy_for
from daf.kernels import RangeStrategy
from daf.kernels.autotune import HOPELESS
from daf.kernels.cpu.reductions import range_strategy

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LARGE = 2 * LEAST_ELEMENTS


class Times:
    """A device on which every strategy takes as long as the test says (seconds)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
        self.seconds = dict.fromkeys(STRATEGIES, 0.001) | seconds
        self.measured: list[str] = []
        self._asked, self._count, self._now = "", 0, 0.0
        self.sizes: set[tuple[str, int]] = set()  # who was timed on how many elements
        by = ranges.ends_by

        def noted(tensor: Tensor, cut: Cut, name: str) -> Any:
            self._asked, self._count = name, tensor.numel()
            return by(tensor, cut, name)

        def timed(work: Callable[[], Any], _device: torch.device) -> float:
            work()
            self.measured.append(self._asked)
            self.sizes.add((self._asked, self._count))
            taken = self.seconds[self._asked] * self._count / LARGE
            self._now += taken
            return taken

        chooser = partial(ranges.Chooser, clock=lambda: self._now)
        monkeypatch.setattr(ranges, "Chooser", chooser)
        monkeypatch.setattr(ranges, "ends_by", noted)
        monkeypatch.setattr(ranges, "_seconds", timed)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranges]:
    """What this process asks, without choices of before."""
    made = Ranges(None)
    monkeypatch.setattr(ranges, "ours", lambda: made)
    return made


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(STRATEGIES),
    st.sampled_from(FLOATS),
    st.integers(1, LARGE),
    st.sampled_from((0.0, math.inf, -math.inf, math.nan)),
)
def test_every_strategy_gives_pytorch_s_range(name, dtype, count, odd) -> None:
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)
    tensor[count // 2] = odd
    found, expected = ranges.ends_by(tensor, WHOLE, name), torch.aminmax(tensor)
    for end, theirs in zip(found, expected, strict=True):
        assert end.item() == theirs.item() or (end.isnan() and theirs.isnan())


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(STRATEGIES),
    st.sampled_from(FLOATS),
    st.integers(1, 40),
    st.integers(1, 9),
    st.integers(1, 70),
    st.booleans(),
)
def test_every_strategy_gives_pytorch_s_ranges_of_channels(
    name, dtype, outer, inner, channels, last
) -> None:
    random = torch.Generator().manual_seed(outer)
    tensor = torch.randn(outer, channels, inner, 2, generator=random).to(dtype)
    tensor[outer // 2, channels // 2, 0, 0] = math.nan
    if last:
        tensor = tensor.to(memory_format=torch.channels_last)
    low, high = (end.view(-1) for end in ranges.ends_by(tensor, Cut.along(tensor, 1), name))
    others = [each for each in range(channels) if each != channels // 2]
    assert low.isnan().nonzero().flatten().tolist() == [channels // 2]
    assert high.isnan().nonzero().flatten().tolist() == [channels // 2]
    assert torch.equal(low[others], tensor.amin(dim=(0, 2, 3))[others])
    assert torch.equal(high[others], tensor.amax(dim=(0, 2, 3))[others])


def test_channels_have_a_choice_of_their_own_tried_on_a_part_that_has_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranges, "PART_ELEMENTS", LARGE)
    times = Times(monkeypatch, tree=0.5e-3)
    chooses, tensor = Ranges(None), torch.zeros(4 * LARGE // 96, 96)
    assert chooses.strategy_for(tensor) == "tree"
    times.seconds |= {"tree": 2e-3, "atomics": 0.1e-3}
    times.sizes.clear()
    assert chooses.strategy_for(tensor, Cut(96, 1)) == "atomics"
    assert {size for _, size in times.sizes} == {LARGE // 96 * 96, tensor.numel()}
    times.seconds |= {"hybrid": 0.01e-3}
    assert chooses.strategy_for(tensor, Cut(96, 1)) == "atomics"  # its class has one
    assert chooses.strategy_for(tensor, Cut(6, 16)) == "hybrid"
    assert chooses.strategy_for(tensor) == "tree"


def test_the_fastest_is_taken_and_kept_for_the_next_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    times = Times(monkeypatch, hybrid=0.5e-3)
    chooses = Ranges(tmp_path)
    tensor = torch.randn(LARGE)
    assert chooses.strategy_for(tensor) == "hybrid"
    assert set(times.measured) == set(STRATEGIES)
    again = Ranges(tmp_path)
    times.measured.clear()
    assert again.strategy_for(tensor) == "hybrid"
    assert times.measured == []  # the file knew
    times.seconds |= {"hybrid": 2e-3, "tree": 0.2e-3}
    assert {again.strategy_for(tensor) for _ in range(1000)} == {"hybrid"}  # kept for the size


def test_what_is_slow_on_a_part_is_not_tried_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "PART_ELEMENTS", LARGE)
    slow = 2 * HOPELESS * 1e-3
    times = Times(monkeypatch, atomics=slow, hybrid=0.5e-3)
    assert Ranges(None).strategy_for(torch.zeros(4 * LARGE)) == "hybrid"
    assert {(name, LARGE) for name in STRATEGIES} <= times.sizes
    assert ("hybrid", 4 * LARGE) in times.sizes
    assert ("atomics", 4 * LARGE) not in times.sizes


def test_the_processor_s_rule_is_left_for_a_clear_margin_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensor = torch.zeros(LARGE)
    rule = range_strategy(LARGE, torch.get_num_threads()).name.lower()
    other = next(name for name in STRATEGIES if name != rule)
    times = Times(monkeypatch, **{other: 0.98e-3})
    assert Ranges(None).strategy_for(tensor) == rule
    times.seconds[other] = 0.9e-3
    assert Ranges(None).strategy_for(tensor) == other


@pytest.mark.thorough
def test_a_gpu_s_kernels_give_the_processor_s_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under Triton's interpreter, which has to be asked for before Triton is imported."""
    pytest.importorskip("triton", reason="triton is not installed: daf-train[gpu]")
    if os.environ.get("TRITON_INTERPRET") != "1":
        this = f"{__file__}::{test_a_gpu_s_kernels_give_the_processor_s_bytes.__name__}"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", this]
        environment = os.environ | {"TRITON_INTERPRET": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert "1 passed" in done.stdout, done.stdout + done.stderr
        return
    reduced: list[str] = []
    from daf.kernels.triton import reductions as triton_reductions

    by_kernels = triton_reductions.measure_ranges

    def noted(items: Tensor, strategy: RangeStrategy, *cut: int) -> Any:
        reduced.append(strategy.name.lower())
        return by_kernels(items, strategy, *cut)

    tensor = torch.randn(2, LEAST_ELEMENTS // 2, generator=torch.Generator().manual_seed(1)).half()
    expected = [end.item() for end in ranges.ends_by(tensor, WHOLE, "tree")]
    monkeypatch.setattr(triton_reductions, "measure_ranges", noted)
    coding_by_triton(monkeypatch)
    for name in STRATEGIES:
        assert [end.item() for end in ranges.ends_by(tensor.t(), WHOLE, name)] == expected
    assert reduced == [name for name in STRATEGIES if name != PYTORCH]
    chooses = Ranges(None)
    assert [end.item() for end in chooses.ends(tensor)] == expected
    assert set(reduced[3:]) == set(reduced[:3])  # each was tried


def test_sizes_and_types_have_choices_of_their_own_and_small_ones_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = Times(monkeypatch, tree=0.5e-3)
    chooses = Ranges(None)
    chooses.ends(torch.zeros(LEAST_ELEMENTS - 1))
    chooses.ends(torch.zeros(LARGE, dtype=torch.float64))
    chooses.ends(torch.zeros(LARGE, dtype=torch.int64))
    chooses.ends(torch.zeros(2, LARGE)[:, ::2])
    assert chooses.strategy_for(torch.zeros(LEAST_ELEMENTS - 1)) == PYTORCH
    assert times.measured == []
    chooses.ends(torch.zeros(LARGE))
    times.seconds |= {"tree": 2e-3, "atomics": 0.1e-3}
    assert chooses.strategy_for(torch.zeros(LARGE)) == "tree"
    assert chooses.strategy_for(torch.zeros(8 * LARGE)) == "atomics"
    assert chooses.strategy_for(torch.zeros(LARGE).half()) == "atomics"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int8])
def test_bounds_of_every_type(dtype: torch.dtype, fresh: Ranges) -> None:
    tensor = torch.arange(-100, 27).to(dtype).repeat(LARGE // 100)
    assert bounds(tensor) == (-100, 26)


def test_what_is_finite(fresh: Ranges) -> None:
    good = [
        torch.randn(LARGE),
        torch.full((3,), 1e300, dtype=torch.float64),
        torch.zeros(0),
        torch.ones(4, dtype=torch.complex64),
        torch.ones(4).to(torch.float8_e4m3fn),
        torch.ones(3).to_sparse(),
        torch.full((3,), 2**62),
    ]
    assert all_finite(good)
    assert all_finite([])
    for odd in (math.nan, math.inf, -math.inf):
        broken = torch.randn(LARGE)
        broken[LARGE // 3] = odd
        assert not all_finite([*good, broken])
        assert not all_finite([broken.to(torch.complex64)])


def test_kernels_that_fail_on_a_device_are_left_for_good_and_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chooses, tensor, tries = Ranges(None), torch.randn(LARGE), []

    def fails(_tensor: Tensor, _cut: Cut, _name: str) -> Any:
        tries.append(1)
        raise RuntimeError("no compiler")

    monkeypatch.setattr(ranges, "ends_by", fails)
    with pytest.raises(RuntimeError, match="no compiler"):
        chooses.ends(tensor)
    monkeypatch.setattr(ranges, "is_processor", lambda _: False)
    with pytest.warns(UserWarning, match="PyTorch's from now on: no compiler"):
        low, high = chooses.ends(tensor)
    assert (low, high) == tuple(torch.aminmax(tensor))
    tries.clear()
    chooses.ends(tensor)
    assert tries == []


def test_a_dropout_s_noise_is_looked_at_by_the_chosen_strategy(
    fresh: Ranges, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = Times(monkeypatch, tree=0.1e-3)
    model = nn.Sequential(nn.Linear(256, 1024), nn.Dropout(0.5), nn.Linear(1024, 4))
    x = torch.randn(256, 256)
    capture = Capture(model)
    for step_index in range(2):
        times.measured.clear()
        with capture.step(policy_for(2), 0, step_index, batch=x):
            loss = model(x).sum()
        loss.backward()
        masks = [each for each in capture.sites() if each.treatment.method is Method.MASK]
        assert len(masks) == 1
        assert bool(times.measured) == (step_index == 0)
    assert times._asked == "tree"
