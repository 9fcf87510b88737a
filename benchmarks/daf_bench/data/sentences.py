"""Sentence tasks in their published files: SST-2, MRPC, STS-B and E2E.

Quotation marks have no special meaning. The test part is ``dev`` (E2E: ``valid``), as is usual
where the test part's labels are withheld.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from daf.core.errors import DataError
from daf_bench.data.guarded_files import text_lines
from daf_bench.data.sentence_tasks import NO_CLASSES, SentenceData
from daf_bench.data.tokens import Tokenizer, TokenRows, make_tokenizer, token_rows

DEFAULT_CONTEXT = 64
_BETWEEN = "||"

Example = tuple[str, str | None, float]


@dataclass(frozen=True, slots=True)
class _Form:
    """The form of a task's files: the parts' names, a header or none, a line's content."""

    train: tuple[str, ...]
    test: tuple[str, ...]
    header: bool
    read: Callable[[str], Example]
    says: str
    classes: int
    generates: bool = False


def _sst2(line: str) -> Example:
    sentence, label = line.split("\t")
    return sentence, None, _one_of(label, 2)


def _mrpc(line: str) -> Example:
    label, _, _, first, second = line.split("\t")
    return first, second, _one_of(label, 2)


def _stsb(line: str) -> Example:
    fields = line.split("\t")
    score = float(fields[4])
    if not 0.0 <= score <= 5.0:
        raise ValueError(f"score {score}")
    return fields[5], fields[6], score


def _e2e(line: str) -> Example:
    meaning, found, text = line.partition(_BETWEEN)
    if not found or not text.strip():
        raise ValueError("no text")
    return meaning.strip(), text.strip(), 0.0


def _one_of(label: str, classes: int) -> float:
    if label.strip() not in map(str, range(classes)):
        raise ValueError(f"label {label!r}")
    return float(label)


_TSV = (("train.tsv",), ("dev.tsv",))
_FORMS: Mapping[str, _Form] = {
    "sst2": _Form(*_TSV, False, _sst2, "sentence TAB 0 or 1", 2),
    "mrpc": _Form(*_TSV, True, _mrpc, "0 or 1, two ids and two sentences, TAB between", 2),
    "stsb": _Form(
        *_TSV, False, _stsb, "score 0 to 5 in column 5, sentences in 6 and 7, TABs", NO_CLASSES
    ),
    "e2e": _Form(
        ("train.txt", "train_10k.txt"),
        ("valid.txt", "dev.txt"),
        False,
        _e2e,
        "a meaning representation || a text",
        NO_CLASSES,
        generates=True,
    ),
}


def load_sentences(
    kind: str, path: Path, context: int = DEFAULT_CONTEXT, tokenizer: str | None = None
) -> SentenceData:
    """Read a task as published in the folder ``path``, cut to ``context`` tokens a row.

    ``tokenizer``: folder of a model; None: byte by byte.

    Raises:
        DataError: a file is missing, or a line has another form.
    """
    form = _FORMS[kind]
    parts = (_read(_existing(kind, path, names), form) for names in (form.train, form.test))
    return in_tokens(f"{kind}:{path}", parts, form.classes, context, tokenizer, form.generates)


def in_tokens(
    name: str,
    parts: Iterable[Sequence[Example]],
    classes: int,
    context: int,
    tokenizer: str | None,
    generates: bool,
) -> SentenceData:
    """Return two ``parts``, training and test examples, as rows of ``context`` tokens.

    ``tokenizer``: folder of a model; None: byte by byte.

    Raises:
        DataError: a row of ``context`` tokens is too short, or the folder holds no tokenizer.
    """
    if context < 2:
        raise DataError(f"asked for {name} with a context of {context}; a row needs 2 tokens")
    splitter = make_tokenizer(tokenizer)
    train, test = (_rows(splitter, examples, context) for examples in parts)
    return SentenceData(name, train, test, classes, splitter.vocabulary, context, generates)


def _rows(splitter: Tokenizer, examples: Sequence[Example], context: int) -> TokenRows:
    texts = [(first, second) for first, second, _ in examples]
    return token_rows(splitter, texts, [target for _, _, target in examples], context)


load_sst2 = partial(load_sentences, "sst2")
load_mrpc = partial(load_sentences, "mrpc")
load_stsb = partial(load_sentences, "stsb")
load_e2e = partial(load_sentences, "e2e")


def _existing(kind: str, folder: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        if (folder / name).exists():
            return folder / name
    raise DataError(
        f"asked for {kind}:{folder}, but there is no {' or '.join(names)} in it; "
        "name the folder that holds the task's files"
    )


def _read(path: Path, form: _Form) -> list[Example]:
    examples = []
    for number, text in enumerate(text_lines(path, path.parent), 1):
        if not text.strip() or (form.header and number == 1):
            continue
        try:
            examples.append(form.read(text))
        except (ValueError, IndexError) as error:
            raise DataError(
                f"{path}, line {number}: expected {form.says} ({error}), found {text[:80]!r}"
            ) from error
    if not examples:
        raise DataError(f"{path} holds no examples; expected lines with {form.says}")
    return examples
