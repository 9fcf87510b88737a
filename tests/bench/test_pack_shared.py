"""``daf bench pack --device cpu``: a helper's codes are those of the forward thread, in time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from daf_bench.offload.shared_memory import (
    COPIED,
    NO_CORE,
    OWN_CORE,
    PLAIN,
    SAME,
    Packing,
    SharedJob,
    Taken,
    figures_of,
    run,
    ways_of,
)
from daf_bench.workloads.sources import Sources
from torch import nn
from typer.testing import CliRunner

from daf.cli import app

IMAGES = torch.randn(16, 8, 64, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def helper() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as found:
        yield found


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())


def gradient(way: str, helper: ThreadPoolExecutor, most: float) -> tuple[torch.Tensor, Taken]:
    model = network()
    packing = Packing(ways_of(2)[way], 2, helper, most)
    if way == PLAIN:
        model(IMAGES).square().mean().backward()
    else:
        with packing.hooks():
            loss = model(IMAGES).square().mean()
        packing.finish()
        loss.backward()
    return torch.cat([each.grad.flatten() for each in model.parameters()]), packing.taken


@pytest.mark.parametrize("way", [OWN_CORE, NO_CORE, COPIED])
@pytest.mark.parametrize("most", [float("inf"), 1.0])
def test_a_helper_packs_what_the_forward_thread_would(
    way: str, most: float, helper: ThreadPoolExecutor
) -> None:
    ours, own = gradient(way, helper, most)
    same, told = gradient(SAME, helper, most)
    plain, _ = gradient(PLAIN, helper, most)
    assert torch.equal(ours, same)
    assert not torch.equal(ours, plain)
    # The images, an activation that its product saves, too, that product's, and the output.
    assert own.raw_bytes == told.raw_bytes == 3 * IMAGES.nbytes
    assert own.code_bytes == told.code_bytes < own.raw_bytes / 12
    assert own.copied_bytes == (own.raw_bytes if way == COPIED else 0)
    assert told.waiting_bytes == 0
    assert IMAGES.nbytes <= own.waiting_bytes <= (3 if most > 1.0 else 1) * IMAGES.nbytes


def test_a_helper_of_its_own_takes_a_core_from_forward() -> None:
    threads = {name: way.forward_threads for name, way in ways_of(4).items()}
    assert threads == {PLAIN: 4, SAME: 4, OWN_CORE: 3, NO_CORE: 4, COPIED: 3}
    assert ways_of(1)[OWN_CORE].forward_threads == 1
    assert [name for name, way in ways_of(4).items() if way.copies] == [COPIED]


def row(way: str, step: tuple[float, float], hidden_ms: float) -> dict[str, Any]:
    return {
        "workload": "w1",
        "way": way,
        "step_ms": 10.0 * step[0],
        "step_over_same": sum(step) / 2,
        "step_over_same_low": step[0],
        "step_over_same_high": step[1],
        "hidden_ms": hidden_ms,
        "packing_ms": 8.0,
        "exposed_ms": 8.0 - hidden_ms,
        "forward_ratio": 1.5,
        "copying_ms": 2.0,
    }


@pytest.mark.parametrize(
    ("step", "near", "pays"), [((0.8, 0.9), 0.9, 1), ((0.95, 1.05), 1.0, 0), ((1.1, 1.3), 1.1, 0)]
)
def test_a_helper_pays_where_its_whole_interval_says_so(
    step: tuple[float, float], near: float, pays: int
) -> None:
    rows = [row(OWN_CORE, (1.4, 1.6), 8.0), row(NO_CORE, step, 6.0), row(COPIED, (2.0, 2.0), 0.0)]
    figures = figures_of(rows)
    assert figures["helper_step_ratio_best"] == pytest.approx(near)
    assert (figures["helper_pays"], figures["helpers"]) == (pays, 2)
    assert figures["w1_hidden_share"] == 0.75
    assert figures["w1_copy_share"] == 0.25


def test_every_way_trains_in_turn() -> None:
    result = run(SharedJob(("w3",), rounds=6, is_small=True, sources=Sources()))
    by_way = {each["way"]: each for each in result.rows}
    assert list(by_way) == [PLAIN, SAME, OWN_CORE, NO_CORE, COPIED]
    assert by_way[PLAIN]["raw_bytes"] == by_way[PLAIN]["packing_ms"] == 0
    coded = [each for each in result.rows if each["way"] != PLAIN]
    assert len({each["code_bytes"] for each in coded}) == 1
    assert all(each["packing_ms"] > 0.0 for each in coded)
    assert by_way[COPIED]["copied_bytes"] == by_way[COPIED]["raw_bytes"] > 0
    assert not by_way[SAME]["keeps_up"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "npu"], "there are cuda and cpu"),
        (["--device", "cpu", "--picture", "x.png"], "no picture"),
    ],
)
def test_other_devices_and_pictures_are_refused(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["bench", "pack", *arguments])
    assert result.exit_code == 2
    assert said in result.output
