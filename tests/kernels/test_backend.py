"""A device from outside the library: a registered backend codes a model's training."""

from __future__ import annotations

import pytest
import torch
from backends import coding_by
from paged_kernels import PagedBackend
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.core.code_format import code_bytes
from daf.core.errors import KernelError
from daf.core.policy import policy_for
from daf.kernels import devices
from daf.kernels.devices import backend_of, can_code_on, is_processor, register_backend
from daf.kernels.normalisation import CodedValues, Encoding
from daf.pool.store import PlainStore


def trained() -> tuple[list[Tensor], Capture]:
    """Parameters after some steps in codes of three bits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 8))
    x, labels = torch.randn(128, 64), torch.randint(8, (128,))
    capture, optimizer = Capture(model, PlainStore()), torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(3):
        optimizer.zero_grad()
        with capture.step(policy_for(3), seed=1, step_index=index):
            loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
    return [each.detach() for each in model.parameters()], capture


class ToyBackend(PagedBackend):
    """Counts what it codes."""

    def __init__(self) -> None:
        self.coded_bytes = 0

    def encode_values(self, code: CodedValues, encoding: Encoding) -> bool:
        self.coded_bytes += code_bytes(encoding.source.numel(), code.treatment.bits)
        return super().encode_values(code, encoding)


def test_a_toy_device_trains_a_model_with_its_codes_in_pages_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, _ = trained()
    toy = ToyBackend()
    coding_by(monkeypatch, lambda: toy)
    found, capture = trained()
    assert toy.coded_bytes > 3 * 2 * code_bytes(128 * 64, 3) * 0.9
    assert capture.devices.on(torch.device("cpu")).statistics().live_peak_bytes > 0
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_devices_are_looked_up_by_their_type(monkeypatch: pytest.MonkeyPatch) -> None:
    meta = torch.empty(3, device="meta")
    assert not can_code_on(meta.device)
    assert is_processor(meta.device)
    with pytest.raises(KernelError, match="asked for kernels on meta, found none"):
        backend_of(meta)
    monkeypatch.setattr(devices, "_backends", dict(devices._backends))
    toy = ToyBackend()
    register_backend("meta", lambda: toy)
    assert backend_of(meta) is toy
    assert not is_processor(meta.device)
    register_backend("meta", lambda: None)
    assert not can_code_on(meta.device)
