"""Models adapted by PEFT train unchanged: frozen weights need no inputs, adapters' are coded."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.core.policy import Method, Need, Policy, coded_policy, exact_policy, plain_policy
from daf.core.reports import SiteReport
from daf.memory import process_memory
from daf.session.session import Session

peft = pytest.importorskip("peft")
WIDTH, TOKENS, BATCH = 64, 32, 8
FLOATS = BATCH * TOKENS * WIDTH


class Block(nn.Module):
    """Half of a transformer's block: norm, two linears, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(self.blocks(self.embedding(tokens)))
        return found


def adapted(targets: list[str]) -> nn.Module:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, lora_dropout=0.0)
    model: nn.Module = peft.get_peft_model(Decoder(), config)
    with torch.no_grad():  # B begins at 0, and so would A's gradient
        for name, each in model.named_parameters():
            if "lora_B" in name:
                each.normal_(std=0.1)
    return model


def tokens() -> Tensor:
    return torch.randint(0, 50, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))


def next_token_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def gradients(
    model: nn.Module, policy: Policy, draw: int = 0
) -> tuple[dict[str, Tensor], dict[str, SiteReport]]:
    capture = Capture(model)
    model.zero_grad()
    with capture.step(policy, 0, draw, batch=tokens()):
        loss = next_token_loss(model, tokens())
    sites = {str(each.site): each for each in capture.sites()}
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return found, sites


def test_only_adapters_have_gradients_and_exact_ones_are_pytorch_s() -> None:
    model = adapted(["up", "down"])
    plain, _ = gradients(model, plain_policy())
    exact, _ = gradients(model, exact_policy())
    assert plain.keys() == exact.keys()
    assert len(plain) == 8
    assert all("lora_" in name for name in plain)
    assert all(torch.equal(exact[name], value) for name, value in plain.items())


def test_inputs_of_frozen_linears_are_not_held_and_adapters_inputs_are_coded() -> None:
    """What is held is adapters' inputs in codes, and the masks and norms between them."""
    _, sites = gradients(adapted(["up", "down"]), coded_policy(2))
    for name, report in sites.items():
        if "base_layer" in name:
            assert report.held_bytes == 0, name
    for block in (0, 1):
        for linear, floats in (("up", FLOATS), ("down", 2 * FLOATS)):
            inputs = [
                each
                for name, each in sites.items()
                if f"blocks.{block}.{linear}.lora_A" in name and each.plain_bytes + each.held_bytes
            ]
            assert inputs, (block, linear)
            assert {each.treatment.method for each in inputs} <= {Method.ROTATED, Method.REDERIVE}
            assert sum(each.held_bytes for each in inputs) <= floats / 4 * 1.1
    head = [each for name, each in sites.items() if "head" in name]
    assert sum(each.held_bytes for each in head) == 0


def test_what_no_gradient_needs_is_not_saved() -> None:
    """Adapters in the last block only: nothing before them is held."""
    model = adapted(["blocks.1.up", "blocks.1.down"])
    _, sites = gradients(model, coded_policy(2))
    first = [each for name, each in sites.items() if "blocks.0" in name]
    assert sum(each.plain_bytes + each.held_bytes for each in first) == 0


class Attentive(nn.Module):
    """Adapters are on its queries and values; its keys are of a frozen layer, and before it too."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        parts = [each(x).unflatten(-1, (4, 16)) for each in (self.query, self.key, self.value)]
        heads = [each.transpose(1, 2) for each in parts]
        # Its weights are dropped, so that PyTorch computes them by plain operators.
        mixed = F.scaled_dot_product_attention(*heads, dropout_p=0.1)
        scores: Tensor = self.head(mixed.transpose(1, 2).flatten(-2).mean(1))
        return scores


def attentive_gradients(
    policy: Policy, draw: int = 0
) -> tuple[list[Tensor], dict[int, SiteReport]]:
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, target_modules=["query", "value"])
    model = peft.get_peft_model(Attentive(), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    x = torch.randn(16, 32, 64)
    capture = Capture(model)
    with capture.step(policy, 0, draw, batch=x):
        loss = model(x).square().mean()
    operator = "scaled_dot_product_attention"
    sites = {each.site.save: each for each in capture.sites() if each.site.operator == operator}
    trained = [each for each in model.parameters() if each.requires_grad]
    return list(torch.autograd.grad(loss, trained)), sites


def test_keys_of_a_frozen_layer_are_coded() -> None:
    """No gradient flows to them, but they are activations, and no weights that are left alone."""
    plain, _ = attentive_gradients(plain_policy())
    exact, kept = attentive_gradients(exact_policy())
    assert all(torch.equal(one, other) for one, other in zip(plain, exact, strict=True))
    keys = [save for save, each in kept.items() if each.need is Need.LINEAR]
    assert len(keys) == 1  # queries are not saved: no gradient of keys is wanted
    _, coded = attentive_gradients(coded_policy(2))
    assert coded[keys[0]].treatment.method is Method.ROTATED
    assert coded[keys[0]].held_bytes < coded[keys[0]].plain_bytes / 12
    assert [each.need for each in coded.values()].count(Need.TWO_VALUED) == 1  # dropout's noise
    draws = [attentive_gradients(coded_policy(2), draw)[0] for draw in range(48)]
    for place, value in enumerate(plain):
        found = torch.stack([each[place] for each in draws])
        error = (found.mean(0) - value).norm() / value.norm()
        scatter = (found - value).norm() / found.shape[0] / value.norm()
        assert error < 3 * scatter + 0.02, place


def test_gradients_of_adapters_are_right_on_average() -> None:
    model = adapted(["up", "down"])
    exact, _ = gradients(model, plain_policy())
    draws = [gradients(model, coded_policy(2), draw)[0] for draw in range(48)]
    for name, value in exact.items():
        if "blocks.1" in name:  # behind the last norm nothing coded enters twice
            found = torch.stack([each[name] for each in draws])
            error = (found.mean(0) - value).norm() / value.norm()
            scatter = (found - value).norm() / found.shape[0] / value.norm()
            assert error < 3 * scatter + 0.02, name


def test_a_session_trains_adapters_within_a_budget_and_leaves_the_rest_alone() -> None:
    model = adapted(["up", "down"])
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-2)
    with Session(model, optimizer, process_memory.resident_bytes() + 80_000_000, bits=2) as session:
        losses = [session.step(tokens(), next_token_loss).loss for _ in range(30)]
        found = session.sensitivity
    assert losses[-1] < 0.8 * losses[0]
    for name, each in model.named_parameters():
        if name in frozen:
            assert torch.equal(each, frozen[name]), name
    assert found is not None
    assert any("lora_A" in site.module for site in found.sites)
    assert not any("base_layer" in site.module for site in found.sites)
