"""Tensors that are not dense, finite and plain: sparse, nested, inference ones and subclasses."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree

from daf_bench.conformance.case import CaseList, NotApplicableError, Work
from daf_bench.conformance.situations.building import (
    CLASSES,
    EXAMPLES,
    FEATURES,
    WIDTH,
    Called,
    classified,
    labelled,
    network,
)
from daf_bench.conformance.situations.several_passes import between

CASES = CaseList()
WORDS, LONGEST = 200, 6


class Attention(nn.Module):
    """Self-attention over padded tokens [N, ``LONGEST``], whose scores ``mask`` hides."""

    def __init__(self, mask: Any) -> None:
        super().__init__()
        self.words, self.mask = nn.Embedding(WORDS, 64), mask
        self.query, self.key, self.out = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        values = self.words(tokens)
        scores = self.query(values) @ self.key(values).mT / 8
        return self.out((self.mask(scores, tokens == 0) @ values).mean(1))


def padded() -> tuple[Tensor, Tensor]:
    """Return tokens [N, ``LONGEST``], zeros at their ends, and labels [N]."""
    tokens = torch.randint(1, WORDS, (EXAMPLES, LONGEST))
    for row, length in enumerate(torch.randint(1, LONGEST + 1, (EXAMPLES,)).tolist()):
        tokens[row, length:] = 0
    return tokens, torch.randint(0, CLASSES, (EXAMPLES,))


@CASES.add("padding_of_minus_infinity")
def padding_of_minus_infinity() -> Work:
    """Padding is hidden by adding minus infinity: splits rightly."""

    def mask(scores: Tensor, padding: Tensor) -> Tensor:
        hidden = torch.zeros_like(scores).masked_fill(padding[:, None, :], -torch.inf)
        return (scores + hidden).softmax(-1)

    return Work(Attention(mask), padded(), classified)


@CASES.add("rows_masked_whole")
def rows_masked_whole() -> Work:
    """A row that sees nothing is NaN in softmax, and replaced after it: splits rightly."""

    def mask(scores: Tensor, padding: Tensor) -> Tensor:
        hidden = padding[:, None, :] | padding[:, :, None]
        return scores.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0.0)

    return Work(Attention(mask), padded(), classified)


def bags() -> tuple[Tensor, Tensor]:
    """Return word indices [N, 5] and labels [N]."""
    return torch.randint(0, WORDS, (EXAMPLES, 5)), torch.randint(0, CLASSES, (EXAMPLES,))


@CASES.add("sparse_embedding")
def sparse_embedding() -> Work:
    """Sparse gradients of an embedding: splits rightly."""
    model = nn.Sequential(nn.Embedding(WORDS, 32, sparse=True), nn.Flatten(), network(160))
    return Work(model, bags(), classified, optimizer=_gradient_descent)


@CASES.add("sparse_embedding_bag")
def sparse_embedding_bag() -> Work:
    """Sparse gradients of bags of words: splits rightly."""
    model = nn.Sequential(nn.EmbeddingBag(WORDS, 32, sparse=True), network(32))
    return Work(model, bags(), classified, optimizer=_gradient_descent)


def _gradient_descent(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate)


@CASES.add("sparse_adam")
def sparse_adam() -> Work:
    """Adam for rows that are there, below a frozen head."""
    head = network(32).requires_grad_(False)
    model = nn.Sequential(nn.EmbeddingBag(WORDS, 32, sparse=True), head)
    words = [model[0].weight]
    return Work(
        model, bags(), classified, optimizer=lambda _, rate: torch.optim.SparseAdam(words, lr=rate)
    )


@CASES.add("sparse_batch")
def sparse_batch() -> Work:
    """Features of sparse layout."""
    features, labels = labelled()
    sparse = features.masked_fill(torch.rand_like(features) < 0.8, 0.0).to_sparse()
    return Work(network(), (sparse, labels), classified)


@CASES.add("nested_strided")
def nested_strided() -> Work:
    """A nested tensor of strided layout, made of a padded batch."""
    model = nn.ModuleDict({"into": nn.Linear(FEATURES, WIDTH), "out": nn.Linear(WIDTH, CLASSES)})

    def loss(model: Any, batch: Any) -> Tensor:
        rows = torch.nested.nested_tensor([x[: 2 + i % 3] for i, x in enumerate(batch[0])])
        dense = torch.nested.to_padded_tensor(F.relu(model["into"](rows)), 0.0)
        return F.cross_entropy(model["out"](dense.sum(1)), batch[1])

    batch = (torch.randn(EXAMPLES, 4, FEATURES), torch.randint(0, CLASSES, (EXAMPLES,)))
    return Work(model, batch, loss)


@CASES.add("nested_strided_attention")
def nested_strided_attention() -> Work:
    """Scaled dot-product attention over nested tensors of strided layout."""
    model = nn.ModuleDict({name: nn.Linear(FEATURES, 64) for name in ("query", "key", "value")})
    model["out"] = nn.Linear(64, CLASSES)

    def loss(model: Any, batch: Any) -> Tensor:
        rows = torch.nested.nested_tensor([x[: 2 + i % 3] for i, x in enumerate(batch[0])])
        parts = [model[name](rows).unsqueeze(1) for name in ("query", "key", "value")]
        seen = F.scaled_dot_product_attention(*parts).squeeze(1)
        dense = torch.nested.to_padded_tensor(seen, 0.0)
        return F.cross_entropy(model["out"](dense.sum(1)), batch[1])

    batch = (torch.randn(EXAMPLES, 4, FEATURES), torch.randint(0, CLASSES, (EXAMPLES,)))
    return Work(model, batch, loss)


@CASES.add("inference_mode_parameter")
def inference_mode_parameter() -> Work:
    """A frozen part made in inference mode, before one that trains: splits rightly."""

    class Headed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.inference_mode():
                self.body = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.GELU())
            self.head = network()

        def forward(self, features: Tensor) -> Tensor:
            with torch.no_grad():
                features = self.body(features)
            return self.head(features.clone())

    return Work(Headed(), labelled(), classified)


@CASES.add("inference_mode_buffer")
def inference_mode_buffer() -> Work:
    """A table made in inference mode, cloned before autograd sees it: splits rightly."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.inference_mode():
                self.register_buffer("table", torch.randn(WIDTH))

        def forward(self, values: Tensor) -> Tensor:
            return values * self.table.clone()

    return between(Shifted())


class Halved(Tensor):
    """A wrapper subclass: a weight in bfloat16 that every operation reads in float32."""

    @staticmethod
    def __new__(cls, stored: Tensor) -> Halved:
        made: Halved = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, stored.shape, dtype=torch.float32, device=stored.device, requires_grad=False
        )
        return made

    def __init__(self, stored: Tensor) -> None:
        self.stored = stored

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["stored"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(func(args[0].stored))
        dense = _pytree.tree_map_only(cls, lambda each: each.stored.float(), (args, kwargs or {}))
        return func(*dense[0], **dense[1])


@CASES.add("subclass_parameters")
def subclass_parameters() -> Work:
    """Frozen weights of a wrapper subclass, with small trained layers beside: splits rightly."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            stored = Halved(torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16) / 8)
            self.base = nn.Parameter(stored, requires_grad=False)
            self.down, self.up = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)

        def forward(self, values: Tensor) -> Tensor:
            return F.linear(values, self.base) + self.up(self.down(values))

    return between(Adapted())


@CASES.add("subclass_by_function")
def subclass_by_function() -> Work:
    """A batch of a subclass that only overrides functions, as images with metadata are."""

    class Named(Tensor):
        pass

    features, labels = labelled()
    return Work(network(), (features.as_subclass(Named), labels), classified)


@CASES.add("quantized_weights")
def quantized_weights() -> Work:
    """torchao's eight-bit weights, frozen, before layers that train."""
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise NotApplicableError("torchao is not installed") from error
    model = network()
    model[3].requires_grad_(False)
    quantize_(model[3], Int8WeightOnlyConfig())
    return Work(model, labelled(), classified)


@CASES.add("dtensor_parameters")
def dtensor_parameters() -> Work:
    """Parameters that are distributed tensors, over a mesh of one process."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_module

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = distribute_module(network(), init_device_mesh("cpu", (1,)))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate

        mesh = next(model.parameters()).device_mesh  # type: ignore[union-attr]
        features, labels = (DTensor.from_local(each, mesh, [Replicate()]) for each in batch)
        found: Any = F.cross_entropy(model(features), labels)
        return found.to_local()

    return Work(model, labelled(), loss)


@CASES.add("one_hot_rows")
def one_hot_rows() -> Work:
    """A linear layer reads one-hot rows: splits rightly."""
    words = torch.randint(0, 512, (EXAMPLES,))
    batch = (F.one_hot(words, 512).float(), torch.randint(0, CLASSES, (EXAMPLES,)))
    return Work(network(512), batch, classified)


@CASES.add("top_eight_rows")
def top_eight_rows() -> Work:
    """Eight of 512 activations are left: splits rightly."""

    def function(values: Tensor) -> Tensor:
        kept = values.topk(8, 1)
        return torch.zeros_like(values).scatter(1, kept.indices, kept.values)

    return between(nn.Sequential(nn.Linear(WIDTH, 512), Called(function)), 512)


@CASES.add("gelu_derivative_bias")
def gelu_derivative_bias() -> Work:
    """GELUs in a row, whose derivative codes' bias would add up: splits rightly."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return between(nn.Sequential(*layers))
