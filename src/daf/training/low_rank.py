"""Low-rank differences beside frozen weights (LoRA; Hu et al., ICLR 2022), by PEFT."""

import warnings
from pathlib import Path
from typing import Any

from torch import nn

from daf.core.errors import DataError

_ALPHA = 2  # times the rank: what scales a difference, over the rank, is 2 whatever the rank
# What PEFT calls the classes of Transformers whose names end so.
_KINDS = {"SequenceClassification": "SEQ_CLS", "CausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM"}
_HEADS = ("classifier", "score")  # of Transformers' models; they are new, and so trained whole


def load_peft() -> Any:
    """Import PEFT; raises DataError if it is not installed."""
    try:
        import peft
    except ModuleNotFoundError as error:
        raise DataError(
            f"--lora needs the package {error.name!r}; try: pip install 'daf-train[lora]'"
        ) from error
    return peft


def with_low_rank(model: nn.Module, rank: int) -> nn.Module:
    """Freeze a model of Transformers; train differences of ``rank`` in its attention, and heads.

    Which layers they are, PEFT knows by the model's type (queries and values of RoBERTa). Raises
    DataError where it does not, or the model has no configuration.
    """
    peft, name = load_peft(), type(model).__name__
    kind = next((kind for end, kind in _KINDS.items() if name.endswith(end)), None)
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=_ALPHA * rank,
        task_type=kind,
        modules_to_save=[each for each in _HEADS if hasattr(model, each)] or None,
        fan_in_fan_out=any(type(each).__name__ == "Conv1D" for each in model.modules()),
    )
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # between libraries
            adapted: nn.Module = peft.get_peft_model(model, config)
    except (ValueError, AttributeError, KeyError) as error:
        raise DataError(
            f"asked for --lora {rank} on a {name}; PEFT found: {error}; try a "
            "model of Transformers, or a factory that adapts its model itself"
        ) from error
    return adapted


def write_adapter(model: nn.Module, folder: Path) -> None:
    """Write what ``with_low_rank`` trains, for ``peft.PeftModel.from_pretrained``, to its owner."""
    folder.mkdir(mode=0o700, exist_ok=True)  # as weights are private
    model.save_pretrained(str(folder), save_embedding_layers=False)  # type: ignore[operator]
