"""What a GPU's side-by-side tells; on the processor, whose memory stands for a device's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from daf_bench import gpu
from daf_bench.harness.worker import Entry, contestants
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from daf.cli import app
from daf.memory.recycling_allocator import unsupported_reason

TINY = Entry("tiny", "resnet20", "digits", 32)
JOB = gpu.GpuJob((TINY,), steps=2)
needs_limit = pytest.mark.skipif(
    unsupported_reason() is not None, reason=f"nothing is refused here: {unsupported_reason()}"
)


@given(st.integers(0, 5000), st.integers(1, 300))
def test_the_largest_is_found_to_its_precision(largest: int, first: int) -> None:
    tried: list[int] = []

    def fits(count: int) -> bool:
        tried.append(count)
        return count <= largest

    found = gpu.largest_that(fits, first)
    assert found <= largest
    within = largest - max(1, largest // (gpu.PRECISION - 1))
    assert found >= min(within, gpu.MOST_TIMES * first / 2)
    assert len(tried) == len(set(tried))  # a size is tried once: each costs a process
    assert len(tried) < 20


@pytest.mark.thorough
def test_number_types_stand_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[str, int | None, Any, tuple[str, ...]]] = []

    def largest(entry: Entry, _on_progress: object) -> int:
        limits.append((entry.label, entry.limit_bytes, entry.bits, tuple(entry.levers or ())))
        return 100 + 200 * len(entry.levers or ())

    monkeypatch.setattr(gpu, "largest_batch", largest)
    found = gpu.run(JOB)
    labels = ["tiny_float32", "tiny_bfloat16"]
    fused = ("codes", "fused", "chunked")
    assert limits == [
        (label, JOB.limit_bytes, *asked)
        for label in labels
        for asked in ((None, ()), (JOB.bits, ("codes",)), (JOB.bits, fused))
    ]
    rows = {(row["workload"], row["contestant"]): row for row in found.rows}
    assert set(rows) == {(label, name) for label in labels for name in ("plain", *gpu.OURS)}
    for label in labels:
        plain = rows[label, "plain"]
        assert plain["saved_bytes_plain"] is None
        for name, batch_ratio in (("daf", 3), ("daf_fused", 7)):
            ours = rows[label, name]
            assert ours["loss"] == pytest.approx(plain["loss"], rel=0.1)
            ratio = ours["saved_bytes_plain"] / ours["saved_bytes_peak"]
            assert found.figures[f"{label}_{name}_saved_ratio"] == ratio > 5
            assert found.figures[f"{label}_{name}_batch_ratio"] == batch_ratio
    # Half as many bytes are saved by everybody.
    wide, narrow = (rows[label, "daf"]["saved_bytes_plain"] for label in labels)
    assert 0.4 * wide < narrow < 0.6 * wide
    assert "processor" in found.notes[-1]


@needs_limit
@pytest.mark.thorough
@pytest.mark.parametrize("codes", [{}, {"bits": 1, "levers": ("codes",)}])
def test_what_a_limit_refuses_does_not_fit(codes: dict[str, Any]) -> None:
    """A batch that is larger than the data, at the tiniest of images."""
    large = replace(TINY, batch_size=1500, **codes)
    with contestants([large]) as (alone,):
        floor_bytes = alone.facts()["floor_bytes"]
        assert alone.fits()
        needed_bytes = alone.facts()["peak_bytes"] - floor_bytes
    with contestants([replace(large, limit_bytes=floor_bytes + needed_bytes // 2)]) as (alone,):
        assert not alone.fits()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_on_a_gpu() -> None:
    found = gpu.run(replace(JOB, entries=(replace(TINY, device="cuda"),), limit_bytes=2**28))
    for name in gpu.OURS:
        assert found.figures[f"tiny_float32_{name}_saved_ratio"] > 5
        assert found.figures[f"tiny_float32_{name}_batch_ratio"] > 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what is missing without a GPU")
def test_codecs_of_a_gpu_that_is_not_there_are_refused() -> None:
    done = CliRunner().invoke(app, ["bench", "kernels", "--device", "cuda", "--quick"])
    assert done.exit_code != 0
    assert "found no CUDA device; leave --device out" in str(done.exception or "") + done.output
    asked = ["bench", "kernels", "--device", "cuda", "--picture", "roof.png"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 2
    assert "--picture" in done.output
