"""A GPT-2 with LoRA; its module imports transformers, which is an extra and heavy."""

from __future__ import annotations

from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from daf_bench.workloads.lora import adapt_attention
from daf_bench.workloads.tokens import BYTE_PAIR_VOCABULARY


def gpt2_lora(context: int = 512) -> nn.Module:
    """GPT-2's shape at a size that two cores can train (6 layers, 384 wide), frozen and adapted.

    Its vocabulary is GPT-2's, whatever the data's symbols.
    """
    return _adapted(context, layers=6, width=384, heads=6)


def gpt2_medium_lora(context: int = 1024) -> nn.Module:
    """GPT-2 Medium's shape (24 layers, 1024 wide), frozen and adapted: for a GPU."""
    return _adapted(context, layers=24, width=1024, heads=16)


def _adapted(context: int, layers: int, width: int, heads: int) -> nn.Module:
    config = GPT2Config(
        vocab_size=BYTE_PAIR_VOCABULARY,
        n_positions=context,
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return adapt_attention(GPT2LMHeadModel(config), width)
