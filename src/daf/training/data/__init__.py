"""Data sets by name; ``DATA_FORMS`` lists the names."""

from __future__ import annotations

import difflib
from pathlib import Path

from daf.core.errors import DataError, UnknownNameError
from daf.training.data.cifar import load_cifar10
from daf.training.data.contents import ImageData, TextData
from daf.training.data.digits import load_digits
from daf.training.data.folder import DEFAULT_SIZE, load_folder
from daf.training.data.sentences import DEFAULT_CONTEXT as SENTENCE_CONTEXT
from daf.training.data.sentences import SENTENCE_KINDS, load_sentences
from daf.training.data.spoken import load_spoken_digits
from daf.training.data.text import DEFAULT_CONTEXT, load_text
from daf.training.data.tokens import SentenceData, make_tokenizer

DATA_FORMS = (
    "digits",
    "cifar10:FILE.npz",
    "cifar10:FOLDER",
    "images:FOLDER",
    "text:FILE",
    "spoken:FILE.npz",
    *(f"{kind}:FOLDER" for kind in SENTENCE_KINDS),
)
_KINDS = ("digits", "cifar10", "images", "text", "spoken", *SENTENCE_KINDS)


def load_data(
    name: str,
    *,
    image_size: int | None = None,
    context: int | None = None,
    tokenizer: str | None = None,
) -> ImageData | TextData | SentenceData:
    """Read the data set called ``name`` into memory.

    Args:
        name: one of ``DATA_FORMS``.
        image_size: pixels per side of a batch's images; None: the data's own.
        context: bytes per window of text, None: 128; tokens per sentence, None: 64.
        tokenizer: folder of a model whose tokenizer splits sentences; None: byte by byte.

    Raises:
        UnknownNameError: ``name`` is not known.
        DataError: the data are missing, damaged, or do not come in that size.
    """
    kind, _, place = name.partition(":")
    if kind not in _KINDS:
        raise UnknownNameError(_unknown(name, kind))
    if kind != "digits" and not place:
        raise DataError(f"asked for {name!r} without saying where; give {_forms(kind)}")
    if kind == "digits" and place:
        raise DataError(f"asked for {name!r}; 'digits' come from scikit-learn and take no path")
    if kind in SENTENCE_KINDS:
        _refuse_image_size(name, image_size)
        length = SENTENCE_CONTEXT if context is None else context
        return load_sentences(kind, Path(place), make_tokenizer(tokenizer), length)
    if tokenizer is not None:
        raise DataError(f"asked for {name!r} with --tokenizer {tokenizer}; only sentences take one")
    if kind == "text":
        return _text(name, place, image_size, context)
    if context is not None:
        raise DataError(f"asked for {name!r} with --context {context}; only text has a context")
    if kind == "images":
        return load_folder(Path(place), image_size or DEFAULT_SIZE)
    if kind == "spoken":
        images = load_spoken_digits(Path(place))
    else:
        images = load_cifar10(Path(place)) if kind == "cifar10" else load_digits()
    return images.at_size(image_size) if image_size is not None else images


def _text(name: str, place: str, image_size: int | None, context: int | None) -> TextData:
    _refuse_image_size(name, image_size)
    return load_text(Path(place), DEFAULT_CONTEXT if context is None else context)


def _refuse_image_size(name: str, image_size: int | None) -> None:
    if image_size is not None:
        raise DataError(f"asked for {name!r} with --image-size {image_size}; text has no images")


def _unknown(name: str, kind: str) -> str:
    near = difflib.get_close_matches(kind.lower(), _KINDS, 1, cutoff=0.4)
    hint = f"did you mean {_forms(near[0])}? " if near else ""
    return f"unknown data {name!r}; {hint}Known: {', '.join(DATA_FORMS)}"


def _forms(kind: str) -> str:
    return " or ".join(form for form in DATA_FORMS if form.partition(":")[0] == kind)
