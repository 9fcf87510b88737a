"""The kernels' benchmark: what it times is what it says, and figures come from its rows."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from daf_bench import _native
from daf_bench.kernels import run as bench
from daf_bench.kernels.plot import draw_roofline

from daf.core.errors import KernelError
from daf.kernels.cpu.instruction_sets import instruction_sets

LINUX = platform.system() == "Linux"


def test_every_codec_and_way_is_measured_on_every_instruction_set() -> None:
    found = {(kernel.instruction_set, kernel.codec, kernel.encode) for kernel in bench.kernels()}
    codecs = ("rotated", "minmax", "mask", "derivative", "integers")
    assert found == {
        (name, codec, encode)
        for name in instruction_sets()
        for codec in codecs
        for encode in (True, False)
    }


VECTOR_SETS = [name for name in instruction_sets() if name != "portable"]


@pytest.mark.skipif(not LINUX, reason="instructions are counted by single-stepping, on Linux")
@pytest.mark.skipif(not VECTOR_SETS, reason="this processor has the portable kernels alone")
def test_instructions_are_those_of_the_work_alone() -> None:
    kernel = bench.Kernel(VECTOR_SETS[0], "mask", encode=True, bits=1)
    once = bench.instructions_per_element(kernel)
    if once is None:
        pytest.skip("this system lets no process single-step another")
    few, many = (
        _native.count_kernel_instructions(bench._fields(kernel, blocks * 256, 1))
        for blocks in (40, 80)
    )
    # The same for every block: so it does not matter how many are counted.
    assert (many - few) / (40 * 256) == pytest.approx(once, rel=0.01)


@pytest.mark.skipif(not LINUX, reason="instructions are counted by single-stepping, on Linux")
def test_wider_sets_need_fewer_instructions() -> None:
    counts = [
        bench.instructions_per_element(bench.Kernel(name, "rotated", encode=True, bits=2))
        for name in VECTOR_SETS
    ]
    if None in counts:
        pytest.skip("this system lets no process single-step another")
    assert counts == sorted(counts)


def test_unknown_codecs_and_sets_are_refused() -> None:
    codec = bench.Kernel("portable", "no-such-codec", encode=True, bits=1)
    with pytest.raises(ValueError, match="no-such-codec"):
        bench.timed_row(codec, 256, 1, 1, None)
    with pytest.raises(KernelError, match="no-such-set"):
        bench.timed_row(bench.Kernel("no-such-set", "mask", encode=True, bits=1), 256, 1, 1, None)


def test_an_extension_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "KERNEL_TABLE_BYTES", 8)
    with pytest.raises(KernelError, match="install both from the same clone"):
        bench.timed_row(bench.Kernel("portable", "mask", encode=True, bits=1), 256, 1, 1, None)


def row(name: str, codec: str, way: str, bits: int, ratio: float, count: int = 512) -> bench.Row:
    return {
        "part": "kernel",
        "instruction_set": name,
        "codec": codec,
        "way": way,
        "bits": bits,
        "elements": count,
        "threads": 1,
        "vs_memcpy": ratio,
    }


def test_figures_are_the_worst_of_three_widths_at_the_largest_size() -> None:
    widest = instruction_sets()[0]
    ratios = {1: 1.5, 2: 1.1, 3: 0.1, 4: 1.3}  # three bits are not asked for
    rows = [
        row(name, codec, way, bits, ratio * (1 if name == widest else 0.5))
        for name in instruction_sets()
        for codec in ("rotated", "minmax")
        for way in ("encode", "decode")
        for bits, ratio in ratios.items()
    ]
    rows.append(row(widest, "rotated", "encode", 2, 0.01, count=256))
    figures = bench.figures_of(rows)
    assert figures["rotated_encode_vs_memcpy"] == pytest.approx(1.1)
    if "avx2" in instruction_sets()[1:]:
        assert figures["avx2_worst_fraction"] == pytest.approx(0.55 / 2.0)


@pytest.mark.thorough
def test_a_tiny_run_gives_rows_figures_and_a_picture(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(bench, "_WIDTHS", {"rotated": (1, 2, 4), "minmax": (1, 2, 4)})
    seen: list[str] = []
    result = bench.run(bench.KernelsJob((4096,), 3, 4096), seen.append)
    timed = [one for one in result.rows if one["part"] == "kernel"]
    assert len(timed) == 12 * len(instruction_sets()) * len(bench.thread_counts())
    assert len(seen) == 12 * len(instruction_sets())
    assert all(one["ns_per_block"] > 0 and one["vs_memcpy"] > 0 for one in timed)
    assert {one["part"] for one in result.rows} == {"kernel", "limit"}
    draw_roofline(result.rows, tmp_path / "roofline.png")
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")
