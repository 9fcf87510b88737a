"""``daf bench pack``: on a device made of threads; on a GPU where there is one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from daf.bench.pack import BOTH, CPU, GPU, PackJob, planned, quick_job, run
from daf.bench.pack_picture import draw_pack
from daf.cli import app
from daf.execution.collaborate import Rates, Saved

sys.path.append(str(Path(__file__).parents[1] / "execution"))
from simulated_device import SimulatedDevice

SMALL = PackJob(batch=8, rounds=1)


def by_way(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Rows of three ways, each of which packed the same tensors."""
    found = {row["way"]: row for row in rows}
    assert list(found) == [GPU, CPU, BOTH]
    gpu, cpu, both = found.values()
    count = gpu["gpu_packs"]
    assert count > 20
    assert (gpu["cpu_packs"], cpu["gpu_packs"], cpu["cpu_packs"]) == (0, 0, count)
    assert both["gpu_packs"] + both["cpu_packs"] == count
    assert len({(row["raw_bytes"], row["code_bytes"]) for row in rows}) == 1
    return found


def test_three_ways_take_turns_and_the_gradients_pass_through_codes(tmp_path: Path) -> None:
    device = SimulatedDevice(latest_s=0.0005)
    result = run(SMALL, bed=device)
    rows = by_way(result.rows)
    # Two planes, and four bytes of header for 256 elements.
    coded = 32 / (2 + 32 / 256)
    assert rows[GPU]["raw_bytes"] == pytest.approx(coded * rows[GPU]["code_bytes"], rel=0.001)
    for row in rows.values():
        longer = row["packed_ms"] - row["plain_forward_ms"]
        assert row["exposed_ms"] == pytest.approx(max(0.0, longer))
        assert row["backward_ratio"] > 0
    assert result.figures["exposed_ms"] == rows[BOTH]["exposed_ms"]
    draw_pack(result.rows, tmp_path / "pack.png")
    assert (tmp_path / "pack.png").stat().st_size > 10_000


def test_the_split_is_the_model_s_best_by_measured_rates() -> None:
    saved = [Saved(10.0 * k, 30_000, 2000) for k in range(1, 7)]
    plans = planned(saved, Rates(gpu_pack=4000.0, cpu_pack=1500.0, link=20_000.0), 70.0)
    assert plans[BOTH].exposed_ms < min(plans[GPU].exposed_ms, plans[CPU].exposed_ms)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what is missing without a GPU")
def test_without_a_gpu_it_says_what_to_run_instead() -> None:
    done = CliRunner().invoke(app, ["bench", "pack", "--quick"])
    assert done.exit_code != 0
    assert "found no CUDA device" in str(done.exception or "") + done.output
    assert "daf bench packing" in str(done.exception or "") + done.output


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu() -> None:
    pytest.importorskip("triton", reason="triton is not installed: daf-train[gpu]")
    result = run(quick_job())
    rows = by_way(result.rows)
    # A device packs faster than two links carry raw data out and codes back.
    assert rows[GPU]["packed_ms"] < rows[CPU]["packed_ms"]
