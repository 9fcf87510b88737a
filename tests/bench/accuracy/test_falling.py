"""Training while planes go: importances of each kind, and a cap that falls and rises."""

from __future__ import annotations

import pytest
import torch
from daf_bench.accuracy.falling import BITS, KINDS, LEFT, FallingCap, falling_policy
from daf_bench.accuracy.policies import Example, is_refitted, make_policy
from daf_bench.accuracy.run import train_once
from daf_bench.accuracy.tasks import Effort, image_task
from torch import nn

from daf.capture.compress import compress
from daf.core.errors import UnknownNameError
from daf.core.policy import Need, Site

WEIGHTS = {Site(f"layer{place}", "conv2d", 0, 0): float(2**place) for place in range(6)}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, *[nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()])


def test_each_kind_has_the_importances_that_it_names() -> None:
    found = {kind: falling_policy(kind, WEIGHTS).weights for kind in KINDS}
    assert found["measured"] == WEIGHTS
    assert found["uniform"] == {}
    assert found["shuffled"] != WEIGHTS
    assert sorted(found["shuffled"].values()) == sorted(WEIGHTS.values())
    ordered = sorted(WEIGHTS, key=WEIGHTS.__getitem__)
    assert sorted(WEIGHTS, key=found["inverted"].__getitem__) == ordered[::-1]
    assert falling_policy("measured", {}).by_need[Need.LINEAR].bits == BITS


def test_planes_go_in_every_second_step_and_only_there() -> None:
    model, images = network(), torch.randn(16, 8, 64, 64)
    cap, coded = FallingCap(), compress(model, policy=falling_policy("uniform", {}))
    evicted, held = [], []
    for step in range(4):
        cap.rise(coded)
        assert coded.pool_bytes is None
        with coded:
            loss = model(images).square().mean()
        before = coded.stats.held_bytes
        cap.fall(step, coded)
        evicted.append(coded.stats.evicted_bytes)
        held.append(coded.stats.held_bytes / before)
        loss.backward()
    assert evicted[0] == evicted[2] == 0
    assert min(evicted[1], evicted[3]) > 0
    assert held[0] == held[2] == 1.0
    assert max(held[1], held[3]) < LEFT + 0.1
    assert 0.3 < cap.evicted_share < 0.7


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_of_each_kind_is_fitted_to_an_example(kind: str) -> None:
    model = network()
    example = Example(
        model, lambda model, batch: model(batch[0]).square().mean(), (torch.randn(8, 8, 32, 32),)
    )
    policy = make_policy(f"falling-{kind}", example)
    assert policy.name == f"falling-{kind}"
    assert bool(policy.weights) is is_refitted(policy.name) is (kind != "uniform")


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="there are falling-measured"):
        make_policy("falling-best", Example(network(), lambda *_: None, ()))


def test_a_run_tells_how_much_went() -> None:
    effort = Effort(most_steps=4, most_tests=32)
    row = train_once(image_task("resnet20", "digits", batch_size=64), "falling-measured", 0, effort)
    assert row["finished"]
    assert row["evicted_share"] > 0.2
    assert row["added_noise"] == []
    plain = train_once(image_task("resnet20", "digits", batch_size=64), "plain", 0, effort)
    assert plain["evicted_share"] is None
