"""Attention with dropout, chunk by chunk: what PyTorch computes, and what is held and made."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from largest import Largest
from torch import Tensor, nn

from daf.capture.compress import compress
from daf.core.policy import CHUNKED, Method, Need, Policy, Treatment, coded_policy
from daf.operators.chunked import attention as chunked_attention
from daf.operators.chunked.attention import attention
from daf.operators.chunked.weight_gradient import CHUNK_BYTES

LARGE = (32, 4, 128, 8)  # weights of 8 MiB, of which a chunk has 2


class Attention(nn.Module):
    def __init__(self, **keywords: Any) -> None:
        super().__init__()
        self.keywords = keywords

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **self.keywords)


def inputs(shape: tuple[int, ...], columns: int | None = None, scale: float = 1.0) -> list[Tensor]:
    """q, k and v as projections leave them: heads and rows change places in a view."""
    batch, heads, rows, width = shape
    generator = torch.Generator().manual_seed(3)
    lengths = (rows, columns or rows, columns or rows)
    found = [
        torch.randn(batch, length, heads, width, generator=generator) * scale for length in lengths
    ]
    return [each.transpose(1, 2).requires_grad_() for each in found]


def run(
    operator: Callable[..., Tensor], given_: list[Tensor], wanted: list[Tensor] | None = None
) -> list[Tensor]:
    """Result, gradients, and what the random state gives next."""
    torch.manual_seed(11)
    result = operator(*given_)
    after = torch.rand(2)
    gradient = torch.randn(result.shape, generator=torch.Generator().manual_seed(5))
    return [result.detach(), *torch.autograd.grad(result, wanted or given_, gradient), after]


def masks(shape: tuple[int, ...]) -> dict[str, Tensor]:
    batch, heads, rows, _ = shape
    generator = torch.Generator().manual_seed(9)
    seen = torch.rand(batch, 1, rows, rows, generator=generator) > 0.3
    dead = torch.ones(batch, 1, 1, rows, dtype=torch.bool)
    dead[1] = False  # an example of padding alone
    return {
        "bits": seen,
        "expanded": seen[:, :, :1].expand(-1, heads, rows, -1),
        "nothing seen": dead,
        "numbers": torch.randn(rows, rows, generator=generator),
        "of heads": torch.randn(heads, 1, rows, generator=generator),
    }


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    """But for the order of additions in products of matrices."""
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).abs().max()) <= 3e-6 * float(theirs.abs().max()) + 1e-12


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        *({"attn_mask": name} for name in masks((2, 1, 4, 1))),
    ],
    ids=str,
)
def test_results_gradients_and_dropout_are_pytorch_s(keywords: dict[str, Any]) -> None:
    if "attn_mask" in keywords:
        keywords = {"attn_mask": masks(LARGE)[keywords["attn_mask"]]}
    model = Attention(dropout_p=0.1, **keywords)
    given_ = inputs(LARGE)
    expected = run(model, given_)
    coded = compress(model, "exact", chunked=True)

    def ours(*tensors: Tensor) -> Tensor:
        with coded:
            return model(*tensors)

    with Largest() as seen:
        found = run(ours, given_)
    same(found, expected)
    assert torch.equal(found[-1], expected[-1])  # the random state: the same weights were dropped
    weights = math.prod(LARGE[:3]) * LARGE[2]
    assert seen.elements <= weights // 4
    with Largest() as theirs:
        run(model, given_)
    assert theirs.elements == weights


@settings(max_examples=40, deadline=None)
@given(
    st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 9), st.integers(1, 7)),
    st.integers(1, 9),
    st.integers(1, 600),
    st.floats(0.01, 0.95),
)
def test_any_shape_and_any_chunk(
    shape: tuple[int, ...], columns: int, chunk_bytes: int, probability: float
) -> None:
    given_ = inputs(shape, columns)
    theirs = partial(F.scaled_dot_product_attention, dropout_p=probability)
    ours = partial(attention, dropout_p=probability, chunk_bytes=chunk_bytes)
    for found, expected in zip(run(ours, given_), run(theirs, given_), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_only_the_gradients_that_are_asked_for_are_formed(wanted: tuple[int, ...]) -> None:
    given_ = inputs((4, 2, 16, 8))
    for place, tensor in enumerate(given_):
        tensor.requires_grad_(place in wanted)
    asked = [given_[place] for place in wanted]
    ours = partial(attention, dropout_p=0.2, chunk_bytes=4096)
    theirs = partial(F.scaled_dot_product_attention, dropout_p=0.2)
    same(run(ours, given_, asked), run(theirs, given_, asked))


def test_the_gradient_is_that_of_differences() -> None:
    given_ = [each.detach().double().requires_grad_() for each in inputs((2, 2, 5, 3))]
    mask = torch.rand(2, 1, 5, 5) > 0.2

    def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(0)  # the same weights are dropped each time
        keywords: dict[str, Any] = {"attn_mask": mask, "dropout_p": 0.3, "chunk_bytes": 64}
        return attention(q, k, v, **keywords)

    assert torch.autograd.gradcheck(repeated, given_)


def packed(*given_: Tensor) -> list[Tensor]:
    """Views of one tensor, as of one projection of all three."""
    lengths = [each.shape[2] for each in given_]
    return list(torch.cat(given_, dim=2).split(lengths, dim=2))


@pytest.mark.parametrize("needs", [(1, 1, 1), (1, 0, 1), (0, 1, 1), (1, 1, 0), (0, 0, 1)])
@pytest.mark.parametrize("columns", [None, LARGE[2] // 2, 2 * LARGE[2]])
@pytest.mark.parametrize("are_packed", [False, True])
def test_what_pytorch_would_save_is_counted_as_if_it_had(
    needs: tuple[int, ...], are_packed: bool, columns: int | None
) -> None:
    """Of tensors of their own, and of views of one projection, all of which v would hold."""
    given_ = inputs(LARGE, columns)

    class Projecting(Attention):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            made = packed(q, k, v) if are_packed else [q * 1, k * 1, v * 1]
            parts = (each if n else each.detach() for each, n in zip(made, needs, strict=True))
            return super().forward(*parts)

    model, found = Projecting(dropout_p=0.1), []
    for chunked in (False, True):
        coded = compress(model, "exact", chunked=chunked)
        with coded:
            alive = model(*given_)
        found.append(coded.stats.plain_bytes)
        del alive
    assert found[0] == found[1] > 0


def test_q_k_v_and_a_bit_for_each_weight_are_held() -> None:
    model, given_ = Attention(dropout_p=0.1), inputs(LARGE)
    numbers, weights = math.prod(LARGE), math.prod(LARGE[:3]) * LARGE[2]
    exact, apart = compress(model, "exact", chunked=True), compress(model, "exact")
    coded = compress(model, 2, chunked=True)
    with coded:
        alive = model(*(each * 1 for each in given_))
    for capture, chunked in ((exact, True), (apart, False)):
        with capture:
            alive = model(*(each * 1 for each in given_))
        three = 3 * 4 * numbers
        # A bit for each of dropout's noise; without chunks the weights before it, and those after
        # it are computed again.
        held_bytes = three + weights / 8 + (0 if chunked else 4 * weights)
        assert capture.stats.held_bytes == pytest.approx(held_bytes, rel=0.01)
        del alive
    held = {each.site.save: each for each in coded.sites() if each.site.operator == "attention"}
    wide, narrow = Treatment(Method.MINMAX, 8), Treatment(Method.ROTATED, 4)
    assert [(held[save].need, held[save].treatment) for save in range(4)] == [
        (Need.SCORE, wide),
        (Need.SCORE, wide),
        (Need.PRODUCT, narrow),
        (Need.INTEGER, Treatment(Method.PACK)),
    ]
    assert coded.stats.held_bytes < 1.1 * (2.5 * numbers + weights / 8)


HEADS = (16, 8, 128, 32)


def with_width(bits: int) -> Policy:
    method = Method.ROTATED if bits <= 4 else Method.MINMAX
    codes = dict.fromkeys((Need.SCORE, Need.PRODUCT), Treatment(method, bits))
    return Policy(
        "of one width", {**coded_policy(4).by_need, **codes}, operators=frozenset({CHUNKED})
    )


def of_codes(policy: Policy, scale: float) -> tuple[float, float, float]:
    """Bytes a head, and relative squared error and squared bias of the gradients of q and k."""
    model, given_ = Attention(dropout_p=0.1), inputs(HEADS)
    for each in given_[:2]:
        each.data.mul_(scale)
    exact = run(model, given_)[1:3]
    count, sums, error = 12, [torch.zeros_like(each) for each in exact], 0.0
    energy = sum(float(each.square().sum()) for each in exact)
    for seed in range(count):
        coded = compress(model, policy=policy, seed=seed)

        def ours(*tensors: Tensor, coded: Any = coded) -> Tensor:
            with coded:
                return model(*(each * 1 for each in tensors))  # leaves would be kept

        for total, truth, gradient in zip(sums, exact, run(ours, given_)[1:3], strict=True):
            total += gradient
            error += float((gradient - truth).square().sum()) / energy / count
    left = sum(
        float((total / count - truth).square().sum())
        for total, truth in zip(sums, exact, strict=True)
    )
    # Of the mean's error, what is no noise.
    bias = (left / energy - error / count) * count / (count - 1)
    return coded.stats.held_peak_bytes / math.prod(HEADS[:2]), error, bias


def documented() -> list[tuple[float, float, str]]:
    """Bytes, error and bias of the three rows of the table."""
    text = (Path(__file__).parents[2] / "docs" / "operators.md").read_text("utf-8")
    lines = text[text.index("| held | bytes per head") :].splitlines()[2:5]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [(float(row[1].replace(",", "")), float(row[2]), row[3]) for row in cells]


@pytest.mark.parametrize("row", range(3))
def test_the_table_of_codes_is_right(row: int) -> None:
    policy = (coded_policy(4), with_width(4), with_width(8))[row]
    nbytes, error, bias = documented()[row]
    found = of_codes(policy, 1.0)
    assert found[0] == pytest.approx(nbytes, rel=0.02)
    assert found[1] == pytest.approx(error, rel=0.15)
    assert found[2] < 1.7 * float(bias.removeprefix("below ")) + 1e-6


def test_with_large_scores_narrow_codes_of_q_and_k_would_bias() -> None:
    _, error, bias = of_codes(with_width(4), 2.0)
    assert error == pytest.approx(0.14, rel=0.15)
    assert bias == pytest.approx(0.007, rel=0.25)
    _, error, bias = of_codes(with_width(8), 2.0)
    assert error < 0.002
    assert bias < 1e-4


OTHERS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "no dropout": (LARGE, {}),
    "all dropped": (LARGE, {"dropout_p": 1.0}),
    "small": ((2, 4, 32, 8), {"dropout_p": 0.1}),
    "grouped": (LARGE, {"dropout_p": 0.1, "enable_gqa": True}),
    "three dimensions": (LARGE[1:], {"dropout_p": 0.1}),
    "a mask that learns": (LARGE, {"dropout_p": 0.1, "attn_mask": torch.zeros(128, 128)}),
    "a mask of halves": (LARGE, {"dropout_p": 0.1, "attn_mask": torch.zeros(128, 128).half()}),
    "negative scale": (LARGE, {"dropout_p": 0.1, "scale": -0.3}),
    "autocast": (LARGE, {"dropout_p": 0.1}),
    "no gradient": (LARGE, {"dropout_p": 0.1}),
}


@pytest.mark.parametrize("what", OTHERS)
def test_all_other_calls_stay_pytorch_s(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, keywords = OTHERS[what]
    monkeypatch.setattr(chunked_attention.ChunkedAttention, "apply", None)
    tensors = [each.detach() for each in inputs((1, *shape)[-4:])]
    tensors = [each.reshape(shape).requires_grad_() for each in tensors]
    if what == "a mask that learns":
        keywords = {**keywords, "attn_mask": keywords["attn_mask"].clone().requires_grad_()}
    if what == "a mask of halves":
        tensors = [each.detach().half().requires_grad_() for each in tensors]
    model = Attention(**keywords)
    context = torch.no_grad() if what == "no gradient" else nullcontext()
    found = []
    for coded in (nullcontext(), compress(model, "exact", chunked=True)):
        torch.manual_seed(0)
        with coded, context, torch.autocast("cpu", enabled=what == "autocast"):
            found.append(model(*tensors).detach())
    assert torch.equal(found[0].nan_to_num(7.0), found[1].nan_to_num(7.0))


def test_a_chunk_is_a_part_of_what_other_operators_take() -> None:
    kept = torch.empty(64, 8, 128, 128, dtype=torch.bool)
    borders = chunked_attention._chunks(kept, CHUNK_BYTES)
    assert borders[0] == (0, 4)
    assert borders[-1] == (60, 64)
    assert 4 * kept[:4].numel() == CHUNK_BYTES // 4
    assert chunked_attention._chunks(kept[:3], 1) == [(0, 1), (1, 2), (2, 3)]


def test_a_model_of_transformers_learns_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(config)
    words = torch.randint(0, 40, (16, 128))
    seen = torch.ones_like(words)
    seen[3, 100:] = 0
    gradients, held = [], []
    for chunked in (False, True):
        coded = compress(model, "exact", chunked=chunked)
        torch.manual_seed(1)
        model.zero_grad()
        with coded:
            loss = model(words, attention_mask=seen, labels=words).loss
        held.append(coded.stats.held_bytes)
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    same(gradients[1], gradients[0])
    weights = 16 * 4 * 128 * 128 * 4
    # Two layers' weights before dropout; those after it are computed again either way.
    assert held[0] - held[1] > 0.99 * 2 * weights


@pytest.mark.parametrize("masked", [False, True])
def test_pytorch_s_own_transformer_layer(masked: bool) -> None:
    """Its attention is inside one operator, which stays where weights are asked for."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    x = torch.randn(16, 128, 32)
    padding = torch.zeros(16, 128, dtype=torch.bool)
    padding[2, 90:] = True
    keywords = {"src_key_padding_mask": padding} if masked else {}
    found, held = [], []
    for chunked in (False, True):
        coded = compress(layer, "exact", chunked=chunked)
        layer.zero_grad()
        torch.manual_seed(1)
        with coded:
            result = layer(x, **keywords)
        held.append(coded.stats.held_bytes)
        operators = {each.site.operator for each in coded.sites()}
        assert ("multi_head_attention" in operators) is chunked
        assert ("multi_head_attention_forward" in operators) is not chunked
        result.square().sum().backward()
        found.append([result.detach(), *(p.grad.clone() for p in layer.parameters())])
    same(found[1], found[0])
    weights = 16 * 4 * 128 * 128 * 4
    assert held[0] - held[1] > 0.99 * weights
    for other in (layer.eval(), nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0)):
        with (coded := compress(other, "exact", chunked=True)):
            other(x * 1)
        assert "multi_head_attention" not in {each.site.operator for each in coded.sites()}
    attention_alone = layer.train().self_attn
    for coded in (nullcontext(), compress(layer, "exact", chunked=True)):
        torch.manual_seed(2)
        with coded:
            found.append([each.detach() for each in attention_alone(x, x, x)])
    same(found[3], found[2])
