"""Published language models over bytes, from ``transformers`` configurations (the extra).

The data's vocabulary (256 bytes and a mask symbol) makes them smaller than with word pieces.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
)

from daf.core.errors import DataError
from daf.training.task import Goal, trained_to


@trained_to(Goal.MASKED)
def bert_small(vocabulary: int = 257, context: int = 128) -> nn.Module:
    """Return BERT-small: 4 layers, 512 wide, 8 heads (Turc et al., arXiv 1908.08962, table 1)."""
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        intermediate_size=2048,
        max_position_embeddings=context,
    )
    model: nn.Module = BertForMaskedLM(config)
    return model


@trained_to(Goal.CAUSAL)
def gpt2(vocabulary: int = 257, context: int = 128) -> nn.Module:
    """Return GPT-2's smallest shape: 12 layers, 768 wide, 12 heads (Radford et al., 2019)."""
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=context,
        n_layer=12,
        n_embd=768,
        n_head=12,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: nn.Module = GPT2LMHeadModel(config)
    return model


@trained_to(Goal.JUDGE)
def pretrained(path: str, classes: int) -> nn.Module:
    """Return a local folder's encoder with a new head: ``classes`` logits, or 1 for a score.

    Raises:
        DataError: ``transformers`` saved no model in the folder.
    """
    if not (Path(path) / "config.json").is_file():
        raise DataError(
            f"asked for pretrained:{path}, but there is no config.json in it; "
            "name a folder that transformers' save_pretrained wrote"
        )
    model: nn.Module = AutoModelForSequenceClassification.from_pretrained(
        path, num_labels=classes, local_files_only=True, ignore_mismatched_sizes=True
    )
    model.train()
    return model
