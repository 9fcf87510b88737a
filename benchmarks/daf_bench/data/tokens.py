"""Sentences as rows of tokens: by a tokenizer from a local folder, or byte by byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from daf.core.errors import DataError

TokenArray = NDArray[np.int32]
BYTE_VOCABULARY = 259  # every byte, a separator, an end, and padding
_SEPARATOR, _END, _PADDING = 256, 257, 258


@dataclass(frozen=True, slots=True)
class TokenRows:
    """int32 tokens [N, context], float32 targets [N], and tokens in each row and its prompt [N]."""

    tokens: TokenArray
    lengths: NDArray[np.int64]
    prompts: NDArray[np.int64]
    targets: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.lengths)


class Tokenizer(Protocol):
    """What turns texts into rows of tokens."""

    vocabulary: int

    def row(self, first: str, second: str | None, context: int) -> tuple[list[int], int, int]:
        """Return (``context`` tokens, how many count, how many belong to ``first``)."""


class ByteTokenizer:
    """UTF-8 bytes with a separator between two texts and an end; needs no files."""

    vocabulary = BYTE_VOCABULARY

    def row(self, first: str, second: str | None, context: int) -> tuple[list[int], int, int]:
        """Implement ``Tokenizer.row``; cut what is too long at the end."""
        prompt = list(first.encode())
        rest = [] if second is None else [_SEPARATOR, *second.encode()]
        tokens = [*prompt, *rest, _END][:context]
        padded = tokens + [_PADDING] * (context - len(tokens))
        return padded, len(tokens), min(len(tokens), len(prompt) + (second is not None))


class FolderTokenizer:
    """The tokenizer of a model's folder, read by ``transformers`` without network."""

    def __init__(self, folder: Path) -> None:
        """Read the tokenizer.

        Raises:
            DataError: the folder holds none, or ``transformers`` is not installed.
        """
        if not folder.is_dir():
            raise DataError(
                f"asked for the tokenizer in {folder}, but there is no such folder; name a model's "
                "folder with tokenizer.json or vocab.txt in it"
            )
        try:
            from transformers import AutoTokenizer
        except ModuleNotFoundError as error:
            raise DataError(
                "a tokenizer from a folder needs the package 'transformers'; "
                "try: pip install 'daf-train[transformers]'"
            ) from error
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{folder} holds no tokenizer that can be read: {error}") from error
        self.vocabulary = len(self._tokenizer)
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token

    def row(self, first: str, second: str | None, context: int) -> tuple[list[int], int, int]:
        """Implement ``Tokenizer.row``; cut what is too long from the longer text."""
        found = self._tokenizer(
            first, second, truncation=True, max_length=context, padding="max_length"
        )
        tokens, count = list(found["input_ids"]), int(sum(found["attention_mask"]))
        kinds = found.sequence_ids(0)
        return tokens, count, sum(kind == 0 for kind in kinds)


def make_tokenizer(folder: str | None) -> Tokenizer:
    """Return the tokenizer of a model's folder; None: byte by byte."""
    return ByteTokenizer() if folder is None else FolderTokenizer(Path(folder))


def token_rows(
    tokenizer: Tokenizer,
    texts: Sequence[tuple[str, str | None]],
    targets: Sequence[float],
    context: int,
) -> TokenRows:
    """Return all texts as rows of ``context`` tokens."""
    try:
        tokens = np.empty((len(texts), context), np.int32)
    except (MemoryError, ValueError) as error:
        raise DataError(f"asked for {len(texts)} rows of {context} tokens: {error}") from error
    lengths, prompts = np.empty((2, len(texts)), np.int64)
    for place, (first, second) in enumerate(texts):
        tokens[place], lengths[place], prompts[place] = tokenizer.row(first, second, context)
    return TokenRows(tokens, lengths, prompts, np.asarray(targets, np.float32))
