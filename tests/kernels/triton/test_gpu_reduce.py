"""Ranges and sums on a GPU (or interpreted) against the oracle: every strategy, the same bytes."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from reference.reductions import measure_ranges, measure_sums
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from daf.core.code_format import ElementType
from daf.core.errors import KernelError
from daf.kernels import RangeStrategy

pytest.importorskip("triton", reason="triton is not installed: daf-train[gpu]")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("no CUDA device; test_gpu_interpreted runs these", allow_module_level=True)

from daf.kernels.triton import reductions as triton_reductions

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
SHAPES = [
    *((1, 1, 1), (5000, 1, 1), (16_384, 1, 1), (16_385, 1, 1), (70_000, 1, 1)),
    *((3000, 64, 1), (40_000, 64, 1), (3000, 3, 49), (60_000, 3, 49), (700, 40, 300)),
]
SIGNED = {np.dtype(np.uint16): np.int16}


@pytest.fixture(autouse=True)
def quiet_arithmetic():
    with np.errstate(all="ignore"):
        yield


def on_device(source: np.ndarray, kind: ElementType) -> torch.Tensor:
    signed = torch.from_numpy(np.array(source.view(SIGNED.get(source.dtype, source.dtype))))
    return (signed.view(torch.bfloat16) if kind is ElementType.BFLOAT16 else signed).to(DEVICE)


@pytest.mark.parametrize(("count", "channels", "inner"), SHAPES)
@pytest.mark.parametrize("strategy", RangeStrategy)
def test_ranges_are_the_oracle_s(cases, strategy, count, channels, inner) -> None:
    kind = ElementType(count % 3)
    name = ("wild", "broken", "mixed")[channels % 3] if count > 10 else "smooth"
    source = cases.as_type(getattr(cases, name)(count), kind)
    expected = measure_ranges(source, channels, inner)
    least, greatest = triton_reductions.measure_ranges(
        on_device(source, kind), strategy, channels, inner
    )
    assert least.cpu().numpy().tobytes() == expected.least.tobytes()
    assert greatest.cpu().numpy().tobytes() == expected.greatest.tobytes()


@pytest.mark.parametrize("strategy", RangeStrategy)
def test_zeros_by_sign_infinities_and_no_elements(strategy) -> None:
    for values in ([0.0, -0.0], [np.inf, 1.0], [-np.inf], [-np.nan, 2.0], []):
        source = np.array(values, np.float32)
        expected = measure_ranges(source)
        found = triton_reductions.measure_ranges(torch.from_numpy(source).to(DEVICE), strategy)
        ours = [end.cpu().numpy().tobytes() for end in found]
        assert ours == [expected.least.tobytes(), expected.greatest.tobytes()], values


class Started(TorchDispatchMode):
    """Notes what starts a kernel: Triton's by name, and PyTorch's operators that compute."""

    FREE = frozenset({"empty", "view", "select", "unbind", "detach", "alias"})

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []
        start = triton_reductions.on_device

        def noted(kernel: Any, *arguments: Any, **keywords: Any) -> None:
            self.names.append(kernel.fn.__name__)
            with _disable_current_modes():  # the interpreter copies tensors by operators
                start(kernel, *arguments, **keywords)

        monkeypatch.setattr(triton_reductions, "on_device", noted)

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        name = function.name().removeprefix("aten::").split(".")[0]
        if name not in self.FREE:
            self.names.append(name)
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("strategy", RangeStrategy)
@pytest.mark.parametrize(
    ("count", "is_small"), [(0, True), (1, True), (2048, True), (16_384, True), (16_385, False)]
)
def test_small_tensors_take_one_kernel_and_a_tree_no_fills(
    strategy, count, is_small, monkeypatch
) -> None:
    source = torch.zeros(count, device=DEVICE)
    with Started(monkeypatch) as started:
        triton_reductions.measure_ranges(source, strategy)
    fills = [] if is_small or strategy is RangeStrategy.TREE else ["full"]
    assert started.names == [*fills, "reduce_ranges", *([] if is_small else ["finish_ranges"])]


def sums_are_the_oracle_s(source: np.ndarray, kind: ElementType, *shape: int) -> None:
    expected = measure_sums(source, *shape)
    sums, squares = triton_reductions.measure_sums(on_device(source, kind), *shape)
    assert sums.cpu().numpy().tobytes() == expected.sums.tobytes()
    assert squares.cpu().numpy().tobytes() == expected.squares.tobytes()


@pytest.mark.parametrize("count", [0, 1, 4096, 4097, 50_000])
def test_sums_are_the_oracle_s_to_the_last_bit(cases, count) -> None:
    kind = ElementType(count % 3)
    sums_are_the_oracle_s(cases.as_type(cases.smooth(count), kind), kind)


# (elements, channels, of one channel in a row): last and first, ragged, more channels than a span
# has blocks without them, runs longer than a span, a channel without elements.
CHANNELS = [
    (3000, 64, 1),
    (9001, 3, 1),
    (5000, 3, 49),
    (20_000, 20, 16),
    (30_000, 40, 300),
    (33_000, 2, 5000),
    (4300, 4, 1500),
    (9000, 16, 1),
    (40_000, 48, 1),
]


@pytest.mark.parametrize(("count", "channels", "inner"), CHANNELS)
def test_sums_of_channels_are_too(cases, count, channels, inner) -> None:
    kind = ElementType(count % 3)
    name = ("smooth", "wild", "broken", "mixed")[count // 1000 % 4]
    sums_are_the_oracle_s(cases.as_type(getattr(cases, name)(count), kind), kind, channels, inner)


def test_no_channel_or_none_in_a_row_is_refused() -> None:
    source = torch.zeros(64, device=DEVICE)
    for channels, inner in ((0, 1), (4, 0)):
        with pytest.raises(KernelError, match="channels"):
            triton_reductions.measure_sums(source, channels, inner)


@pytest.mark.parametrize("most", [1, 4])
@pytest.mark.parametrize("channels", [1, 3])
def test_more_spans_than_a_program_folds_are_halved_before(
    cases, most, channels, monkeypatch
) -> None:
    monkeypatch.setattr(triton_reductions, "_MOST_FOLDED", most)
    source = cases.as_type(cases.broken(20_000), ElementType.FLOAT32)
    sums_are_the_oracle_s(source, ElementType.FLOAT32, channels, 1)
