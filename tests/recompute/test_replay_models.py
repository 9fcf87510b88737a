"""Replay of every module of torch.nn, and of every module of transformers' models: bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from exactness import Case, assert_exact
from module_cases import CASES
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.core.policy import exact_policy, plain_policy

NUMBERED = [
    pytest.param(case, id=f"{name}-{place}")
    for name, cases in CASES.items()
    for place, case in enumerate(cases)
]
ARCHITECTURES = ["bert-eager-masked", "gpt2", "mixtral", "t5", "deberta", "swin", "mamba"]
quiet = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)


@pytest.mark.usefixtures("code_everything")
@pytest.mark.parametrize("case", NUMBERED)
def test_any_module_of_torch(case: Case) -> None:
    assert_exact(case, how=replace(exact_policy(), replayed=frozenset({"inner"})))


def without_cache(model: nn.Module) -> nn.Module:
    for part in model.modules():
        if hasattr(part, "config"):
            part.config.use_cache = False
    return model


@quiet
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_module_of_a_transformer_nested(name: str) -> None:
    pytest.importorskip("transformers")
    from transformer_cases import CASES as BUILDERS

    def case() -> tuple[nn.Module, tuple[()]]:
        model, inputs = BUILDERS[name]()
        return without_cache(model), inputs

    containers = (nn.ModuleList, nn.ModuleDict)
    parts = case()[0].named_modules()
    paths = {f"inner.{path}" for path, part in parts if path and not isinstance(part, containers)}
    done = assert_exact(case, how=replace(plain_policy(), replayed=frozenset(paths)))
    assert {"inner.model"} == {r.site.module for r in done.sites if r.site.operator == "input"}
    assert all(
        report.held_bytes == 0
        for report in done.sites
        if report.site.module in paths - {"inner.model"}
    )


@quiet
def test_a_cache_handed_through_arguments_is_found_as_it_was() -> None:
    transformers = pytest.importorskip("transformers")
    options = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 40}
    words: Tensor = torch.randint(0, 50, (2, 8))

    def gradients(replayed: set[str]) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**options, use_cache=True))
        policy = replace(plain_policy(), replayed=frozenset(replayed))
        with (capture := Capture(model)).step(policy, 0, 0):
            out = model(words, attention_mask=torch.ones_like(words).tril(3), labels=words)
        out.loss.backward()
        assert {path for path, _ in capture.replays} == replayed
        assert out.past_key_values.get_seq_length() == 8
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients(set())
    for replayed in ({"transformer.h.0", "transformer.h.1"}, {"transformer"}):
        found = gradients(replayed)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
