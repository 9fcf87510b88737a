"""``daf train --lora``: low-rank differences beside frozen weights, by PEFT."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

transformers = pytest.importorskip("transformers", reason="it has the models that PEFT knows")
peft = pytest.importorskip("peft", reason="--lora is PEFT's")

from daf.core.errors import DataError
from daf.training.low_rank import load_peft, with_low_rank

Daf = Callable[..., Any]
RANK, ROWS, WORDS = 4, 8, 260
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
ROBERTA = {
    **SIZES,
    "vocab_size": WORDS,
    "intermediate_size": 64,
    "max_position_embeddings": 80,
    "pad_token_id": 1,
    "num_labels": 2,
    "architectures": ["RobertaForSequenceClassification"],
}
GPT2 = {
    "vocab_size": WORDS,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "architectures": ["GPT2LMHeadModel"],
}
TASKS = {"Roberta": (ROBERTA, "mrpc"), "GPT2": (GPT2, "e2e")}


def write_task(kind: str, data: str) -> None:
    """Write a model's folder, and its data's in their published form."""
    options, _ = TASKS[kind]
    getattr(transformers, f"{kind}Config")(**options).save_pretrained("model")
    Path("data").mkdir()
    names = ("train.tsv", "dev.tsv") if data == "mrpc" else ("train.txt", "valid.txt")
    for name in names:
        lines = ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"] if data == "mrpc" else []
        for number in range(24):
            words = f"number {number} is here"
            lines.append(
                f"{number % 2}\t1\t2\t{words}\tand there: {number}"
                if data == "mrpc"
                else f"name[{number}] || {words}"
            )
        Path("data", name).write_text("\n".join(lines) + "\n")


def asked(data: str, out: str, **more: object) -> list[str]:
    settings: dict[str, object] = {"lora": RANK, "budget": "none", "batch-size": ROWS}
    settings |= {"threads": 1, "max-steps": 4, "context": 48, "out": out} | more
    pairs = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    return ["train", "config_json:model", f"{data}:data", *pairs]


def built() -> Any:
    """The folder's model with the weights that a run begins with."""
    from daf.training.config_json import random_model

    torch.manual_seed(0)
    np.random.seed(0)
    return random_model("model")


@pytest.mark.parametrize("kind", TASKS)
def test_only_low_rank_differences_and_heads_are_trained(
    kind: str, daf: Daf, workplace: Path
) -> None:
    data = TASKS[kind][1]
    write_task(kind, data)
    ran = daf(*asked(data, "run"))
    assert ran.code == 0, ran.err
    begun, found = dict(built().named_parameters()), load_file("run/model.safetensors")
    heads = {name for name in begun if name.startswith("classifier")}
    assert bool(heads) == (kind == "Roberta")
    changed = set()
    for name, tensor in found.items():
        own = name.removeprefix("base_model.model.").replace(".base_layer", "")
        own = own.replace(".modules_to_save.default", "").replace(".original_module", "")
        if own in begun and not torch.equal(tensor, begun[own]):
            changed.add(own)
    assert changed == heads
    grown = [tensor for name, tensor in found.items() if ".lora_B." in name]
    layers = 2 * (2 if kind == "Roberta" else 1)  # queries and values, or all in one
    assert len(grown) == layers
    assert all(tensor.shape[1] == RANK and tensor.any() for tensor in grown)


def test_the_adapter_alone_is_the_model_again(daf: Daf, workplace: Path) -> None:
    write_task("Roberta", "mrpc")
    assert daf(*asked("mrpc", "run")).code == 0
    words = torch.arange(30)[None]
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # between libraries
        again = peft.PeftModel.from_pretrained(built().eval(), "run/adapter").eval()
        whole = peft.get_peft_model(built(), peft.PeftConfig.from_pretrained("run/adapter")).eval()
    assert not torch.equal(again(words).logits, whole(words).logits)
    whole.load_state_dict(load_file("run/model.safetensors"))
    assert torch.equal(again(words).logits, whole(words).logits)


def test_a_run_that_goes_on_is_the_same_as_one(daf: Daf, workplace: Path) -> None:
    write_task("Roberta", "mrpc")
    for steps, more in ((2, ()), (4, ("--resume",))):
        assert daf(*asked("mrpc", "parts", **{"max-steps": steps}), *more).code == 0
    assert daf(*asked("mrpc", "whole")).code == 0
    parts, whole = (load_file(f"{name}/model.safetensors") for name in ("parts", "whole"))
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in parts)


def test_codes_train_differences_near_plain_ones(daf: Daf, workplace: Path) -> None:
    write_task("Roberta", "mrpc")
    assert daf(*asked("mrpc", "plain")).code == 0
    assert daf(*asked("mrpc", "coded", bits=4)).code == 0
    plain, coded = (load_file(f"{name}/model.safetensors") for name in ("plain", "coded"))
    steps = {name: coded[name] - plain[name] for name in plain if ".lora_B." in name}
    assert any(step.any() for step in steps.values())  # codes were used
    assert all(step.norm() < 0.5 * plain[name].norm() for name, step in steps.items())


def test_a_plan_counts_the_state_of_what_is_trained(daf: Daf, workplace: Path) -> None:
    write_task("Roberta", "mrpc")
    bytes_of = {}
    for more in ((), ("--lora", str(RANK))):
        settings = ("--budget", "4GB", "--batch-size", str(ROWS), "--threads", "1", "--json")
        ran = daf("plan", "config_json:model", "mrpc:data", *settings, *more)
        assert ran.code == 0, ran.err
        bytes_of[bool(more)] = ran.json["account"]
    model = with_low_rank(built(), RANK)
    trained = [each.nbytes for each in model.parameters() if each.requires_grad]
    state = bytes_of[True]["optimizer_state"]  # two moments, and a counter each
    assert 2 * sum(trained) <= state <= 2 * sum(trained) + 64 * len(trained)
    assert 4 * state < bytes_of[False]["optimizer_state"]
    held = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    assert bytes_of[True]["parameters"] == held


def test_other_models_are_refused_with_what_peft_says(daf: Daf, workplace: Path) -> None:
    ran = daf("train", "resnet18", "digits", "--lora", "4", "--budget", "none")
    assert ran.code == 2
    assert "--lora 4 on a ResNet" in ran.err
    assert "target_modules" in ran.err


def test_without_peft_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(DataError, match=r"needs the package 'peft'; try: pip install"):
        load_peft()
