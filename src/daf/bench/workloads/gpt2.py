"""A GPT-2 with LoRA; its module imports transformers, which is an extra and heavy."""

from __future__ import annotations

from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from daf.bench.workloads.lora import adapt_attention
from daf.bench.workloads.tokens import BYTE_PAIR_VOCABULARY


def gpt2_lora(context: int = 512) -> nn.Module:
    """GPT-2's shape at a size that two cores can train (6 layers, 384 wide), frozen and adapted.

    Its vocabulary is GPT-2's, whatever the data's symbols.
    """
    width = 384
    config = GPT2Config(
        vocab_size=BYTE_PAIR_VOCABULARY,
        n_positions=context,
        n_layer=6,
        n_embd=width,
        n_head=6,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return adapt_attention(GPT2LMHeadModel(config), width)
