"""The text and the decoder that every host trains: words of E2E, in a Llama's shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from daf_bench.workloads.sources import Sources

PADDING, END, UNKNOWN = "[PAD]", "[END]", "[UNK]"
SPECIAL = (PADDING, END, UNKNOWN)
_MADE_UP_TOKENS, _ZIPF = 50_000, 1.2


class Shape(NamedTuple):
    """A decoder, windows of ``length`` tokens, and windows a batch."""

    length: int = 128
    batch_size: int = 32
    layers: int = 4
    width: int = 256
    heads: int = 4
    vocabulary: int = 4_096


SMALL = Shape(length=64, batch_size=64, layers=2, width=64, heads=2, vocabulary=512)


class Texts(NamedTuple):
    """int64 numbers of words, one after the other, and the words that they number."""

    numbers: NDArray[np.int64]
    words: list[str]

    def window(self, index: int, length: int) -> NDArray[np.int64]:
        """Window ``index`` of ``length`` words; after the last comes the first."""
        count = len(self.numbers) // length
        start = index % count * length
        return self.numbers[start : start + length]

    def sentence(self, index: int, length: int) -> str:
        """The same in words, with spaces between them."""
        return " ".join(self.words[number] for number in self.window(index, length))


class Rows(Dataset[dict[str, Tensor]]):
    """``count`` windows as a causal language model takes them."""

    def __init__(self, texts: Texts, length: int, count: int) -> None:
        self._texts, self._length, self._count = texts, length, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index >= self._count:
            raise IndexError(index)
        numbers = torch.from_numpy(self._texts.window(index, self._length).copy())
        return {"input_ids": numbers, "labels": numbers.clone()}


def load_texts(sources: Sources, vocabulary: int) -> Texts:
    """Return E2E in its most frequent words, or made-up words where the data is not there."""
    path = sources.restaurants
    if path is None:
        return _made_up(vocabulary)
    found = path.read_text().replace("||", " ").split()
    frequent = Counter(found).most_common(vocabulary - len(SPECIAL))
    words = [*SPECIAL, *(word for word, _ in frequent)]
    number = {word: place for place, word in enumerate(words)}
    unknown = number[UNKNOWN]
    return Texts(np.array([number.get(word, unknown) for word in found], np.int64), words)


def _made_up(vocabulary: int) -> Texts:
    count = vocabulary - len(SPECIAL)
    ranks = np.random.default_rng(0).zipf(_ZIPF, _MADE_UP_TOKENS) % count
    words = [*SPECIAL, *(f"w{place}" for place in range(count))]
    return Texts((ranks + len(SPECIAL)).astype(np.int64), words)


def make_model(shape: Shape, seed: int) -> nn.Module:
    """Return a decoder of random weights; it drops nothing out, so that parts add up."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=4 * shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.length,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model.train()


def make_tokenizer(texts: Texts) -> Any:
    """Return the tokenizer whose words are those of ``texts``."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    number = {word: place for place, word in enumerate(texts.words)}
    made = Tokenizer(WordLevel(number, unk_token=UNKNOWN))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=PADDING, eos_token=END, unk_token=UNKNOWN
    )


def sentences(texts: Texts, length: int, count: int) -> Iterator[str]:
    """``count`` windows in words."""
    return (texts.sentence(index, length) for index in range(count))
