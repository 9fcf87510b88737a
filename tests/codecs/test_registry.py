"""A codec from outside the library: registered by name, it codes a model's training."""

from __future__ import annotations

from types import MappingProxyType

import pytest
import torch
from torch import Tensor, nn

from daf.capture.compress import compress
from daf.codecs.registry import encoder_named, register_codec
from daf.core.errors import CodecError
from daf.core.policy import Method, Need, Policy, Treatment
from daf.pool.store import Store


class Halved:
    """A toy: the values in bfloat16."""

    in_store = False

    def __init__(self, tensor: Tensor) -> None:
        self._half = tensor.detach().bfloat16()

    @property
    def nbytes(self) -> int:
        return self._half.nbytes

    def decode(self, out: Tensor) -> None:
        out.copy_(self._half)


def trained(policy: Policy | None) -> tuple[list[float], int]:
    """Losses of some steps, and the bytes that the last one held of saved tensors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    x, labels = torch.randn(128, 64), torch.randint(8, (128,))
    optimizer, losses, held_bytes = torch.optim.SGD(model.parameters(), lr=0.5), [], 0
    for _ in range(8):
        optimizer.zero_grad()
        if policy is None:
            found = model(x)
        else:
            with compress(model, policy=policy) as capture:
                found = model(x)
            held_bytes = capture.stats.held_bytes
        loss = nn.functional.cross_entropy(found, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, held_bytes


def test_a_toy_codec_trains_a_model() -> None:
    made: list[Halved] = []

    def encode(_: Store, tensor: Tensor, treatment: Treatment, key: int) -> Halved:
        assert (treatment.codec, treatment.bits, key >= 0) == ("halved", 16, True)
        made.append(Halved(tensor))
        return made[-1]

    register_codec("halved", encode)
    code = Treatment(Method.REGISTERED, 16, codec="halved")
    by_need = MappingProxyType({Need.LINEAR: code})
    losses, held_bytes = trained(Policy("toy", by_need, rederive=False))
    plain, _ = trained(None)
    assert len(made) >= 8
    assert held_bytes == 128 * 64 * (4 + 2)  # the activation's input, and its coded result
    assert losses[-1] < 0.9 * losses[0]
    assert losses == pytest.approx(plain, rel=0.01)


def test_a_codec_may_leave_a_tensor_as_it_is() -> None:
    register_codec("declines", lambda *_: None)
    by_need = MappingProxyType({Need.LINEAR: Treatment(Method.REGISTERED, codec="declines")})
    losses, _ = trained(Policy("toy", by_need, rederive=False))
    assert losses == trained(None)[0]


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(CodecError, match="asked for codec 'nobody'"):
        encoder_named("nobody")
