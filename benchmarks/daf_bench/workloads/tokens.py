"""Texts as whole numbers: sentences padded to one length, and a long row of tokens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from daf.core.errors import DataError
from daf_bench.workloads.sources import Sources

PADDING, UNKNOWN = 0, 1
BYTE_PAIR_VOCABULARY = 50_257
_MADE_UP_SENTENCES, _MADE_UP_WORDS = 2_000, 10_000
_MADE_UP_TOKENS = 200_000
# Real texts follow Zipf's law; the exponent decides how often the frequent words come.
_ZIPF = 1.2


class Sentences(NamedTuple):
    """int32 words [N, length], 0 where a sentence has ended; int64 labels [N], 0 or 1."""

    words: NDArray[np.int32]
    labels: NDArray[np.int64]
    vocabulary: int


def load_sentences(sources: Sources, length: int) -> Sentences:
    """Sentences cut or padded to ``length`` words; the vocabulary is the file's own words."""
    if sources.sentences is None:
        return _made_up_sentences(length)
    texts, labels = _labelled_lines(sources.sentences)
    counts = Counter(word for text in texts for word in text)
    number = {word: place for place, (word, _) in enumerate(counts.most_common(), UNKNOWN + 1)}
    rows = [[number[word] for word in text] for text in texts]
    return Sentences(_padded(rows, length), np.array(labels, np.int64), UNKNOWN + 1 + len(number))


def _labelled_lines(path: Path) -> tuple[list[list[str]], list[int]]:
    lines = [line.rpartition("\t") for line in path.read_text().splitlines() if line]
    if not lines or any(label not in ("0", "1") for _, _, label in lines):
        raise DataError(f"{path}: expected lines of a sentence, a tab, and 0 or 1")
    return [text.split() for text, _, _ in lines], [int(label) for _, _, label in lines]


def _padded(rows: list[list[int]], length: int) -> NDArray[np.int32]:
    words = np.full((len(rows), length), PADDING, np.int32)
    for row, text in zip(words, rows, strict=True):
        row[: len(text)] = text[:length]
    return words


def _made_up_sentences(length: int) -> Sentences:
    generator = np.random.default_rng(0)
    sizes = generator.integers(3, min(50, length + 1), _MADE_UP_SENTENCES)
    rows = [_zipf(generator, int(size), _MADE_UP_WORDS, UNKNOWN + 1).tolist() for size in sizes]
    labels = generator.integers(0, 2, _MADE_UP_SENTENCES).astype(np.int64)
    return Sentences(_padded(rows, length), labels, UNKNOWN + 1 + _MADE_UP_WORDS)


def load_tokens(sources: Sources) -> NDArray[np.int32]:
    """One long row of tokens, each below ``BYTE_PAIR_VOCABULARY``."""
    if sources.restaurants is None or sources.byte_pairs is None:
        generator = np.random.default_rng(0)
        return _zipf(generator, _MADE_UP_TOKENS, BYTE_PAIR_VOCABULARY, 0)
    from tokenizers import ByteLevelBPETokenizer  # comes with the extra 'transformers'

    vocabulary, merges = sources.byte_pairs
    tokenizer = ByteLevelBPETokenizer(str(vocabulary), str(merges))
    text = sources.restaurants.read_text()
    return np.array(tokenizer.encode(text).ids, np.int32)


def _zipf(
    generator: np.random.Generator, count: int, vocabulary: int, first: int
) -> NDArray[np.int32]:
    ranks = generator.zipf(_ZIPF, count) % vocabulary
    return (ranks + first).astype(np.int32)
