"""Averaging neighbours below one bit per element: what is held, and how wrong it is."""

from __future__ import annotations

import pytest
import torch
from daf_bench.accuracy.averaged_codec import AveragedCode, averaged_error, energy_within_groups
from torch import Tensor

from daf.core.code_format import header_bytes, plane_bytes
from daf.core.errors import CodecError
from daf.core.policy import Method, Treatment
from daf.pool.store import PlainStore

TWO_BITS = Treatment(Method.ROTATED, 2)


def restored(tensor: Tensor, group: int, treatment: Treatment, key: int = 7) -> Tensor:
    out = torch.full_like(tensor, float("nan"))
    AveragedCode(PlainStore(), tensor, group, treatment, key).decode(out)
    return out


@pytest.fixture
def correlated() -> Tensor:
    """Neighbours share three quarters of their variance; no mean."""
    random = torch.Generator().manual_seed(0)
    slow = torch.randn(16_384, 1, generator=random).expand(-1, 4).reshape(-1)
    return slow * 0.75**0.5 + torch.randn(65_536, generator=random) * 0.5


def test_two_bits_of_four_neighbours_are_half_a_bit(correlated: Tensor) -> None:
    code = AveragedCode(PlainStore(), correlated, 4, TWO_BITS, 0)
    assert code.nbytes == plane_bytes(16_384, 2) + header_bytes(16_384)
    assert 8 * code.nbytes / correlated.numel() < 0.55


@pytest.mark.parametrize("group", [2, 4])
@pytest.mark.parametrize("treatment", [Treatment(Method.ROTATED, 1), TWO_BITS])
def test_the_error_is_the_stated_one(correlated: Tensor, group: int, treatment: Treatment) -> None:
    energy = float(correlated.square().sum())
    within = energy_within_groups(correlated, group) / energy
    assert within == pytest.approx(0.25 * (1 - 1 / group), rel=0.05)
    errors = [
        float((restored(correlated, group, treatment, key) - correlated).square().sum()) / energy
        for key in range(4)
    ]
    stated = averaged_error(within, treatment)
    assert sum(errors) / len(errors) == pytest.approx(stated, rel=0.05)


def test_unrelated_neighbours_lose_all_but_a_share() -> None:
    white = torch.randn(65_536, generator=torch.Generator().manual_seed(1))
    error = float((restored(white, 4, TWO_BITS) - white).square().sum() / white.square().sum())
    assert error == pytest.approx(averaged_error(0.75, TWO_BITS), rel=0.05)


def test_the_loss_within_groups_does_not_average_out(correlated: Tensor) -> None:
    mean = sum(restored(correlated, 4, TWO_BITS, key) for key in range(16)) / 16
    left = float((mean - correlated).square().sum())
    assert left > 0.9 * energy_within_groups(correlated, 4)


def test_groups_follow_memory_and_a_last_one_may_be_short() -> None:
    image = torch.arange(2 * 3 * 5 * 5, dtype=torch.float32).view(2, 3, 5, 5)
    last = image.to(memory_format=torch.channels_last)
    eight = Treatment(Method.MINMAX, 8)
    found = restored(last, 4, eight)
    assert found.stride() == last.stride()
    memory = torch.as_strided(last, (150,), (1,))
    expected = torch.cat([memory[:148].view(-1, 4).mean(1).repeat_interleave(4)])
    decoded = torch.as_strided(found, (150,), (1,))
    torch.testing.assert_close(decoded[:148], expected, atol=1.0, rtol=0)
    torch.testing.assert_close(decoded[148:], memory[148:].mean().expand(2), atol=1.0, rtol=0)


def test_what_cannot_be_averaged_is_refused() -> None:
    with pytest.raises(CodecError, match="at least 2"):
        AveragedCode(PlainStore(), torch.ones(8), 1, TWO_BITS, 0)
    with pytest.raises(CodecError, match="without gaps"):
        AveragedCode(PlainStore(), torch.ones(8, 8)[:, ::2], 2, TWO_BITS, 0)
    with pytest.raises(CodecError, match="coded shape"):
        AveragedCode(PlainStore(), torch.ones(8), 2, TWO_BITS, 0).decode(torch.ones(7))
    with pytest.raises(CodecError, match="from 0 to 1"):
        averaged_error(1.5, TWO_BITS)
