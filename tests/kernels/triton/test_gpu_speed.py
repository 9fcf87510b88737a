"""``daf bench kernels --device``: every codec both ways beside a copy; shares by bytes moved."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: daf-train[gpu]")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("no CUDA device; test_gpu_interpreted runs these", allow_module_level=True)

from daf_bench.kernels import device_codecs

COUNT = 1000 if INTERPRETED else 2**22


def test_every_codec_both_ways_and_shares_by_the_bytes_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work_done = []

    def seconds(work, device) -> float:  # 2 s for a kernel, 1 s for a copy
        work()
        work_done.append(work)
        return 2.0 if len(work_done) % 2 else 1.0

    if INTERPRETED:
        monkeypatch.setattr(device_codecs, "device_seconds", seconds)
    job = device_codecs.DeviceCodecsJob(
        "cpu" if INTERPRETED else "cuda", (COUNT // 2, COUNT), (torch.bfloat16,), rounds=1
    )
    result = device_codecs.run(job)
    assert len(result.rows) == 2 * 2 * (4 + 3)
    assert {(row["codec"], row["bits"]) for row in result.rows} == {
        *(("rotated", bits) for bits in (1, 2, 3, 4)),
        *(("minmax", bits) for bits in (2, 4, 8)),
    }
    names = {"encode_bfloat16_worst_share", "decode_bfloat16_worst_share"}
    assert result.figures.keys() == names
    assert all(share > 0 for share in result.figures.values())
    if INTERPRETED:
        # 4 blocks: one bit and four bytes of header for 256 elements, beside two bytes each.
        moved = 2 * COUNT + 4 * 32 + 4 * 4
        assert result.figures["decode_bfloat16_worst_share"] == pytest.approx(
            moved / 2 / (2 * 2 * COUNT)
        )
