"""Ranges and sums on a GPU (or interpreted) against the oracle: every strategy, the same bytes."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from daf.errors import KernelError
from daf.kernels import ElementType, RangeStrategy
from daf.kernels.reference_measure import measure_ranges, measure_sums

pytest.importorskip("triton", reason="triton is not installed: daf-train[gpu]")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("no CUDA device; test_gpu_interpreted runs these", allow_module_level=True)

from daf.kernels import gpu_reduce  # noqa: E402

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
SHAPES = [(1, 1, 1), (5000, 1, 1), (70_000, 1, 1), (3000, 64, 1), (3000, 3, 49), (700, 40, 300)]
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
    least, greatest = gpu_reduce.measure_ranges(on_device(source, kind), strategy, channels, inner)
    assert least.cpu().numpy().tobytes() == expected.least.tobytes()
    assert greatest.cpu().numpy().tobytes() == expected.greatest.tobytes()


@pytest.mark.parametrize("strategy", RangeStrategy)
def test_zeros_by_sign_infinities_and_no_elements(strategy) -> None:
    for values in ([0.0, -0.0], [np.inf, 1.0], [-np.inf], [-np.nan, 2.0], []):
        source = np.array(values, np.float32)
        expected = measure_ranges(source)
        found = gpu_reduce.measure_ranges(torch.from_numpy(source).to(DEVICE), strategy)
        ours = [end.cpu().numpy().tobytes() for end in found]
        assert ours == [expected.least.tobytes(), expected.greatest.tobytes()], values


@pytest.mark.parametrize("count", [1, 4096, 4097, 50_000])
def test_sums_are_the_oracle_s_to_the_last_bit(cases, count) -> None:
    kind = ElementType(count % 3)
    source = cases.as_type(cases.smooth(count), kind)
    expected = measure_sums(source)
    found = gpu_reduce.measure_sums(on_device(source, kind)).cpu().numpy()
    assert found.tobytes() == np.concatenate([expected.sums, expected.squares]).tobytes()


def test_shape_classes_tell_sizes_and_layouts_apart() -> None:
    assert gpu_reduce.shape_class(1000, 1, 1) == gpu_reduce.shape_class(700, 1, 1)
    assert gpu_reduce.shape_class(1000, 1, 1) != gpu_reduce.shape_class(100_000, 1, 1)
    assert gpu_reduce.shape_class(1000, 64, 1) != gpu_reduce.shape_class(1000, 64, 15)
    with pytest.raises(KernelError, match="channels"):
        gpu_reduce.shape_class(1000, 0, 1)
