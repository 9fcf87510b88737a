"""What plans say that codes hold, beside what execution holds, where tensors share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.core.policy import Method
from daf.core.profile import Profile, Saving
from daf.planning.candidate import Candidate
from daf.planning.option_costs import OptionCosts
from daf.planning.options import Allowed, OptionMaker, families
from daf.planning.table import lawful, level_selection, make_table
from daf.session.session import Session

CODES_ONLY = Allowed(methods=frozenset(Method) - {Method.SPILL}, replay=False)
WIDTH = 64


class Made(nn.Module):
    """Modules, and a function of them and the input."""

    def __init__(self, forward: Callable[[Made, Tensor], Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self._forward = forward
        self.inner = nn.ModuleDict(modules)

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


class HeldOnly(OptionCosts):
    """Costs without what comes back to life in backward."""

    def _decoded_bytes(self, saving: Saving) -> float:
        return 0.0


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def two_norms(net: Made, x: Tensor) -> Tensor:
    """As GPT-NeoX's blocks: two normalisations of one tensor."""
    y = net.inner["into"](x)
    first, second = (net.inner[a](net.inner[n](y)) for a, n in (("a", "na"), ("b", "nb")))
    return y + first + second


def three_activations(net: Made, x: Tensor) -> Tensor:
    """As adaptive normalisations: activations of one condition."""
    y = net.inner["into"](x)
    return sum((net.inner[name](F.silu(y)) for name in "abc"), torch.zeros(()))


def signs(net: Made, x: Tensor) -> Tensor:
    y = net.inner["into"](x)
    return F.hardtanh(y) + F.leaky_relu(y) + F.relu6(y)


def one_mask(net: Made, x: Tensor) -> Tensor:
    """A mask that many operators save."""
    y, chosen = net.inner["into"](x), x > 0
    for name in "abc":
        y = torch.where(chosen, net.inner[name](y), 0.0)
    return y


MODELS: dict[str, Callable[[], nn.Module]] = {
    "two norms": lambda: Made(
        two_norms,
        **{name: linear() for name in ("into", "a", "b")},
        **{name: nn.LayerNorm(WIDTH) for name in ("na", "nb")},
    ),
    "activations": lambda: Made(
        three_activations, into=linear(), a=linear(), b=linear(), c=linear()
    ),
    "signs": lambda: Made(signs, into=linear()),
    "mask": lambda: Made(one_mask, into=linear(), a=linear(), b=linear(), c=linear()),
}


def square_mean(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def profile_of(model: nn.Module, batch: Tensor) -> Profile:
    with Session(model, torch.optim.SGD(model.parameters(), 0.1), "8GB") as session:
        session.prepare(batch, square_mean)
        assert session.profile is not None
        return session.profile


def told_and_held(
    model: nn.Module, batch: Tensor, profile: Profile, selection: Sequence[int]
) -> tuple[float, int]:
    """Bytes at all treated sites: as the options have it, and as a capture holds them."""
    table = make_table(profile, len(batch), CODES_ONLY)
    maker, groups = OptionMaker(profile, len(batch), CODES_ONLY), families(profile.savings)
    maker._costs = HeldOnly(profile, len(batch), 0)
    told, treated = 0.0, set()
    for column in selection:
        family = int(table.family_of[column])
        option = maker.options(groups[family])[column - int(table.first[family])]
        assert {saving.site for saving in groups[family]} == option.treatments.keys() or not (
            option.treatments
        )
        told += sum(span.nbytes for span in option.spans) if option.treatments else 0.0
        treated |= option.treatments.keys()
    policy = Candidate(table, tuple(selection)).as_plan(10**11, "optimal").policy
    capture = Capture(model)
    with capture.step(policy, 0, 0, batch=batch):
        square_mean(model, batch)
    held = {each.site: each.held_bytes for each in capture.sites()}
    return told, sum(held[site] for site in treated)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("level", ["exact", "8", "2"])
def test_codes_hold_what_plans_say(name: str, level: str) -> None:
    torch.manual_seed(0)
    # So large that copies of a normalisation's gamma and beta, which do not grow, are below 1 %.
    model, batch = MODELS[name](), torch.randn(128, 32, WIDTH)
    profile = profile_of(model, batch)
    table = make_table(profile, len(batch), CODES_ONLY)
    selection = list(level_selection(table, level))
    selection[-1] = int(table.first[-2])  # one is kept: every site has a treatment of its own then
    told, held = told_and_held(model, batch, profile, lawful(table, selection))
    assert told == pytest.approx(held, rel=0.01)


class Shared(nn.Module):
    """A head of two branches; the second branch's input may be no normalisation's."""

    def __init__(self, *, normed: bool) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(3, 16, 3, padding=1) for _ in range(2))
        self.na, self.nb = nn.BatchNorm2d(16), nn.BatchNorm2d(16) if normed else nn.Identity()
        self.head = nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first, second = F.relu(self.na(self.a(x))), self.nb(self.b(x))
        return self.head(first).mean((2, 3)) + self.head(second).mean((2, 3))


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("widths", [("8", "1"), ("1", "8"), ("4", "2")])
def test_a_site_of_several_tensors_asks_for_the_fewest_bits(
    normed: bool, widths: tuple[str, str]
) -> None:
    torch.manual_seed(0)
    model, batch = Shared(normed=normed), torch.randn(16, 3, 32, 32)
    profile = profile_of(model, batch)
    table = make_table(profile, 16, CODES_ONLY)
    selection = [int(first) for first in table.first[:-1]]
    wanted = {"na:batch_norm": widths[0], "nb:batch_norm": widths[1], "head:conv2d": "1"}
    for word, level in wanted.items():
        for family, options in enumerate(table.options):
            if any(word in str(site) for site in options[-1].treatments):
                column = table.column_of(family, level)
                assert column is not None
                selection[family] = column
    told, held = told_and_held(model, batch, profile, lawful(table, selection))
    assert told == pytest.approx(held, rel=0.02) if normed else told > 0.98 * held


class LanguageModel(nn.Module):
    """Rows of few features, and logits that are many times as large."""

    def __init__(self, words: int = 8192, width: int = 32) -> None:
        super().__init__()
        self.words, self.width = nn.Embedding(words, width), width
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.norm(self.words(tokens)))
        return scores


def test_a_gradient_that_the_loss_makes_is_as_large_for_smaller_pieces() -> None:
    """However many chunks of rows there are, the loss is one operator."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())

    torch.manual_seed(0)
    model, batch = LanguageModel(), torch.randint(0, 8192, (64, 64))
    with Session(model, torch.optim.SGD(model.parameters(), 0.1), "8GB") as session:
        session.prepare(batch, loss)
        with session._keeper.unbounded():
            profile = session._plan_controller.step_profiles.profile(
                session._context(batch, loss), 10**10, own=session.profile
            )
    made = [each for each in profile.savings if each.site.operator == "autograd.Function"]
    assert model.head.weight.nbytes in [each.storage_bytes.at(1) for each in made]
    assert model.head.weight.nbytes in [each.storage_bytes.at(64) for each in made]
