"""Architectures of the transformers library, built from tiny configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
ENCODER = SMALL | {"intermediate_size": 32, "max_position_embeddings": 40}
DECODER = ENCODER | {"num_key_value_heads": 1}


class Loss(nn.Module):
    """A model called with keywords; returns its loss, or the mean square of what it returns."""

    def __init__(self, model: nn.Module, keywords: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.keywords = keywords

    def forward(self) -> Tensor:
        result = self.model(**self.keywords)
        if getattr(result, "loss", None) is not None:
            return result.loss
        return result[0].square().mean()


def words(length: int = 12) -> Tensor:
    return torch.randint(2, 50, (2, length))


def text(head: str, config: str, **options: Any) -> Callable[[], tuple[nn.Module, tuple[()]]]:
    def build() -> tuple[nn.Module, tuple[()]]:
        model = getattr(transformers, head)(getattr(transformers, config)(**options))
        ids = words()
        return Loss(model, {"input_ids": ids, "labels": ids}), ()

    return build


def image(model: str, config: str, **options: Any) -> Callable[[], tuple[nn.Module, tuple[()]]]:
    def build() -> tuple[nn.Module, tuple[()]]:
        built = getattr(transformers, model)(getattr(transformers, config)(**options))
        return Loss(built, {"pixel_values": torch.randn(2, 3, 32, 32)}), ()

    return build


def masked_bert() -> tuple[nn.Module, tuple[()]]:
    config = transformers.BertConfig(**ENCODER, attn_implementation="eager")
    ids, seen = words(), torch.ones(2, 12, dtype=torch.long)
    seen[1, 7:] = 0
    model = transformers.BertForMaskedLM(config)
    return Loss(model, {"input_ids": ids, "attention_mask": seen, "labels": ids}), ()


def whisper() -> tuple[nn.Module, tuple[()]]:
    config = transformers.WhisperConfig(
        vocab_size=50,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        decoder_start_token_id=1,
        dropout=0.1,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    return Loss(model, {"input_features": torch.randn(2, 8, 32), "labels": words()}), ()


CASES: dict[str, Callable[[], tuple[nn.Module, tuple[()]]]] = {
    "bert": text("BertForMaskedLM", "BertConfig", **ENCODER),
    "bert-eager-masked": masked_bert,
    "roberta": text("RobertaForMaskedLM", "RobertaConfig", **ENCODER),
    "electra": text("ElectraForMaskedLM", "ElectraConfig", **ENCODER, embedding_size=16),
    "distilbert": text(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        vocab_size=50,
        dim=16,
        n_layers=2,
        n_heads=2,
        hidden_dim=32,
        max_position_embeddings=40,
    ),
    "albert": text("AlbertForMaskedLM", "AlbertConfig", **ENCODER, embedding_size=8),
    "deberta": text("DebertaV2ForMaskedLM", "DebertaV2Config", **ENCODER),
    "gpt2": text(
        "GPT2LMHeadModel",
        "GPT2Config",
        vocab_size=50,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=40,
    ),
    "gpt-neox": text("GPTNeoXForCausalLM", "GPTNeoXConfig", **ENCODER),
    "opt": text(
        "OPTForCausalLM",
        "OPTConfig",
        **SMALL,
        ffn_dim=32,
        word_embed_proj_dim=16,
        max_position_embeddings=40,
    ),
    "bloom": text(
        "BloomForCausalLM", "BloomConfig", vocab_size=50, hidden_size=16, n_layer=2, n_head=2
    ),
    "llama": text("LlamaForCausalLM", "LlamaConfig", **DECODER),
    "mistral": text("MistralForCausalLM", "MistralConfig", **DECODER, sliding_window=8),
    "qwen2": text("Qwen2ForCausalLM", "Qwen2Config", **DECODER),
    "gemma": text("GemmaForCausalLM", "GemmaConfig", **DECODER, head_dim=8),
    "phi": text("PhiForCausalLM", "PhiConfig", **ENCODER),
    "mixtral": text(
        "MixtralForCausalLM", "MixtralConfig", **DECODER, num_local_experts=2, num_experts_per_tok=1
    ),
    "t5": text(
        "T5ForConditionalGeneration",
        "T5Config",
        vocab_size=50,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
    ),
    "bart": text(
        "BartForConditionalGeneration",
        "BartConfig",
        vocab_size=50,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=40,
    ),
    "mamba": text(
        "MambaForCausalLM",
        "MambaConfig",
        vocab_size=50,
        hidden_size=16,
        state_size=4,
        num_hidden_layers=1,
    ),
    "vit": image(
        "ViTModel",
        "ViTConfig",
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=32,
        patch_size=8,
    ),
    "deit": image(
        "DeiTModel",
        "DeiTConfig",
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=32,
        patch_size=8,
    ),
    "swin": image(
        "SwinModel",
        "SwinConfig",
        embed_dim=8,
        depths=[1, 1],
        num_heads=[1, 2],
        window_size=2,
        image_size=32,
        patch_size=4,
    ),
    "resnet": image(
        "ResNetModel",
        "ResNetConfig",
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 2],
        layer_type="basic",
    ),
    "convnext": image(
        "ConvNextModel", "ConvNextConfig", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2
    ),
    "mobilenet-v2": image(
        "MobileNetV2Model", "MobileNetV2Config", depth_multiplier=0.25, image_size=32
    ),
    "whisper": whisper,
}
