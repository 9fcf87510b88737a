"""Families of ``transformers`` from tiny configurations made in code, with random weights.

``SMALL`` shrinks whatever a family's configuration has; ``EXCEPTIONS`` are what a family wants
besides. The loss is the model's own, over labels of which a quarter is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from daf_bench.conformance.case import Case, Work
from daf_bench.conformance.vision import load_torchvision

BATCH, LENGTH, VOCABULARY, CLASSES = 6, 16, 96, 4
IMAGE, CHANNELS, SAMPLES = 32, 3, 1600
IGNORED = -100

SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size"), 64),
    **dict.fromkeys(
        ("emb_dim", "encoder_embed_dim", "projection_dim", "attention_hidden_size"), 64
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_blocks", "num_hidden_groups"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "attention_head_size"), 16),
    **dict.fromkeys(("intermediate_size", "d_ff", "n_inner", "encoder_ffn_dim"), 128),
    **dict.fromkeys(("decoder_ffn_dim", "ffn_dim", "hidden_dim", "dff", "d_inner"), 128),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("expert_ffn_hidden_size", "ffn_hidden_size", "moe_shared_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "n_group"), 2),
    **dict.fromkeys(("topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "mamba_d_state", "state_size"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("vocab_size", "text_vocab_size"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("sliding_window", "attention_window", "local_attention", "window_size"), 8),
    **dict.fromkeys(("image_size", "input_size"), IMAGE),
    **dict.fromkeys(("num_labels",), CLASSES),
    "patch_size": 4,
    "type_vocab_size": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
# Lists that follow from the number of layers.
_DERIVED = ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "block_types")
# What a family wants besides.
EXCEPTIONS: dict[str, dict[str, Any]] = {}


def tiny_configuration(family: str) -> Any:
    """Return the configuration of a family's smallest sensible model."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[family]
    small = _shrunk(kind().to_dict())
    found = kind(**small | EXCEPTIONS.get(family, {}))
    if getattr(found, "is_encoder_decoder", False):
        found.decoder_start_token_id = 1
    return found


def _shrunk(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that shrink a configuration, nested ones too."""
    found: dict[str, Any] = {}
    for name, value in defaults.items():
        if name.endswith("_config") and isinstance(value, Mapping):
            found[name] = {"model_type": value.get("model_type", ""), **_shrunk(value)}
        elif name in ("hidden_sizes", "embed_dims", "depths", "num_heads", "encoder_hidden_sizes"):
            found |= {name: _stages(name, value)} if isinstance(value, list | tuple) else _one(name)
        elif name in SMALL and value is not None and not isinstance(value, list | tuple):
            found[name] = SMALL[name]
        elif "dropout" in name and isinstance(value, float) and value:
            found[name] = value
    if any(name in found for name in _LAYERS):
        found |= {name: None for name in _DERIVED if defaults.get(name) is not None}
    return found


def _one(name: str) -> dict[str, Any]:
    return {name: SMALL[name]} if name in SMALL else {}


def _stages(name: str, value: Any) -> list[int]:
    if name == "depths":
        return [1] * len(value)
    if name == "num_heads":
        return [2] * len(value)
    return [16 * 2**place for place in range(len(value))]


def _tokens() -> Tensor:
    return torch.randint(5, VOCABULARY, (BATCH, LENGTH))


def _labels(tokens: Tensor) -> Tensor:
    """Return labels of which some are ignored, more in some examples than in others."""
    share = torch.linspace(0.0, 0.5, tokens.shape[0])[:, None]
    return torch.where(torch.rand(tokens.shape) < share, IGNORED, tokens)


def _own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _causal() -> dict[str, Tensor]:
    tokens = _tokens()
    return {"input_ids": tokens, "labels": _labels(tokens)}


def _masked() -> dict[str, Tensor]:
    tokens = _tokens()
    mask = torch.ones_like(tokens)
    mask[0, LENGTH // 2 :] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": _labels(tokens)}


def _classified() -> dict[str, Tensor]:
    return {"input_ids": _tokens(), "labels": torch.randint(0, CLASSES, (BATCH,))}


def _tagged() -> dict[str, Tensor]:
    tokens = _tokens()
    return {"input_ids": tokens, "labels": _labels(torch.randint(0, CLASSES, tokens.shape))}


def _answered() -> dict[str, Tensor]:
    starts = torch.randint(0, LENGTH, (BATCH,))
    return {"input_ids": _tokens(), "start_positions": starts, "end_positions": starts + 3}


def _translated() -> dict[str, Tensor]:
    return {"input_ids": _tokens(), "labels": _labels(_tokens())}


def _pictured() -> dict[str, Tensor]:
    pictures = torch.randn(BATCH, CHANNELS, IMAGE, IMAGE)
    return {"pixel_values": pictures, "labels": torch.randint(0, CLASSES, (BATCH,))}


def _segmented() -> dict[str, Tensor]:
    pictures = torch.randn(BATCH, CHANNELS, IMAGE, IMAGE)
    labels = torch.randint(0, CLASSES, (BATCH, IMAGE, IMAGE))
    labels[1:3, :20] = 255
    return {"pixel_values": pictures, "labels": labels}


def _heard() -> dict[str, Tensor]:
    sounds = torch.randn(BATCH, SAMPLES)
    return {"input_values": sounds, "labels": torch.randint(0, CLASSES, (BATCH,))}


def _spelled() -> dict[str, Tensor]:
    labels = torch.randint(5, VOCABULARY, (BATCH, 2))
    return {"input_values": torch.randn(BATCH, SAMPLES), "labels": labels}


# Kind of task: the class that builds its models, and its batch.
TASKS: dict[str, tuple[str, Callable[[], dict[str, Tensor]]]] = {
    "causal": ("AutoModelForCausalLM", _causal),
    "masked": ("AutoModelForMaskedLM", _masked),
    "classify": ("AutoModelForSequenceClassification", _classified),
    "tag": ("AutoModelForTokenClassification", _tagged),
    "answer": ("AutoModelForQuestionAnswering", _answered),
    "translate": ("AutoModelForSeq2SeqLM", _translated),
    "image": ("AutoModelForImageClassification", _pictured),
    "segment": ("AutoModelForSemanticSegmentation", _segmented),
    "audio": ("AutoModelForAudioClassification", _heard),
    "ctc": ("AutoModelForCTC", _spelled),
}


def build_family(family: str, task: str) -> Work:
    """Return a tiny model of a family with a batch of its task."""
    import transformers

    class_name, make_batch = TASKS[task]
    configuration = tiny_configuration(family)
    if task not in ("causal", "masked", "translate", "ctc"):
        configuration.num_labels = CLASSES
    model = getattr(transformers, class_name).from_config(configuration)
    return Work(model.train(), make_batch(), _own_loss)


# Task by families.
FAMILIES: dict[str, str] = {
    "causal": (
        "afmoe apertus apertus1p5_text arcee aria_text bart beam bert bert-generation "
        "big_bird bigbird_pegasus biogpt bitnet blenderbot blenderbot-small bloom "
        "camembert cohere cohere2 cohere2_moe ctrl cwm data2vec-text deepseek_v4 "
        "diffllama doge electra emu3 ernie ernie4_5 ernie4_5_moe exaone exaone4 "
        "exaone_moe falcon falcon_mamba flex_olmo flint fuyu gemma gemma2 gemma3 "
        "gemma3_text glm glm4 glm4_moe glm4_moe_lite got_ocr2 gpt-sw3 gpt2 gpt_bigcode "
        "gpt_neox gpt_neox_japanese gpt_oss granite granite_swa granitemoe "
        "granitemoe_swa granitemoeshared helium hrm_text kolibri1 laguna lfm2 llama "
        "llama4 llama4_text mamba marian mbart megatron-bert mellum mimo_v2_flash "
        "minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral3 mistral mixtral mpt "
        "olmo2 olmoe opt phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe rembert roberta "
        "roformer stablelm starcoder2 xglm xlnet "
    ),
    "masked": ("albert convbert deberta deberta-v2 distilbert flaubert funnel ibert layoutlm "),
    "translate": ("mt5 pegasus prophetnet switch_transformers t5 umt5 "),
    "image": ("beit convnext convnextv2 mobilenet_v2 regnet resnet "),
    "segment": ("segformer "),
}


def family_cases() -> list[Case]:
    """Return a case for each family.

    Raises:
        ImportError: ``transformers`` is not installed.
    """
    import transformers

    # Families of images look for it, and some fail where its native operators do not load.
    with suppress(ImportError):
        load_torchvision()
    transformers.logging.set_verbosity_error()
    return [
        Case(f"transformers/{family}", partial(build_family, family, task))
        for task, families in FAMILIES.items()
        for family in families.split()
    ]
