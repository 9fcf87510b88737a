"""``daf plan FOLDER`` of a config.json: the model that it describes, without weights and data."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers", reason="it reads config.json")

from daf.core.errors import DataError
from daf.training.config_json import RandomInputs, random_model

Daf = Callable[..., Any]
ROWS, WORDS = 8, 200
ASKED = ("--budget", "4GB", "--batch-size", str(ROWS), "--threads", "1", "--json")
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT = {"vocab_size": WORDS, "intermediate_size": 256, "max_position_embeddings": 48, **SIZES}
LLAMA = {"vocab_size": WORDS, "intermediate_size": 256, "num_key_value_heads": 2, **SIZES}
GPT2 = {"vocab_size": WORDS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
T5 = {"vocab_size": WORDS, "d_model": 64, "d_ff": 128, "num_layers": 1, "num_heads": 4, "d_kv": 16}
VIT = {"image_size": 32, "patch_size": 8, "num_channels": 1, "intermediate_size": 128, **SIZES}


def described(kind: str, folder: Path, **options: Any) -> Any:
    """Write the folder; ids of special tokens lie within the vocabulary."""
    ends = {} if kind.startswith("ViT") else {"bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{kind}Config")(**{**ends, **options})
    config.save_pretrained(folder)
    return config


@pytest.mark.parametrize(
    ("kind", "options", "head", "inputs", "labels"),
    [
        ("Bert", BERT, "BertForMaskedLM", (ROWS, 48), (ROWS, 48)),
        pytest.param(
            *("GPT2", GPT2, "GPT2LMHeadModel", (ROWS, 128), (ROWS, 128)), marks=pytest.mark.thorough
        ),
        ("ViT", VIT, "ViTForImageClassification", (ROWS, 1, 32, 32), (ROWS,)),
    ],
)
def test_the_model_described_is_planned(
    kind: str,
    options: dict[str, Any],
    head: str,
    inputs: tuple[int, ...],
    labels: tuple[int, ...],
    daf: Daf,
    workplace: Path,
) -> None:
    described(kind, workplace / "model", **options)
    ran = daf("plan", "model", *ASKED)
    assert ran.code == 0, ran.err
    model = random_model("model")
    assert type(model).__name__ == head
    held = {each.data_ptr(): each.nbytes for each in (*model.parameters(), *model.buffers())}
    account = dict(ran.json["account"])
    assert account["parameters"] == sum(held.values())
    predicted = account.pop("predicted_peak")
    assert sum(account.values()) == predicted <= 4 * 10**9
    assert account["saved"] > 0
    assert ran.json["sites"]
    assert not (workplace / "runs").exists()
    data = RandomInputs(Path("model"))
    batch = data.train_batch(range(ROWS), seeded())
    assert [tuple(each.shape) for each in batch] == [inputs, labels]


def seeded() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize(
    ("kind", "options", "architecture", "labels", "classes"),
    [
        ("Bert", {**BERT, "num_labels": 3}, "BertForSequenceClassification", (ROWS,), 3),
        ("Bert", {**BERT, "num_labels": 3}, "BertForTokenClassification", (ROWS, 16), 3),
        ("Llama", LLAMA, "LlamaForCausalLM", (ROWS, 16), WORDS),
        (
            "T5",
            {**T5, "decoder_start_token_id": 0},
            "T5ForConditionalGeneration",
            (ROWS, 16),
            WORDS,
        ),
        ("Bert", BERT, "BertModel", (ROWS, 16), WORDS),  # without a loss: the customary head
    ],
)
@pytest.mark.filterwarnings("ignore:.*planned as BertForMaskedLM")
def test_the_head_that_the_configuration_names_has_labels_of_its_kind(
    kind: str,
    options: dict[str, Any],
    architecture: str,
    labels: tuple[int, ...],
    classes: int,
    tmp_path: Path,
) -> None:
    described(kind, tmp_path, architectures=[architecture], dtype="bfloat16", **options)
    model, data = random_model(str(tmp_path)), RandomInputs(tmp_path, context=16)
    named = architecture.replace("BertModel", "BertForMaskedLM")
    assert type(model).__name__ == named
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    batch = data.train_batch(range(ROWS), seeded())
    again = data.train_batch(range(ROWS), seeded())
    assert all(torch.equal(one, other) for one, other in zip(batch, again, strict=True))
    assert tuple(batch[0].shape) == (ROWS, 16)
    assert tuple(batch[1].shape) == labels
    assert int(batch[1].max()) < classes
    loss = data.loss(model, batch)
    loss.backward()
    assert loss.shape == ()
    assert all(each.grad is not None for each in model.parameters())


def test_length_and_batch_are_what_was_asked_for(daf: Daf, workplace: Path) -> None:
    described("GPT2", workplace / "model", **GPT2)
    saved = [
        daf("plan", "model", *ASKED, "--bits", "plain", "--context", str(length)).json["account"]
        for length in (32, 256)
    ]
    assert saved[1]["saved"] > 6 * saved[0]["saved"]


def test_images_have_the_model_s_number_format(tmp_path: Path) -> None:
    described("ViT", tmp_path, dtype="bfloat16", **VIT)
    data = RandomInputs(tmp_path)
    batch = data.train_batch(range(ROWS), seeded())
    assert batch[0].dtype is torch.bfloat16
    data.loss(random_model(str(tmp_path)), batch).backward()


def test_an_installed_model_is_not_a_folder_of_its_name(daf: Daf, workplace: Path) -> None:
    (workplace / "resnet18").mkdir()
    ran = daf("plan", "resnet18", "--budget", "4GB", "--batch-size", "4", "--goal", "nothing")
    assert "config.json" not in ran.out + ran.err


def test_a_folder_without_a_description_is_refused(daf: Daf, workplace: Path) -> None:
    (workplace / "empty").mkdir()
    ran = daf("plan", "empty", *ASKED)
    assert ran.code == 2
    assert "no config.json" in ran.json["error"]["message"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json"),
        (json.dumps({"model_type": "nothing known"}), "nothing known"),
        (json.dumps({"model_type": "wav2vec2"}), "wav2vec2 model"),
    ],
)
def test_what_cannot_be_planned_is_said(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(DataError, match=message):
        RandomInputs(tmp_path)


def test_without_transformers_it_says_what_to_install(
    daf: Daf, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described("Bert", workplace / "model", **BERT)
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "daf.training.config_json")
    ran = daf("plan", "model", *ASKED)
    assert ran.code == 2
    assert "pip install transformers" in ran.json["error"]["message"]


@pytest.mark.parametrize("named", ["BertModel", "BertForQuestionAnswering", "OfNobody"])
def test_another_head_than_the_one_named_is_told(named: str, tmp_path: Path) -> None:
    described("Bert", tmp_path, architectures=[named], **BERT)
    with pytest.warns(UserWarning, match=f"names {named}; planned as BertForMaskedLM"):
        model = random_model(str(tmp_path))
    assert type(model).__name__ == "BertForMaskedLM"


def test_data_beside_a_folder_is_refused_and_not_ignored(daf: Daf, workplace: Path) -> None:
    described("Bert", workplace / "model", **BERT)
    ran = daf("plan", "model", "sst2:file.tsv", *ASKED)
    assert ran.code != 0
    assert "leave DATA out" in " ".join(ran.err.split())
