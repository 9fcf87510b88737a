"""``daf train`` from the outside: what it prints, returns and leaves behind."""

from __future__ import annotations

import errno
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up import MB
from PIL import Image
from safetensors.torch import load_file

from daf.files.records import extent_of, read_json, write_json
from daf.memory import process_memory
from daf.memory.recycling_allocator import unsupported_reason

SPECIFIED_KEYS = {
    *("budget_bytes", "floor_bytes", "peak_bytes", "predicted_peak_bytes"),
    *("saved_bytes_plain", "saved_bytes_peak", "micro_batch"),
    *("step_ms_median", "examples_per_s", "loss", "metric"),
}
UNWANTED_IN_TRAINING = {
    "daf_bench",
    "matplotlib",
    "scipy",
    "sklearn",
    "transformers",
    "PIL",
    "pandas",
}
Daf = Callable[..., Any]


def options(model: str, out: str = "run", **more: object) -> list[str]:
    """The arguments of a short run on digits with batches of 32 on one thread."""
    settings = {"budget": "none", "batch-size": 32, "max-steps": 4, "threads": 1} | {
        name.replace("_", "-"): value for name, value in more.items()
    }
    pairs = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    return ["train", model, *pairs, "--out", out]


def room_here() -> int:
    """A budget with room for a run whatever earlier tests have left in this process."""
    return process_memory.resident_bytes() + 800 * MB


def lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_a_second_run_begins_with_what_the_first_one_measured(
    daf: Daf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAF_CACHE", str(tmp_path / "kept"))
    budget = room_here()
    began = []
    for out, more in (("one", []), ("two", []), ("three", ["--no-cache"])):
        ran = daf(*options("tiny_models:classifier", out, budget=budget), *more, "--json")
        assert ran.code == 0, ran.err
        began.append(ran.json["began_warm"])
    assert began == [False, True, False]


def test_a_run_within_a_budget_leaves_everything_it_promises(daf_process: Daf) -> None:
    ran = daf_process(*options("tiny_models:tells_of_itself", budget="1GB", max_steps=3), "--json")
    assert ran.code == 0, ran.err
    summary = ran.json
    assert summary == read_json(Path("run/summary.json"))
    assert set(summary) >= SPECIFIED_KEYS
    assert None not in [summary[key] for key in SPECIFIED_KEYS]
    assert summary["floor_bytes"] < summary["peak_bytes"] <= summary["budget_bytes"] == 10**9
    assert 0 < summary["predicted_peak_bytes"] <= 10**9
    assert summary["metric_name"] == "test_accuracy_percent"
    assert summary["finished"]

    steps = lines("run/metrics.jsonl")
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert summary["loss"] == pytest.approx(sum(line["loss"] for line in steps) / 3)
    assert summary["step_ms_median"] == sorted(line["step_ms"] for line in steps)[1]
    assert max(line["peak_bytes"] for line in steps) <= summary["peak_bytes"]
    samples = [line["resident_bytes"] for line in lines("run/memory.jsonl") if "mark" not in line]
    assert samples
    # The summary is written while the process still lives, and a little after it is sampled.
    assert max(samples) <= summary["peak_bytes"] + 2**20

    weights = load_file("run/model.safetensors")
    assert (
        sum(t.numel() for n, t in weights.items() if "running" not in n and "num" not in n)
        == (summary["parameters"])
    )
    assert Path("run/memory.png").read_bytes().startswith(b"\x89PNG")
    modules = {name.partition(".")[0] for name in Path("modules.txt").read_text().split()}
    assert modules & UNWANTED_IN_TRAINING == set()
    assert Path("test_batches.txt").read_text() == f"{359 % 16} 16"  # half a training batch
    assert not list(Path("run").rglob("*.part"))


def test_a_budget_that_moves_is_in_the_run_s_records_and_its_picture(daf_drawing: Daf) -> None:
    budget = room_here()
    lower = budget - 100 * MB
    ran = daf_drawing(*options("tiny_models:squeezes", budget=budget, max_steps=3), "--json")
    assert ran.code == 0, ran.err
    folder = Path("run")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["budget_bytes"] for line in lines] == [budget, lower, lower]
    assert [len(line["budget_changes"]) for line in lines] == [0, 1, 0]
    change = lines[1]["budget_changes"][0]
    assert (change["budget_bytes"], change["reason"]) == (lower, "as asked")
    assert change["evicted_bytes"] == 0
    for name, extent in ran.json["logs"].items():
        assert extent_of(folder / name) == tuple(extent), "the summary does not tell of all lines"
    memory = [json.loads(line) for line in (folder / "memory.jsonl").read_text().splitlines()]
    budgets = [line for line in memory if "budget_bytes" in line]
    assert [line["budget_bytes"] for line in budgets] == [budget, lower]
    assert budgets[1]["seconds"] == change["time_s"] > budgets[0]["seconds"]
    assert ran.json["budget_bytes"] == lower
    assert (folder / "memory.png").stat().st_size > 0


@pytest.mark.parametrize("asked", ["auto", "0.5", "50%"])
def test_a_budget_may_be_automatic_or_a_fraction(daf: Daf, asked: str) -> None:
    ran = daf(*options("tiny_models:classifier", budget=asked, max_steps=1), "--json")
    assert ran.code == 0, ran.err
    assert ran.json["peak_bytes"] <= ran.json["budget_bytes"]
    stored = json.loads((Path("run") / "run.json").read_text())["budget"]
    assert stored == ("auto" if asked == "auto" else 0.5)


@pytest.mark.parametrize("bounded", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_an_interrupted_run_goes_on_to_the_same_result_bit_for_bit(
    daf: Daf, daf_process: Daf, monkeypatch: pytest.MonkeyPatch, bounded: bool
) -> None:
    """In a process of its own, which knows of the run what its folder says."""
    fixed: dict[str, object] = {"max_steps": 7, "epochs": 2, "momentum": 0.8}
    if bounded:
        fixed |= {"budget": room_here(), "bits": 2}
    whole = daf(*options("tiny_models:interrupts", "whole", **fixed), "--json")
    assert whole.code == 0, whole.err

    with monkeypatch.context() as patched:
        patched.setenv("INTERRUPT_AT_STEP", "4")
        first = daf(*options("tiny_models:interrupts", "cut", **fixed))
    assert first.code == 130, first.err
    assert "stopped after step 4" in first.err
    begun = json.loads(Path("cut/summary.json").read_text())
    assert not begun["finished"]
    advice = first.err.strip().splitlines()[-1].rpartition("daf ")[2].split()
    assert advice == ["train", "--resume", "--out", "cut"]

    second = daf_process(*advice, "--json")
    assert second.code == 0, second.err
    assert second.json["finished"]
    assert [line["step"] for line in lines("cut/metrics.jsonl")] == list(range(1, 8))
    for name in ("loss", "metric", "micro_batch", "policy"):
        assert second.json[name] == whole.json[name]
    assert second.json["predicted_peak_bytes"] == begun["predicted_peak_bytes"]
    losses = [[line["loss"] for line in lines(f"{run}/metrics.jsonl")] for run in ("whole", "cut")]
    assert losses[0] == losses[1]
    same = (
        Path("cut/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()
    )
    assert same


def test_a_finished_run_can_be_lengthened_to_the_same_result(daf: Daf) -> None:
    assert daf(*options("tiny_models:classifier", "whole", max_steps=6), "--json").code == 0
    assert daf(*options("tiny_models:classifier", "short", max_steps=3), "--json").code == 0
    longer = daf("train", "--resume", "--out", "short", "--max-steps", "6", "--json")
    assert longer.json["steps"] == 6
    # An evaluation in between leaves no trace in what is learned.
    assert len(longer.json["evaluations"]) == 2
    ours, theirs = (Path(run, "model.safetensors").read_bytes() for run in ("short", "whole"))
    assert ours == theirs


def test_a_second_ctrl_c_abandons_the_step_and_keeps_the_checkpoint(daf: Daf) -> None:
    ran = daf(*options("tiny_models:interrupts_twice", checkpoint_every=1))
    assert ran.code == 130
    assert "abandoned" in ran.err
    assert "daf train --resume --out run" in ran.err
    assert [line["step"] for line in lines("run/metrics.jsonl")] == [1]


def test_training_learns_and_repeats_itself(daf: Daf) -> None:
    model = "tiny_models:classifier"
    learned = daf(*options(model, max_steps=80, epochs=2, lr=0.1), "--json").json
    assert learned["metric"] > 70
    assert learned["loss"] < 1.2
    # Five steps an epoch: both see the second epoch's order too.
    short = {"max_steps": 8, "epochs": 2, "lr": 0.1, "batch_size": 256}
    runs = [daf(*options(model, name, **short), "--json").json for name in ("a", "b")]
    assert (runs[0]["loss"], runs[0]["metric"]) == (runs[1]["loss"], runs[1]["metric"])
    other = daf(*options(model, "c", **short, seed=1), "--json").json
    assert other["loss"] != runs[0]["loss"]


def test_every_kind_of_task_trains(daf: Daf, workplace: Path) -> None:
    (workplace / "t.txt").write_bytes(bytes(range(256)) * 40)
    (workplace / "small_models.py").write_text(
        "import daf_bench.data.denoising\n"
        "from torch import nn\n"
        "def bytes_model(vocabulary):\n"
        "    return nn.Sequential(nn.Embedding(vocabulary, 16), nn.Linear(16, vocabulary))\n"
        "def image_model(channels):\n"
        "    return nn.Conv2d(channels, channels, 3, padding=1)\n"
    )
    text = ("text:t.txt", "--context", "16", "--max-steps", "30", "--json", "--lr", "0.05")
    causal = daf(*options("small_models:bytes_model", "c"), *text).json
    masked = daf(*options("small_models:bytes_model", "m"), "--goal", "masked", *text).json
    noise = daf(*options("small_models:image_model", "n"), "--goal", "denoise", "--json").json
    assert (causal["metric_name"], causal["optimizer"]) == ("test_perplexity", "adamw")
    assert causal["metric"] < 30  # of 257: the next byte follows from the last one
    assert masked["metric_name"] == "test_masked_loss"
    assert noise["metric_name"] == "test_mean_squared_error"


@pytest.mark.thorough
def test_cifar10_trains_with_its_augmentation_and_without(daf: Daf) -> None:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (40, 32, 32, 3), np.uint8)
    labels = np.arange(40) % 10
    np.savez("c.npz", x_train=images, y_train=labels, x_test=images[:8], y_test=labels[:8])
    short = ("--max-steps", "2", "--batch-size", "8", "--json")
    losses = [
        daf(*options("resnet20", name), "cifar10:c.npz", *short, *more).json["loss"]
        for name, more in (("a", ()), ("b", ("--augment",)), ("c", ("--no-augment",)))
    ]
    assert losses[0] == losses[1] != losses[2]


def test_lines_say_what_goes_on_where_there_is_no_terminal(daf: Daf) -> None:
    ran = daf(*options("tiny_models:classifier", budget="2GB", bits="exact"))
    assert ran.code == 0
    for expected in ("plan:", "step 4/4", "examples/s", "of 2.00 GB", "test_accuracy_percent"):
        assert expected in ran.out


# Bad input: one clear line on stderr, exit code 2, nothing left behind.


def refused(ran: Any, *words: str, code: int = 2) -> str:
    assert ran.code == code, ran.out
    assert "Traceback" not in ran.err
    for word in words:
        assert word in ran.err
    return str(ran.err)


@pytest.mark.thorough
def test_a_capped_pool_gives_up_bits_and_says_so(daf: Daf) -> None:
    asked = options("resnet20", bits=4, pool_bytes="2.5MB")
    summary = daf(*asked, "--json").json
    assert summary["pool_bytes"] == 2_500_000
    assert summary["evicted_bytes"] > 4 * 10**6  # of four steps that need 4 MB each
    steps = lines("run/metrics.jsonl")
    assert sum(line["evicted_bytes"] for line in steps) == summary["evicted_bytes"]
    again = daf(*options("resnet20", "again", bits=4, pool_bytes="2.5MB", max_steps=1))
    assert "evicted" in again.out
    wide = {"bits": 4, "pool_bytes": "8MB", "max_steps": 1}
    roomy = daf(*options("resnet20", "roomy", **wide), "--json").json
    assert roomy["evicted_bytes"] == 0


@pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason()))
@pytest.mark.parametrize("bounded", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_recorded_step_names_the_layers_and_changes_no_result(daf: Daf, bounded: bool) -> None:
    budget = room_here() if bounded else "none"
    shown = daf(*options("resnet20", budget=budget, bits=2), "--history")
    assert shown.code == 0, shown.err
    (trace,) = pickle.loads(Path("run/history.pickle").read_bytes())["device_traces"]
    modules = {event["frames"][0]["filename"] for event in trace}
    assert modules >= {"conv1", "conv1 (backward)", "linear"}
    assert sum(event["size"] for event in trace if event["action"] == "alloc") > 2**24
    assert daf(*options("resnet20", "unseen", budget=budget, bits=2)).code == 0
    assert not Path("unseen/history.pickle").exists()
    losses = [[line["loss"] for line in lines(f"{run}/metrics.jsonl")] for run in ("run", "unseen")]
    assert losses[0] == losses[1]


def test_gradients_are_released_with_the_same_result_and_refusals_are_told(daf: Daf) -> None:
    model = "tiny_models:classifier"
    kept = daf(*options(model, "kept"), "--json").json
    asked = (*options(model, "released"), "--release-gradients")
    released = daf(*asked, "--json").json
    assert released["loss"] == kept["loss"]
    assert (released["release_gradients"], released["release_refusal"]) == (True, "")
    assert {line["released_gradients"] for line in lines("released/metrics.jsonl")} == {6}
    assert {line["released_gradients"] for line in lines("kept/metrics.jsonl")} == {0}
    hooked = daf(*options("tiny_models:hooked", "hooked"), "--release-gradients")
    assert "gradients are not released: parameter 'head.weight' has a hook" in hooked.out


def test_a_pool_that_one_bit_does_not_fit_is_refused(daf: Daf) -> None:
    ran = daf(*options("resnet20", bits=4, pool_bytes="1MB"))
    assert ran.code != 0
    assert "cap 1000000" in ran.err
    assert "raise the cap" in ran.err


def test_an_impossible_budget_is_refused_with_the_least_that_could(daf: Daf) -> None:
    ran = daf(*options("tiny_models:classifier", budget="20MB"), "--json")
    refused(ran, "asked for a budget of 20.0 MB", "The least budget that could")
    assert ran.json["error"]["kind"] == "BudgetError"
    assert ran.json["error"]["least_bytes"] > 20e6
    assert not Path("run").exists()


@pytest.mark.parametrize("budget", ["700XB", "lots", "-5MB", "0"])
def test_a_budget_that_cannot_be_read_is_refused(daf: Daf, budget: str) -> None:
    ran = daf(*options("tiny_models:classifier", budget=budget), "--json")
    refused(ran, budget)
    assert ran.json["error"]["kind"] == "UnitError"


def test_an_unknown_unit_is_named(daf: Daf) -> None:
    refused(daf(*options("resnet18", budget="700XB")), "unknown unit 'XB'", "MiB")


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["resnet81"], "'resnet18'"),
        (["resnet18", "digts"], "digits"),
        (["tiny_models:clasifier"], "'classifier'"),
        (["resnet18", "--optimizer", "adam"], "adamw"),
        (["resnet18", "--memory-format", "nhwc"], "channels_last"),
        (["resnet18", "--bits", "9"], "1 to 8, exact, plain"),
    ],
)
def test_an_unknown_name_is_answered_with_known_ones(
    daf: Daf, arguments: list[str], meant: str
) -> None:
    ran = daf("train", *arguments, "--budget", "none", "--out", "run")
    refused(ran, meant)
    assert "unknown" in ran.err or "no factory" in ran.err
    assert not Path("run").exists()


def test_missing_and_truncated_data_are_refused(daf: Daf) -> None:
    Path("short.npz").write_bytes(b"PK\x03\x04 and no more")
    for data, words in (("cifar10:gone.npz", "no such file"), ("cifar10:short.npz", "truncated")):
        refused(daf("train", "resnet20", data, "--budget", "none", "--out", "run"), data[8:], words)
    assert not Path("run").exists()


def test_a_run_folder_is_not_overwritten(daf: Daf) -> None:
    daf(*options("tiny_models:classifier", max_steps=1), "--json")
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    refused(daf(*options("tiny_models:classifier")), "already holds a run", "--resume", "--out")
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before


def test_resuming_what_is_not_there_or_with_other_settings_is_refused(daf: Daf) -> None:
    refused(daf("train", "--resume", "--out", "nowhere"), "holds no run")
    daf(*options("tiny_models:classifier", max_steps=1), "--json")
    refused(daf("train", "--resume", "--out", "run", "--seed", "7"), "seed = 7", "was begun with 0")


def test_a_damaged_checkpoint_falls_back_to_the_one_before_and_two_are_refused(daf: Daf) -> None:
    model = "tiny_models:classifier"
    daf(*options(model, "whole", max_steps=6), "--json")
    daf(*options(model, max_steps=4, checkpoint_every=3), "--json")
    newest, before = (
        Path("run/checkpoint", f"{name}.safetensors") for name in ("state", "previous")
    )
    newest.write_bytes(newest.read_bytes()[:-50])
    log = Path("run/metrics.jsonl")
    log.write_bytes(log.read_bytes()[:-10])  # in the midst of step 4's line
    resumed = daf("train", "--resume", "--out", "run", "--max-steps", "6", "--json")
    assert resumed.code == 0, resumed.err
    (word,) = resumed.json["warnings"]
    assert "cannot read run/checkpoint/state.safetensors" in word
    assert "going on from the checkpoint before it, after step 3" in word
    assert [line["step"] for line in lines("run/metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    ours, theirs = (Path(run, "model.safetensors").read_bytes() for run in ("run", "whole"))
    assert ours == theirs
    for path in (newest, before):
        path.write_bytes(path.read_bytes()[:-50])
    refused(daf("train", "--resume", "--out", "run"), "state.safetensors", "previous.safetensors")


def test_an_older_checkpoint_in_the_newest_one_s_place_is_told(daf: Daf) -> None:
    """Whole, of the same step, but from before the evaluation that ended the run."""
    daf(*options("tiny_models:classifier", max_steps=4, checkpoint_every=2), "--json")
    checkpoints = Path("run/checkpoint")
    older = (checkpoints / "previous.safetensors").read_bytes()
    (checkpoints / "state.safetensors").write_bytes(older)
    resumed = daf("train", "--resume", "--out", "run", "--max-steps", "6", "--json")
    assert resumed.code == 0, resumed.err
    (word,) = resumed.json["warnings"]
    assert "evaluations after steps [4] are lost: run/checkpoint/state.safetensors" in word
    again = daf("train", "--resume", "--out", "run", "--max-steps", "7", "--json")
    assert again.json["warnings"] == []


def test_resuming_says_what_code_the_folder_names_and_where_it_is(
    daf: Daf, workplace: Path
) -> None:
    first = daf(*options("tiny_models:classifier", max_steps=1), "--json")
    assert "importing" not in first.err  # its user has just typed the name
    resumed = daf("train", "--resume", "--out", "run", "--json")
    place = workplace / "tiny_models.py"
    assert f"names the model 'tiny_models:classifier': importing it from {place}" in resumed.err
    assert "names the data" not in resumed.err  # installed with DAF
    settings = read_json(Path("run/run.json"))
    write_json(Path("run/run.json"), settings | {"data": "gone.away:loader"})
    refused(
        daf("train", "--resume", "--out", "run"),
        "names the data 'gone.away:loader': importing it from nowhere",
        "there is no module",
    )


@pytest.mark.parametrize("left_out", [False, True])
def test_images_that_cannot_be_read_are_left_out_only_if_asked_and_told(
    daf: Daf, workplace: Path, left_out: bool
) -> None:
    for label in ("a", "b"):
        (workplace / "images" / label).mkdir(parents=True)
        for number in range(12):
            image = Image.new("L", (9, 9), 20 * number)
            image.save(workplace / "images" / label / f"{number}.png")
    (workplace / "images" / "a" / "3.png").write_bytes(b"no image")
    asked = [*options("resnet20", batch_size=4, max_steps=1), "images:images", "--image-size", "8"]
    ran = daf(*asked, "--json", *(["--leave-out-unreadable"] if left_out else []))
    if not left_out:
        refused(ran, "1 of 24 images", "a/3.png", "--leave-out-unreadable")
        return
    assert ran.code == 0, ran.err
    (word,) = ran.json["warnings"]
    assert word.startswith("left out: images/a/3.png")


def test_logs_that_were_cut_or_damaged_never_prevent_resuming_and_are_told(daf: Daf) -> None:
    daf(*options("tiny_models:classifier", max_steps=4), "--json")
    for name, kept in (("memory", 60), ("metrics", -10)):  # bytes: both in mid-line
        log = Path(f"run/{name}.jsonl")
        log.write_bytes(log.read_bytes()[:kept])
    resumed = daf("train", "--resume", "--out", "run", "--max-steps", "6", "--json")
    assert resumed.code == 0, resumed.err
    assert resumed.json["steps"] == 6
    lost, also_lost, counted = resumed.json["warnings"]
    assert "metrics.jsonl has lost or changed lines" in lost
    assert "memory.jsonl has lost or changed lines" in also_lost
    assert "holds 5 whole lines of 6 steps" in counted
    assert [line["step"] for line in lines("run/metrics.jsonl")] == [1, 2, 3, 5, 6]
    assert daf("report", "run").code == 0
    again = daf("train", "--resume", "--out", "run", "--max-steps", "7", "--json")
    assert again.code == 0, again.err


def test_a_non_finite_loss_stops_and_keeps_the_weights_from_before_it(daf: Daf) -> None:
    ran = daf(*options("tiny_models:explodes", budget="2GB", bits="exact"), "--json")
    refused(ran, "loss became", "head", "model.safetensors holds the weights after 2", code=3)
    assert ran.json["error"]["kind"] == "NonFiniteLossError"
    good = daf(*options("tiny_models:classifier", "good", max_steps=2, budget="2GB", bits="exact"))
    assert good.code == 0
    ours, theirs = (Path(run, "model.safetensors").read_bytes() for run in ("run", "good"))
    assert ours == theirs


def test_weights_that_are_not_finite_never_replace_good_ones(daf: Daf) -> None:
    ran = daf(*options("tiny_models:classifier", max_steps=60, epochs=2, lr=1e38), "--json")
    refused(ran, "inf or NaN" if "weights became" in ran.err else "loss became", code=3)
    kept = load_file("run/model.safetensors")
    assert all(bool(tensor.isfinite().all()) for tensor in kept.values())


def full_disk_from_write(number: int) -> Callable[[int], None]:
    done = 0

    def fsync(_: int) -> None:
        nonlocal done
        done += 1
        if done >= number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return fsync


def test_a_full_disk_stops_the_run_and_keeps_what_was_written(
    daf: Daf, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        # Settings and the first checkpoint are synced with their folders, and two logs: six in all.
        patched.setattr(os, "fsync", full_disk_from_write(8))
        ran = daf(*options("tiny_models:classifier", checkpoint_every=1))
    refused(ran, "disk is full", "state.safetensors is still the version from before")
    assert not list(Path("run").rglob("*.part"))
    again = daf("train", "--resume", "--out", "run", "--json")
    assert again.json["finished"]
    assert [line["step"] for line in lines("run/metrics.jsonl")] == [1, 2, 3, 4]


def test_a_batch_larger_than_the_data_is_refused(daf: Daf) -> None:
    refused(
        daf(*options("tiny_models:classifier", batch_size=5000)), "there are 1438", "--batch-size"
    )


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [(["train"], "MODEL"), (["train", "resnet18"], "--budget"), (["train", "--resume"], "--out")],
)
def test_what_is_missing_is_said(daf: Daf, arguments: list[str], missing: str) -> None:
    ran = daf(*arguments)
    assert ran.code == 2
    assert missing in ran.err


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"--budget": "none", "--bits": 3, "--policy": "sage"}, "give one of the two"),
        ({"--budget": "700MB", "--bits": 3, "--policy": "sage"}, "give one of the two"),
        ({"--budget": "700MB", "--fused": None}, "leave fused out"),
        ({"--budget": "none", "--operators": "pytorch", "--fused": None}, "leave fused out"),
        ({"--budget": "none", "--seed": 10**20}, "--seed"),
        ({"--budget": "none", "--threads": 100_000}, "--threads"),
        ({"--budget": "none", "--tolerance": "nan"}, "--tolerance"),
    ],
)
def test_what_excludes_each_other_is_one_clear_error(
    daf: Daf, asked: dict[str, Any], words: str
) -> None:
    given = [str(each) for pair in asked.items() for each in pair if each is not None]
    refused(daf("train", "resnet20", "--max-steps", "1", "--out", "run", *given), words)


def test_data_of_a_factory_that_returns_something_else_are_refused(
    daf: Daf, workplace: Path
) -> None:
    (workplace / "odd.py").write_text("from torch import nn\ndef data():\n    return nn.ReLU()\n")
    refused(daf("train", "resnet20", "odd:data", "--budget", "none", "--out", "run"), "serves none")


def test_activations_go_as_a_whole_from_a_pool_that_grows_by_steps(daf: Daf) -> None:
    pool = {"pool_bytes": "2.5MB", "pool_evicts": "activations", "pool_growth": "1MB"}
    summary = daf(*options("resnet20", bits=4, max_steps=1, **pool), "--json").json
    assert summary["evicted_bytes"] > 10**6
    typed = daf(*options("resnet20", "typed", pool_evicts="tensors"))
    refused(typed, "unknown --pool-evicts 'tensors'; known: planes, activations")


WITHOUT_TESTS = """
import torch
import torch.nn.functional as F
from torch import nn
from daf.training.task import Goal, Task


def model(classes):
    return nn.Linear(8, classes)


def lazy(classes):
    return nn.LazyLinear(classes)


class Data:
    name, goals, facts = "bare", (Goal.CLASSIFY,), {"classes": 4}

    def make_task(self, goal, model, **options):
        return Learning(64, 0)


class Uncounted(Data):
    def make_task(self, goal, model, **options):
        return Learning(64, 4)


class InTensors(Data):
    def make_task(self, goal, model, **options):
        return Half(64, 4)


class Unweighed(Data):
    def make_task(self, goal, model, **options):
        return Alone(64, 4)


class Mapped(Data):
    def make_task(self, goal, model, **options):
        return OfMappings(64, 4)


class Learning(Task):
    metric_name = "nothing"

    def train_batch(self, indices, generator):
        return torch.randn(len(indices), 8), torch.arange(len(indices)) % 4

    def test_batch(self, indices):
        return self.train_batch(indices, None)

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    def score(self, model, batch):
        return 0.0, 0.0


class Half(Learning):
    def score(self, model, batch):
        return torch.tensor(0.5 * len(batch[0])), torch.tensor(len(batch[0]))


class OfMappings(Learning):
    def train_batch(self, indices, generator):
        inputs, labels = super().train_batch(indices, generator)
        return {"inputs": inputs, "names": ["one"], "labels": labels}

    def loss(self, model, batch):
        return F.cross_entropy(model(batch["inputs"]), batch["labels"])


class Alone(Learning):
    def score(self, model, batch):
        return torch.tensor(0.5)
"""


@pytest.mark.parametrize("data", ["Data", "Uncounted"])
def test_data_of_which_no_test_example_counts_train_without_a_metric(
    daf: Daf, workplace: Path, data: str
) -> None:
    (workplace / "bare.py").write_text(WITHOUT_TESTS)
    asked = ("train", "bare:model", f"bare:{data}", "--batch-size", "32", "--budget", "none")
    ran = daf(*asked, "--out", "run", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["metric"] is None
    assert ran.json["steps"] == 2
    assert Path("run/model.safetensors").exists()


@pytest.mark.parametrize(("model", "data"), [("lazy", "Data"), ("model", "Mapped")])
def test_models_may_be_built_later_and_batches_be_any_nest(
    daf: Daf, workplace: Path, model: str, data: str
) -> None:
    (workplace / "bare.py").write_text(WITHOUT_TESTS)
    asked = ("train", f"bare:{model}", f"bare:{data}", "--batch-size", "32", "--budget", "1GB")
    ran = daf(*asked, "--out", "run", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["steps"] == 2


def test_scores_may_be_tensors_and_must_be_two(daf: Daf, workplace: Path) -> None:
    (workplace / "bare.py").write_text(WITHOUT_TESTS)
    asked = ("train", "bare:model", "bare:InTensors", "--batch-size", "32", "--budget", "none")
    ran = daf(*asked, "--out", "tensors", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["metric"] == 0.5
    refused = daf(*asked[:2], "bare:Unweighed", *asked[3:], "--out", "alone")
    assert refused.code == 2
    assert "asked Task.score for" in refused.err
    assert "return two numbers" in refused.err


@pytest.mark.parametrize("option", ["policy", "tolerance"])
def test_what_only_a_plan_keeps_is_refused_without_a_budget(daf: Daf, option: str) -> None:
    value = {"policy": "sage", "tolerance": "0.1"}[option]
    ran = daf(*options("tiny_models:classifier", budget="none", **{option: value}))
    refused(ran, "without a budget, so nothing is planned; give one")
