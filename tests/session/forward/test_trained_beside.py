"""What other models of a script may take, while one of them is planned."""

import gc

import torch
from torch import nn

from daf.core.profile import Profile
from daf.session.forward.compress import BudgetedForward
from daf.session.forward.runner import MARGIN_BYTES, ForwardRunner, trained_beside_bytes


def planned(model: nn.Module, inputs: torch.Tensor) -> tuple[BudgetedForward, Profile]:
    """The model after one call, whose graph is gone, and what it was planned from."""
    budgeted = BudgetedForward(model, "4GB", tolerance=0)
    with budgeted:
        model(inputs)
    runner = budgeted._runner
    assert isinstance(runner, ForwardRunner)
    profiles = runner._plan_controller.selector.profiles
    assert profiles is not None
    return budgeted, profiles.own


def test_a_model_not_called_yet_counts_as_this_one_and_a_larger_one_twice() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budgeted, profile = planned(model, torch.randn(32, 64))
    saved = profile.plain_saved_bytes
    assert saved == 32 * 64 * 4  # the ReLU's result; the batch is the caller's own
    assert trained_beside_bytes(model, profile) == 0

    small, large = nn.Linear(8, 1), nn.Linear(64, 256)
    of_small = torch.optim.Adam(small.parameters())
    gradients, states = small.weight.nbytes + small.bias.nbytes, 2 * (9 * 4 + 0)
    beside = trained_beside_bytes(model, profile)
    assert saved + MARGIN_BYTES + gradients + states <= beside
    assert beside <= saved + MARGIN_BYTES + gradients + states + 64  # Adam's counters

    of_large = torch.optim.SGD(large.parameters(), lr=0.1)
    more = trained_beside_bytes(model, profile) - beside
    own = large.weight.nbytes + large.bias.nbytes
    assert more == own + 3 * saved + MARGIN_BYTES  # both unknown ones are taken for larger now
    budgeted.close()
    del optimizer, of_small, of_large


def test_of_a_model_that_was_called_only_what_is_not_alive_counts() -> None:
    model, other = nn.Linear(64, 8), nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other)]
    budgeted, profile = planned(model, torch.randn(32, 64))
    with BudgetedForward(other, "4GB", tolerance=0) as beside:
        loss = other(torch.randn(32, 64)).sum()
        assert beside._runner is not None
        other_gradients = sum(each.nbytes for each in other.parameters())
        assert trained_beside_bytes(model, profile) == other_gradients
        loss.backward()
        del loss
        saved = beside._runner.saved_bytes_peak
        assert saved == 32 * 64 * 4
        assert trained_beside_bytes(model, profile) == saved
    for each in (budgeted, beside):
        each.close()
    del optimizers


def test_a_partner_of_the_same_optimizer_counts_by_its_parameters() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    own = sum(each.nbytes for each in model.parameters())
    for partner in (nn.Linear(64, 8), nn.Linear(64, 640)):
        optimizer = torch.optim.SGD([*model.parameters(), *partner.parameters()], lr=0.1)
        budgeted, profile = planned(model, torch.randn(32, 64))
        gradients = sum(each.nbytes for each in partner.parameters())
        unknown = min(1.0, gradients / own) * (profile.plain_saved_bytes + MARGIN_BYTES)
        assert trained_beside_bytes(model, profile) == gradients + int(unknown)
        partner(torch.randn(1, 64)).sum().backward()
        assert trained_beside_bytes(model, profile) == int(unknown)
        budgeted.close()
        del optimizer, partner
        gc.collect()
