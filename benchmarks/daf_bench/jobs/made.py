"""Files of DAF's jobs: models' configurations, and as many examples as a few steps take.

Examples are the published files' first where these are at hand, else made up: bytes and time do not
depend on what they say, and nothing is learnt from so few.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

import numpy as np

from daf_bench.workloads.sources import Sources

# RoBERTa-base (Liu et al., arXiv 1907.11692, section 2.1); GPT-2 Medium (Radford et al., 2019).
ROBERTA_BASE: Mapping[str, Any] = {
    "model_type": "roberta",
    "architectures": ["RobertaForSequenceClassification"],
    "vocab_size": 50265,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
}
GPT2_MEDIUM: Mapping[str, Any] = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 1024,
    "n_layer": 24,
    "n_head": 16,
}
_SMALL = {
    "roberta": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    | {"intermediate_size": 64, "vocab_size": 300},
    "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 300},
}
_TESTS = 4  # examples: the run ends with an evaluation
_IMAGENET_PIXELS, _IMAGENET_CLASSES = 256, 8
_CIFAR_PIXELS = 32


class Asked(NamedTuple):
    """Where files are written, how many training examples, and where published ones may lie."""

    folder: Path
    examples: int
    sources: Sources


def write_model(config: Mapping[str, Any], classes: int, folder: Path, *, is_small: bool) -> None:
    """Write ``config.json``; ``classes``: logits of a head, where the model has one."""
    folder.mkdir()
    small = _SMALL[config["model_type"]] if is_small else {}
    text = json.dumps({**config, **small, "num_labels": classes})
    (folder / "config.json").write_text(text)


def write_lines(
    published: str, names: tuple[str, str], heading: str, made: Callable[[int], str], asked: Asked
) -> bool:
    """Write the two parts of a task of lines; True if they are the published files' first."""
    known = asked.sources.folder
    counts, is_published = (asked.examples, _TESTS), True
    for name, count in zip(names, counts, strict=True):
        found = None if known is None else _found(known / published, name)
        if found is None:
            is_published = False
            lines = [*([heading] if heading else []), *map(made, range(count))]
        else:
            with found.open(encoding="utf-8") as file:
                lines = [line.rstrip("\n") for line in islice(file, count + bool(heading))]
        (asked.folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return is_published


def _found(folder: Path, name: str) -> Path | None:
    path = Path(name)
    names = (name, f"{path.stem}_10k{path.suffix}")  # E2E's training part may be its first tenth
    return next((folder / each for each in names if (folder / each).is_file()), None)


def sst2(asked: Asked) -> bool:
    """SST-2: a sentence, a tab and its class."""
    names = ("train.tsv", "dev.tsv")
    return write_lines("glue/SST-2", names, "", lambda n: f"{_words(n)}\t{n % 2}", asked)


def mrpc(asked: Asked) -> bool:
    """MRPC: a heading; class, two numbers and two sentences."""
    heading = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"

    def made(number: int) -> str:
        return f"{number % 2}\t1\t2\t{_words(number)}\t{_words(number + 1)}"

    return write_lines("glue/MRPC", ("train.tsv", "dev.tsv"), heading, made, asked)


def stsb(asked: Asked) -> bool:
    """STS-B: a score in the fifth column, two sentences behind it."""

    def made(number: int) -> str:
        return f"a\tb\tc\td\t{number % 6}\t{_words(number)}\t{_words(number + 1)}"

    return write_lines("glue/STS-B", ("train.tsv", "dev.tsv"), "", made, asked)


def e2e(asked: Asked) -> bool:
    """E2E NLG: a meaning, two bars and its text."""
    names = ("train.txt", "valid.txt")
    return write_lines("e2e", names, "", lambda n: f"name[{n}]||{_words(n)}", asked)


def webnlg(asked: Asked) -> bool:
    """WebNLG's XML, whose texts are made up."""
    for name, count in (("train.xml", asked.examples), ("dev.xml", _TESTS)):
        (asked.folder / name).write_text("\n".join(_entries(count)), encoding="utf-8")
    return False


def _entries(count: int) -> Iterator[str]:
    yield "<benchmark><entries>"
    for number in range(count):
        triple = f"Place_{number} | country | Spain"
        yield f'<entry category="Food" eid="Id{number}" size="1"><modifiedtripleset>'
        yield f"<mtriple>{triple}</mtriple></modifiedtripleset>"
        yield f'<lex comment="good" lid="Id1">{escape(_words(number))}</lex></entry>'
    yield "</entries></benchmark>"


def cifar10(asked: Asked) -> bool:
    """CIFAR-10's folder of batches, of the subset's images or made-up ones."""
    images, labels, is_published = _images(asked, 10)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        content = {b"data": images, b"labels": labels}
        (asked.folder / name).write_bytes(pickle.dumps(content, protocol=2))
    return is_published


def cifar100(asked: Asked) -> bool:
    """CIFAR-100's folder; labels, and so all of it, are made up."""
    images, _, _ = _images(asked, 100)
    labels = [number % 100 for number in range(len(images))]
    for name, count in (("train", len(images)), ("test", _TESTS)):
        content = {b"data": images[:count], b"fine_labels": labels[:count]}
        (asked.folder / name).write_bytes(pickle.dumps(content, protocol=2))
    names = [f"class {number}".encode() for number in range(100)]
    (asked.folder / "meta").write_bytes(pickle.dumps({b"fine_label_names": names}, protocol=2))
    return False


def _images(asked: Asked, classes: int) -> tuple[np.ndarray, list[int], bool]:
    folder = asked.sources.folder
    path = None if folder is None else folder / "cifar10_10k_2k.npz"
    if path is None or not path.is_file():
        draw, shape = np.random.default_rng(0), (asked.examples, 3 * _CIFAR_PIXELS**2)
        return draw.integers(0, 256, shape, np.uint8), [0] * asked.examples, False
    with np.load(path) as arrays:
        images, labels = arrays["x_train"], arrays["y_train"]
    there = images[: asked.examples].transpose(0, 3, 1, 2).reshape(-1, 3 * _CIFAR_PIXELS**2)
    return np.ascontiguousarray(there), [int(each) % classes for each in labels[: len(there)]], True


def imagenet(asked: Asked) -> bool:
    """ImageNet's folders of classes, of made-up photographs."""
    from PIL import Image

    draw = np.random.default_rng(0)
    for part, count in (("train", asked.examples), ("val", _IMAGENET_CLASSES)):
        for number in range(max(count, _IMAGENET_CLASSES)):
            folder = asked.folder / part / f"n{number % _IMAGENET_CLASSES:08d}"
            folder.mkdir(parents=True, exist_ok=True)
            coarse = draw.integers(0, 256, (16, 16, 3), np.uint8)
            image = Image.fromarray(coarse).resize((_IMAGENET_PIXELS, _IMAGENET_PIXELS))
            image.save(folder / f"{number}.jpg")
    return False


def _words(number: int) -> str:
    return f"the {number}th place near the river serves good food, and is not expensive at all"
