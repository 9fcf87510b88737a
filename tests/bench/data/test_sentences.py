"""Sentence tasks, spoken digits, tokens and metrics: what is read, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from daf_bench.accuracy.metrics import classification_metrics, correlation_metrics, token_metrics
from daf_bench.data.sentence_tasks import SentenceData
from daf_bench.data.spoken import load_known_speakers, read_spoken_digits
from daf_bench.data.tokens import ByteTokenizer
from torch import Tensor, nn

from daf.core.errors import DataError
from daf.training.callbacks import Observer
from daf.training.data import load_data
from daf.training.data.images import ImageData
from daf.training.loop import train
from daf.training.models import find_model
from daf.training.settings import TrainSettings
from daf.training.task import BatchOrder, Goal, settle_goal

LINES = {
    "sst2": ["a stirring , funny film\t1", 'the " plot " is thin\t0', "so so\t1", "dull\t0"],
    "mrpc": ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", '1\t7\t8\tHe said "yes\tYes , he said'],
    "stsb": ["main-captions\tMSRvid\t2012test\t0001\t3.800\tA man plays.\tA man plays a flute."],
    "e2e": ["name : The Vaults | Type : pub||The Vaults is a pub . ", "name : Aromi||Aromi ."],
}
SHARED = Path(os.environ.get("DAF_SHARED_DATA", Path(__file__).parents[4] / "shared" / "data"))


def write(folder: Path, kind: str, lines: list[str] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("train.txt", "valid.txt") if kind == "e2e" else ("train.tsv", "dev.tsv")
    for name in names:
        (folder / name).write_text("\n".join(lines or LINES[kind]) + "\n", "utf-8")
    return folder


def sentences(name: str, **options: object) -> SentenceData:
    data = load_data(name, **options)  # type: ignore[arg-type]
    assert isinstance(data, SentenceData)
    return data


def text_of(row: np.ndarray) -> str:
    return "".join(chr(symbol) if symbol < 256 else "|.#"[symbol - 256] for symbol in row)


def test_sst2_byte_by_byte(tmp_path: Path) -> None:
    data = sentences(f"sst2:{write(tmp_path, 'sst2')}", context=24)
    assert text_of(data.train.tokens[1]) == 'the " plot " is thin.###'
    assert data.train.targets.tolist() == [1, 0, 1, 0]
    assert data.train.lengths.tolist() == [24, 21, 6, 5]
    assert data.facts == {"vocabulary": 259, "context": 24, "classes": 2}


def test_pairs_keep_quotation_marks_and_mark_the_first_text(tmp_path: Path) -> None:
    data = sentences(f"mrpc:{write(tmp_path, 'mrpc')}", context=40)
    assert len(data.train) == 1  # the header is none
    assert text_of(data.train.tokens[0]).startswith('He said "yes|Yes , he said.#')
    assert data.train.prompts.tolist() == [13]


def test_scores_are_not_classes(tmp_path: Path) -> None:
    data = sentences(f"stsb:{write(tmp_path, 'stsb')}")
    assert data.train.targets.tolist() == pytest.approx([3.8])
    assert (data.classes, data.facts["classes"]) == (0, 1)


def test_a_text_is_asked_for_and_its_prompt_is_not(tmp_path: Path) -> None:
    data = sentences(f"e2e:{write(tmp_path, 'e2e')}", context=64)
    task = data.make_task(Goal.CAUSAL, nn.Identity())
    tokens, counts, targets = task.test_batch(np.array([1]))
    asked = targets[0] != -100
    assert text_of(targets[0][asked].numpy()) == "Aromi .."  # the last is the end
    assert text_of(tokens[0][: int(counts.sum())].numpy()) == "name : Aromi|Aromi .."
    places = asked.nonzero().flatten()
    assert torch.equal(tokens[0][places + 1], targets[0][places])


@pytest.mark.parametrize(
    ("kind", "line", "found"),
    [
        ("sst2", "no label", "line 1: expected sentence TAB 0 or 1"),
        ("sst2", "odd\t2", "label '2'"),
        ("stsb", "a\tb\tc\td\t9.0\te\tf", "score 9.0"),
        ("stsb", "a\tb\tc", "found 'a\\\\tb\\\\tc'"),
        ("e2e", "name : The Vaults", "no text"),
    ],
)
def test_lines_that_say_something_else(tmp_path: Path, kind: str, line: str, found: str) -> None:
    with pytest.raises(DataError, match=found):
        load_data(f"{kind}:{write(tmp_path, kind, [line])}")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no train.tsv in it"):
        load_data(f"sst2:{tmp_path}")
    with pytest.raises(DataError, match="without saying where"):
        load_data("mrpc")
    folder = write(tmp_path, "sst2")
    with pytest.raises(DataError, match="no such folder; name a model's"):
        load_data(f"sst2:{folder}", tokenizer=str(tmp_path / "none"))
    with pytest.raises(DataError, match=r"--tokenizer .*, which it does not take"):
        load_data("digits", tokenizer=str(folder))
    with pytest.raises(DataError, match="--image-size 32, which it does not take"):
        load_data(f"sst2:{folder}", image_size=32)
    with pytest.raises(DataError, match="holds no examples"):
        load_data(f"sst2:{write(tmp_path / 'empty', 'sst2', ['  '])}")


def test_models_and_sentences_must_fit(tmp_path: Path) -> None:
    data = sentences(f"sst2:{write(tmp_path, 'sst2')}")
    assert settle_goal("mine", None, data) is Goal.JUDGE
    with pytest.raises(DataError, match="'resnet18' has the goal 'classify'"):
        settle_goal("resnet18", Goal.CLASSIFY, data)
    with pytest.raises(DataError, match="'pretrained:x' has the goal 'judge', but 'digits' serves"):
        settle_goal("pretrained:x", Goal.JUDGE, load_data("digits"))
    with pytest.raises(DataError, match=r"no config\.json in it"):
        find_model(f"pretrained:{tmp_path}").build(data.facts)


class Bag(nn.Module):
    """The mean of the counted tokens' vectors, and one layer."""

    def __init__(self, vocabulary: int = 259, classes: int = 2) -> None:
        super().__init__()
        self.vectors = nn.Embedding(vocabulary, 16)
        self.head = nn.Linear(16, classes)

    def forward(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        weights = attention_mask[..., None] / attention_mask.sum(1)[:, None, None]
        scores: Tensor = self.head((self.vectors(tokens) * weights).sum(1))
        return scores


@pytest.mark.parametrize("kind", ["sst2", "stsb"])
def test_a_model_learns_sentences(tmp_path: Path, kind: str) -> None:
    lines = [
        line
        for word, score in (("good", 1), ("bad", 0)) * 16
        for line in [
            f"{word} film\t{score}" if kind == "sst2" else f"a\tb\tc\td\t{score}.0\t{word}\tfilm"
        ]
    ]
    data = sentences(f"{kind}:{write(tmp_path, kind, lines)}", context=12)
    torch.manual_seed(0)
    model = Bag(classes=data.facts["classes"])
    task = data.make_task(Goal.JUDGE, model)
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    order = BatchOrder(task.train_examples, 8, seed=0)
    for step in range(40):
        optimizer.zero_grad()
        loss = task.loss(model, task.train_batch(order.indices(step), np.random.default_rng(0)))
        assert isinstance(loss, Tensor)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        total, weight = task.score(model, task.test_batch(np.arange(32)))
    assert weight == 32
    assert task.metric(total / weight) == 100.0 if kind == "sst2" else total / weight < 0.02


def test_daf_train_reads_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "data", "sst2", LINES["sst2"] * 4)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    settings = TrainSettings(
        f"{Path(__file__).stem}:Bag",
        f"sst2:{folder}",
        batch_size=4,
        max_steps=3,
        bits=2,
        context=32,
    )
    summary = train(settings, tmp_path / "run", Observer(), resume=False)
    assert summary["finished"]
    assert summary["steps"] == 3
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == [1, 2, 3]


def test_bytes_are_cut_at_the_end() -> None:
    tokens, length, prompt = ByteTokenizer().row("abc", "de", 5)
    assert (tokens, length, prompt) == ([97, 98, 99, 256, 100], 5, 4)


# --- spoken digits ------------------------------------------------------------------------------


def write_spoken(path: Path, **changes: np.ndarray) -> Path:
    time_s = np.arange(8000) / 8000
    tones = np.stack([np.sin(2 * np.pi * (300 + 250 * n) * time_s) for n in range(10)])
    audio = (np.concatenate([tones, 0.5 * tones, 0.7 * tones]) * 20_000).astype(np.int16)
    arrays = {
        "audio": audio,
        "label": np.tile(np.arange(10), 3).astype(np.uint8),
        "speaker": np.repeat(np.arange(3), 10).astype(np.uint8),
    }
    np.savez(path, **(arrays | changes))
    return path


def test_every_second_clip_of_each_speaker_s_digit_is_for_testing(tmp_path: Path) -> None:
    count = 10 * 2 * 6
    audio = (np.random.default_rng(0).standard_normal((count, 8000)) * 3000).astype(np.int16)
    order = np.random.default_rng(1).permutation(count)
    labels, speakers = np.arange(count)[order] % 10, (np.arange(count)[order] // 10) % 2
    path = write_spoken(tmp_path / "s.npz", audio=audio, label=labels, speaker=speakers)
    data, whole = load_known_speakers(path), read_spoken_digits(path)
    assert (len(data.train), len(data.test)) == (60, 60)
    seen = [{image.tobytes() for image in each.images} for each in (data.train, data.test)]
    assert len(seen[0] | seen[1]) == count
    for part in seen:
        mine = np.array([image.tobytes() in part for image in whole.clips.images])
        kinds = whole.speakers[mine] * 10 + whole.clips.labels[mine]
        assert (np.bincount(kinds) == 3).all()


def test_the_last_speaker_is_kept_for_testing(tmp_path: Path) -> None:
    data = load_data(f"spoken:{write_spoken(tmp_path / 's.npz')}")
    assert isinstance(data, ImageData)
    assert (len(data.train), len(data.test)) == (20, 10)
    assert data.facts == {"classes": 10, "channels": 1, "image_size": 32}
    loudest = data.test.images[..., 0].mean(2).argmax(1)  # the band of each tone
    assert (np.diff(loudest.astype(int)) > 0).all()
    # Loudness is taken out: the same tone looks the same, but for rounding, however loud.
    difference = data.train.images[:10].astype(int) - data.test.images
    assert np.median(np.abs(difference)) <= 8


def test_spoken_files_of_something_else_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        load_data(f"spoken:{tmp_path / 'none.npz'}")
    np.savez(tmp_path / "x.npz", audio=np.zeros(3))
    with pytest.raises(DataError, match="missing label, speaker"):
        load_data(f"spoken:{tmp_path / 'x.npz'}")
    one = write_spoken(tmp_path / "one.npz", speaker=np.zeros(30, np.uint8))
    with pytest.raises(DataError, match="it takes two"):
        load_data(f"spoken:{one}")
    wrong = write_spoken(tmp_path / "wrong.npz", audio=np.zeros((30, 8000)))
    with pytest.raises(DataError, match="found float64"):
        load_data(f"spoken:{wrong}")
    short = write_spoken(tmp_path / "short.npz", label=np.zeros(3, np.uint8))
    with pytest.raises(DataError, match="as many labels"):
        load_data(f"spoken:{short}")


# --- metrics ------------------------------------------------------------------------------------


def test_metrics_by_hand() -> None:
    scores = np.array([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    found = classification_metrics(scores, np.array([1, 1, 0, 0]))
    assert found == {"accuracy_percent": 50.0, "f1_percent": 50.0}
    three = classification_metrics(np.eye(3), np.array([0, 1, 2]))
    assert three == {"accuracy_percent": 100.0}
    rising = correlation_metrics(np.array([1.0, 2.0, 9.0]), np.array([1.0, 2.0, 3.0]))
    assert rising["spearman_percent"] == pytest.approx(100.0)
    assert rising["pearson_percent"] == pytest.approx(100 * 8 / np.sqrt(2 * 38))
    assert correlation_metrics(np.ones(3), np.arange(3.0))["pearson_percent"] == 0.0
    assert token_metrics(8.0, 4)["perplexity"] == pytest.approx(np.exp(2))
    with pytest.raises(DataError, match="one prediction for each"):
        classification_metrics(scores, np.array([1]))
    with pytest.raises(DataError, match="no tokens"):
        token_metrics(0.0, 0)


# --- the published files ------------------------------------------------------------------------


@pytest.mark.shared_data
@pytest.mark.parametrize(
    ("kind", "folder", "train_examples", "test_examples"),
    [
        ("sst2", "glue/SST-2", 6920, 872),
        ("mrpc", "glue/MRPC", 3668, 408),
        ("stsb", "glue/STS-B", 5749, 1500),
        ("e2e", "e2e", 10_000, 4672),
    ],
)
def test_the_published_files(
    kind: str, folder: str, train_examples: int, test_examples: int
) -> None:
    if not (SHARED / folder).is_dir():
        pytest.skip(f"{SHARED / folder} is not there")
    data = sentences(f"{kind}:{SHARED / folder}")
    assert (len(data.train), len(data.test)) == (train_examples, test_examples)


@pytest.mark.shared_data
def test_the_published_spoken_digits() -> None:
    path = SHARED / "spoken_digits_8k_1s.npz"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    data = load_data(f"spoken:{path}")
    assert isinstance(data, ImageData)
    assert (len(data.train), len(data.test), len(data.classes)) == (900, 180, 10)
