"""What a Hugging Face folder's ``config.json`` describes, with random weights and random inputs."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from daf.core.errors import DataError
from daf.training.task import Batch, Goal, Indices, Task

_OF_ROWS = ("ForImageClassification", "ForSequenceClassification")  # one label each
_HEADS = (*_OF_ROWS, "LM", "LMHeadModel", "ForConditionalGeneration", "ForTokenClassification")
_CUSTOMARY = ("IMAGE_CLASSIFICATION", "MASKED_LM", "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM")


def random_model(path: str) -> nn.Module:
    """Build the model that the folder ``path`` describes, in the number format that it names."""
    config, kind = _described(Path(path))
    if (names := config.architectures or ()) and kind.__name__ not in names:
        words = f"{path} names {', '.join(names)}; planned as {kind.__name__}, which has a loss"
        warnings.warn(words, stacklevel=2)
    model: nn.Module = kind(config)
    return model.to(getattr(config, "dtype", None) or torch.float32)


class RandomInputs(Task):
    """Token ids [N, context], or images, for the folder ``path``; the loss is the model's own."""

    name, metric_name = "random_inputs", "loss"
    facts: Mapping[str, int] = {}

    def __init__(self, path: Path, context: int | None = None) -> None:
        super().__init__(train_examples=2**16, test_examples=0)
        self._config, self._kind = _described(path)
        most = getattr(self._config, "max_position_embeddings", None) or 128
        self._context = context or min(128, most)
        self.goals = (Goal.CLASSIFY if "pixel" in self._kind.main_input_name else Goal.CAUSAL,)

    def make_task(self, *_: Any, **__: Any) -> Task:
        """Return itself."""
        return self

    def train_batch(self, indices: Indices, generator: "np.random.Generator") -> Batch:
        rows, config, name = len(indices), self._config, self._kind.__name__
        classes = getattr(config.get_text_config(), "vocab_size", 0)
        draw = torch.Generator().manual_seed(int(generator.integers(2**32)))
        if self.goals[0].reads_images:
            size = getattr(config, "image_size", None) or 224
            sides = (size, size) if isinstance(size, int) else size
            shape = (rows, getattr(config, "num_channels", 3), *sides)
            inputs = torch.randn(shape, generator=draw, dtype=getattr(config, "dtype", None))
        else:
            inputs = torch.randint(classes, (rows, self._context), generator=draw)
        if name.endswith("Classification"):
            classes = config.num_labels
        shape = (rows,) if name.endswith(_OF_ROWS) else inputs.shape
        return inputs, torch.randint(classes, shape, generator=draw)

    def test_batch(self, indices: Indices) -> Batch:
        return self.train_batch(indices, np.random.default_rng(0))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        named = dict(zip((self._kind.main_input_name, "labels"), batch, strict=True))
        found: Tensor = model(**named).loss
        return found

    def score(self, model: nn.Module, batch: Batch) -> tuple[float, float]:
        return float(self.loss(model, batch)), 1.0


def _described(path: Path) -> tuple[Any, Any]:
    """Return the configuration and its model's class: the one that it names, or the customary."""
    if not (path / "config.json").is_file():
        raise DataError(f"asked for the model of folder {str(path)!r}; found no config.json in it")
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise DataError(f"asked for the model of {path / 'config.json'}; found: {error}") from error
    config.use_cache = False  # as Trainer does
    named = [getattr(transformers, name, None) for name in config.architectures or ()]
    maps = [getattr(transformers, f"MODEL_FOR_{each}_MAPPING") for each in _CUSTOMARY]
    for kind in (*named, *(each.get(type(config), None) for each in maps)):
        reads = getattr(kind, "main_input_name", None) in ("input_ids", "pixel_values")
        if reads and kind.__name__.endswith(_HEADS):
            return config, kind
    kind = config.model_type
    raise DataError(f"asked for a {kind} model; found none for texts or images; write a factory")
