"""Where the workloads' data lie; what is absent is replaced by something that ships, and said."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_CIFAR = "cifar10_10k_2k.npz"
_SPOKEN = "spoken_digits_8k_1s.npz"


@dataclass(frozen=True, slots=True)
class Sources:
    """A folder with measuring data, or none: then digits, and made-up words.

    Only memory and time are measured on made-up words; nothing can be learnt from them.
    """

    folder: Path | None = None

    @property
    def images(self) -> str:
        """Images, in ``training.data``'s names."""
        file = self._file(_CIFAR)
        return f"cifar10:{file}" if file else "digits"

    @property
    def sentences(self) -> Path | None:
        """Lines of a sentence, a tab and 0 or 1 (SST-2's training part)."""
        return self._file("glue/SST-2/train.tsv")

    @property
    def restaurants(self) -> Path | None:
        """Lines of a meaning, two bars and the text for it (E2E NLG)."""
        return self._file("e2e/train_10k.txt")

    @property
    def spoken(self) -> Path | None:
        """Clips of spoken digits, an ``.npz`` (Free Spoken Digit Dataset)."""
        return self._file(_SPOKEN)

    @property
    def byte_pairs(self) -> tuple[Path, Path] | None:
        """GPT-2's vocabulary and merges."""
        vocabulary = self._file("gpt2_bpe/encoder.json")
        merges = self._file("gpt2_bpe/vocab.bpe")
        return (vocabulary, merges) if vocabulary and merges else None

    def described(self) -> str:
        """What is read, in words, without folders."""
        images = "CIFAR-10 subset" if self._file(_CIFAR) else "scikit-learn's digits"
        sentences = "SST-2" if self.sentences else "made-up sentences"
        tokens = "E2E in GPT-2's byte pairs" if self._has_tokens else "made-up tokens"
        clips = "spoken digits" if self.spoken else "scikit-learn's digits for clips"
        return f"{images}; {sentences}; {tokens}; {clips}"

    @property
    def _has_tokens(self) -> bool:
        return self.restaurants is not None and self.byte_pairs is not None

    def _file(self, name: str) -> Path | None:
        if self.folder is None or not (self.folder / name).is_file():
            return None
        return self.folder / name


def default_sources() -> Sources:
    """The folder that DAF_SHARED_DATA names, or ../shared/data."""
    folder = Path(os.environ.get("DAF_SHARED_DATA", "../shared/data"))
    return Sources(folder.absolute() if folder.is_dir() else None)
