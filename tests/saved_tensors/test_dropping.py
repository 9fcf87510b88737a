"""What dropout leaves of a tensor that has a code is computed from that, wherever it is dropped."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.core.policy import Method, Need, Policy, coded_policy, exact_policy, plain_policy
from daf.core.reports import SiteReport

BATCH, HEADS, TOKENS, WIDTH = 8, 4, 32, 16


def gradients(
    model: nn.Module, policy: Policy, seed: int = 0
) -> tuple[list[Tensor], Mapping[str, SiteReport]]:
    torch.manual_seed(3)
    x = torch.randn(BATCH * TOKENS, HEADS * WIDTH)
    capture = Capture(model)
    with capture.step(policy, seed, 0, batch=x):
        loss = model(x).square().mean()
    sites = {f"{each.site.operator}[{each.site.save}]": each for each in capture.sites()}
    return list(torch.autograd.grad(loss, [*model.parameters()])), sites


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    both = zip(found, expected, strict=True)
    error = sum(float((one - other).square().sum()) for one, other in both)
    return (error / sum(float(each.square().sum()) for each in expected)) ** 0.5


def normed(dropping: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    width = HEADS * WIDTH
    norm = nn.LayerNorm(width)
    return nn.Sequential(nn.Linear(width, width), norm, dropping, nn.Linear(width, width))


@pytest.mark.parametrize("dropping", [nn.Dropout(0.3), nn.AlphaDropout(0.3)], ids=repr)
def test_a_layer_behind_reads_what_really_was_dropped(dropping: nn.Module) -> None:
    """Alpha dropout adds a constant: what it made is more than a part of what it was given."""
    model = normed(dropping)
    plain, _ = gradients(model, plain_policy())
    coded, sites = gradients(model, coded_policy(8))
    assert distance(coded, plain) < 0.02
    behind = sites["linear[0]"].treatment.method
    assert (behind is Method.REDERIVE) is isinstance(dropping, nn.Dropout)


class Attending(nn.Module):
    """Attention with dropout in its weights, in one operator or step by step."""

    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = HEADS * WIDTH
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.whole = whole

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            each(x).view(BATCH, TOKENS, HEADS, WIDTH).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        if self.whole:
            return F.scaled_dot_product_attention(query, key, value, dropout_p=0.2)
        weights = F.dropout(torch.softmax(query @ key.mT / WIDTH**0.5, dim=-1), 0.2)
        found: Tensor = weights @ value
        return found


@pytest.mark.parametrize("whole", [True, False])
def test_dropped_weights_of_attention_hold_nothing_of_their_own(whole: bool) -> None:
    model = Attending(whole=whole)
    plain, kept = gradients(model, plain_policy())
    weight_bytes = 4 * BATCH * HEADS * TOKENS * TOKENS
    dropped = [each for each in kept.values() if each.need is Need.PRODUCT]
    assert [each.plain_bytes for each in dropped].count(weight_bytes) == 1
    coded, sites = gradients(model, coded_policy(8))
    assert distance(coded, plain) < 0.02
    (derived,) = (each for each in sites.values() if each.treatment.method is Method.REDERIVE)
    assert (derived.need, derived.plain_bytes) == (Need.PRODUCT, weight_bytes)
    assert derived.held_bytes == 0
    exact, _ = gradients(model, exact_policy())
    assert all(torch.equal(one, other) for one, other in zip(exact, plain, strict=True))


class Twice(nn.Module):
    """A softmax that a product of batches reads as it is, another in a part of it."""

    def __init__(self, *, part: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inwards = nn.Linear(HEADS * WIDTH, HEADS * WIDTH)
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        scores = self.inwards(x).view(BATCH, TOKENS, HEADS * WIDTH)
        weights = torch.softmax(scores, dim=-1)
        other = scores.transpose(1, 2)
        if self.part:  # one example's weights for all
            weights = weights[:1].expand(BATCH, -1, -1)
        found: Tensor = weights @ other
        return found


@pytest.mark.parametrize("part", [False, True])
def test_a_softmax_has_one_code_for_itself_and_for_the_product_behind(part: bool) -> None:
    """Only where the product reads all of it."""
    model = Twice(part=part)
    plain, _ = gradients(model, plain_policy())
    coded, sites = gradients(model, coded_policy(8))
    assert distance(coded, plain) < 0.02
    softmax = sites["softmax[0]"]
    assert softmax.treatment.method is Method.MINMAX
    _, four = gradients(model, coded_policy(4))
    methods = [each.treatment.method for name, each in four.items() if "matmul" in name]
    assert (Method.REDERIVE in methods) is not part
