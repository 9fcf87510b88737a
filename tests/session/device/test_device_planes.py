"""Sessions whose codes lie in a device's pages, under budgets of that device's memory.

The device is simulated and its kernels write nothing: what is asked here is where memory goes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from backends import coding_by_triton
from simulated_memory import SimulatedDevice
from torch import Tensor, nn

from daf.memory.device_memory import DeviceMemory
from daf.session.session import Session

pytest.importorskip("triton", reason="triton is not installed: daf-train[gpu]")

from daf.kernels.triton import codecs as triton_codecs

LAYERS, EXAMPLES, WIDTH = 4, 1024, 512


@pytest.fixture(autouse=True)
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor's tensors count as a device's, whose codes all decode to ones."""
    coding_by_triton(monkeypatch)

    written: Callable[..., None] = lambda *_: None  # noqa: E731
    monkeypatch.setattr(triton_codecs, "encode_values", written)
    monkeypatch.setattr(
        triton_codecs, "decode_values", lambda _code, decoding: decoding.out.fill_(1.0)
    )
    monkeypatch.setattr(triton_codecs, "encode_elements", written)
    monkeypatch.setattr(
        triton_codecs, "decode_elements", lambda _planes, out, _code: out.fill_(1.0)
    )


def test_a_budget_that_falls_in_mid_step_takes_planes_of_its_codes(
    memory: DeviceMemory, device: SimulatedDevice
) -> None:
    torch.manual_seed(0)
    trained = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)], nn.Linear(WIDTH, 8))
    batch = torch.randn(EXAMPLES, WIDTH)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)
    high = memory.held_bytes() + 64 * 2**20
    planes_bytes = LAYERS * EXAMPLES * WIDTH // 8

    with Session(trained, optimizer, high, bits=3, sensitivity=False) as session:

        def falling(asked: nn.Module, part: Tensor) -> Tensor:
            loss = asked(part).square().mean()
            device.empty_cache()
            before = session._capture.devices.live_bytes
            assert 3 * planes_bytes < before < 3.6 * planes_bytes
            session.budget = memory.held_bytes() - 3 * planes_bytes // 2
            assert memory.held_bytes() <= session.budget_bytes
            assert before - session._capture.devices.live_bytes > 1.4 * planes_bytes
            session.budget = high
            return loss

        report = session.step(batch, lambda asked, part: asked(part).square().mean())
        assert report.evicted_bytes == 0
        report = session.step(batch, falling)
        assert 1.4 * planes_bytes < report.evicted_bytes < 1.8 * planes_bytes
        assert session.evicted_bytes == report.evicted_bytes
        assert [change.evicted_bytes > 0 for change in session.budget_history[-2:]] == [True, False]
    assert torch.cat([each.flatten() for each in trained.parameters()]).isfinite().all()
