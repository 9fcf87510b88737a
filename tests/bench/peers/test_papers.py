"""The papers' experiments: what is timed computes what it says, and the shares add up."""

from __future__ import annotations

from pathlib import Path

import torch
from daf_bench.harness.timing import interleaved_ms
from daf_bench.kernels import bit_packing
from hypothesis import given
from hypothesis import strategies as st


@given(st.sampled_from(bit_packing.WIDTHS), st.integers(0, 2**31))
def test_what_is_packed_is_unpacked_and_planes_hold_the_same_codes(bits: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (512,), generator=generator, dtype=torch.uint8)
    packed = bit_packing.packed_neighbours(codes, bits)
    assert packed.shape == (512 * bits // 8,)
    assert torch.equal(bit_packing.unpacked_neighbours(packed, bits), codes)
    planes = torch.empty(512 * bits // 8, dtype=torch.uint8)
    bit_packing.write_planes(codes, bits, planes)
    lowest = planes.view(bits, 64)[-1]  # most significant first
    found = ((lowest[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1).view(-1)
    assert torch.equal(found, codes & 1)


def test_codes_are_within_their_width_and_unbiased() -> None:
    torch.manual_seed(0)
    values = torch.rand(256 * 400)
    codes = bit_packing.quantized(values, 2)
    assert codes.dtype == torch.uint8
    assert set(codes.unique().tolist()) == {0, 1, 2, 3}
    blocks = values.view(-1, 256)
    least, greatest = blocks.aminmax(dim=1, keepdim=True)
    decoded = least + codes.view_as(blocks) * (greatest - least) / 3
    assert abs(float((decoded - blocks).mean())) < 0.003


def test_packing_tells_shares_of_what_it_timed(tmp_path: Path) -> None:
    result = bit_packing.run(bit_packing.PackingJob(2**14, 2))
    assert [row["bits"] for row in result.rows] == [1, 2, 4]
    for row in result.rows:
        whole = row["quantize_ms"] + row["pack_ms"]
        assert row["packing_share"] == row["pack_ms"] / whole
        assert row["relayout_share"] == row["relayout_ms"] / (whole + row["relayout_ms"])
    assert set(result.figures) >= {"packing_share", "relayout_share", "fused_speed_vs_stages"}
    bit_packing.draw_packing(result.rows, tmp_path / "packing.png")
    assert (tmp_path / "packing.png").stat().st_size > 10_000


def test_interleaved_calls_alternate_and_the_first_round_is_not_kept() -> None:
    order: list[str] = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    times = interleaved_ms(calls, 2)
    assert order == ["b", "a", "a", "b", "b", "a"]
    assert [len(taken) for taken in times.values()] == [2, 2]
