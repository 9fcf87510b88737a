"""Every workload is what the design names, trains, and is the same for every contestant."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from daf_bench.harness.peer_methods import plain_step
from daf_bench.harness.static_baselines import accumulating_step, checkpoint_blocks
from daf_bench.workloads import WORKLOADS, find_workload, named_workloads, tokens
from daf_bench.workloads.lora import LowRank
from daf_bench.workloads.sources import Sources
from daf_bench.workloads.trainable import Trainable
from torch import nn

from daf.core.errors import DataError, UnknownNameError
from daf.torch_compat.pytree import tensors_in_batch

NOTHING = Sources(None)
needs_transformers = ("w3", "w4")
# How many modules a user would checkpoint: the published networks' blocks, or small ones' layers.
BLOCKS = {"w1": 8, "w2a": 16, "w2b": 58, "w2c": 17, "w3": 2, "w4": 2, "w5": 9, "w6": 9}


def small(name: str) -> Trainable:
    if name in needs_transformers:
        pytest.importorskip("transformers")
    return find_workload(name).load(NOTHING, True).build()


@pytest.mark.parametrize("name", WORKLOADS)
def test_it_trains_and_repeats_itself(name: str) -> None:
    work, twin = small(name), small(name)
    assert len(work.blocks) == BLOCKS[name]
    assert work.model.training
    for first, second in zip(
        tensors_in_batch(work.batch(1)), tensors_in_batch(twin.batch(1)), strict=True
    ):
        assert torch.equal(first, second)
    before = {name: value.clone() for name, value in work.model.named_parameters()}
    losses = []
    for each in (work, twin):
        torch.manual_seed(4)
        losses.append(plain_step(each.model, each.optimizer, each.batch(0), each.task.loss))
    assert losses[0] == losses[1]
    assert np.isfinite(losses[0])
    changed = {n for n, value in work.model.named_parameters() if not torch.equal(value, before[n])}
    assert changed
    assert changed <= {n for n, value in work.model.named_parameters() if value.requires_grad}


def test_full_sizes_are_the_design_s() -> None:
    work = find_workload("w1").load(NOTHING, False).build()
    assert work.batch(0)[0].shape[0] == 128
    pytest.importorskip("transformers")
    sentences = find_workload("w3").load(NOTHING, False)
    assert sentences.batch_size == 64
    assert find_workload("w4").load(NOTHING, False).batch_size == 8


def test_only_lora_is_trained_and_it_starts_as_nothing() -> None:
    work = small("w4")
    trained = {n for n, value in work.model.named_parameters() if value.requires_grad}
    assert trained == {
        f"transformer.h.{layer}.attn.c_attn.{part}" for layer in (0, 1) for part in ("down", "up")
    }
    adapted = next(part for part in work.model.modules() if isinstance(part, LowRank)).eval()
    x = torch.randn(2, 3, 32)
    assert torch.equal(adapted(x), adapted.frozen(x))
    nn.init.ones_(adapted.up)
    expected = adapted.frozen(x) + 8 * (x @ adapted.down.t()).sum(-1, keepdim=True)
    assert torch.allclose(adapted(x), expected, atol=1e-5)


def test_a_name_that_is_not_there_is_refused_with_the_nearest() -> None:
    assert named_workloads("W1, w2A") == ("w1", "w2a")
    with pytest.raises(UnknownNameError, match="did you mean 'w2"):
        find_workload("w2")


def test_sentences_are_read_cut_and_padded(tmp_path: Path) -> None:
    file = tmp_path / "glue" / "SST-2" / "train.tsv"
    file.parent.mkdir(parents=True)
    file.write_text("good good film\t1\nbad\t0\n")
    found = tokens.load_sentences(Sources(tmp_path), 2)
    assert found.words.tolist() == [[2, 2], [4, 0]]
    assert found.labels.tolist() == [1, 0]
    assert found.vocabulary == 5
    file.write_text("good film\tyes\n")
    with pytest.raises(DataError, match="a tab, and 0 or 1"):
        tokens.load_sentences(Sources(tmp_path), 2)


def test_made_up_words_stay_within_the_vocabulary() -> None:
    sentences = tokens.load_sentences(NOTHING, 16)
    assert sentences.words.max() < sentences.vocabulary
    assert (sentences.words[:, 0] > tokens.UNKNOWN).all()
    assert tokens.load_tokens(NOTHING).min() >= 0
    assert tokens.load_tokens(NOTHING).max() < tokens.BYTE_PAIR_VOCABULARY
    assert "made-up" in NOTHING.described()


def gradients(work: Trainable) -> list[torch.Tensor]:
    return [p.grad.clone() for p in work.model.parameters() if p.grad is not None]


def test_checkpointing_by_hand_runs_blocks_twice_and_changes_nothing() -> None:
    plain, ours = small("w3"), small("w3")
    checkpoint_blocks(ours.model, ours.blocks, 0.5)
    calls = []
    for path in ours.blocks:
        attention = ours.model.get_submodule(path).attention
        attention.register_forward_pre_hook(lambda *_, path=path: calls.append(path))
    for each in (plain, ours):
        torch.manual_seed(5)
        plain_step(each.model, each.optimizer, each.batch(0), each.task.loss)
    assert calls == [ours.blocks[0], ours.blocks[1], ours.blocks[0]]
    assert all(map(torch.equal, gradients(plain), gradients(ours)))


def test_a_block_s_list_that_grows_after_the_call_is_computed_from_as_it_was() -> None:
    """DenseNet's layers read a list, to which their own result is appended."""
    plain, ours = small("w2b"), small("w2b")
    checkpoint_blocks(ours.model, ours.blocks, 1.0)
    for each in (plain, ours):
        plain_step(each.model, each.optimizer, each.batch(0), each.task.loss)
    assert all(map(torch.equal, gradients(plain), gradients(ours)))


def test_accumulation_by_hand_weighs_an_unequal_last_piece() -> None:
    class Line:
        train_examples = 5

        @staticmethod
        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            return model(batch).square().mean()

    torch.manual_seed(0)
    model, batch = nn.Linear(3, 1), torch.randn(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sizes = []
    model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    mean = accumulating_step(model, optimizer, Line.loss, 2)(batch)
    ours = model.weight.grad.clone()
    assert sizes == [3, 2]
    assert mean == pytest.approx(plain_step(model, optimizer, batch, Line.loss))
    assert torch.allclose(model.weight.grad, ours)
