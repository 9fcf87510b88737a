"""The loops that docs/hosts.md shows train as their hosts' own."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("accelerate", reason="the extra `hosts` has it")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import find_executable_batch_size

import daf
from daf.memory.owners import owners

PAGE = Path(__file__).parents[2] / "docs" / "hosts.md"
pytestmark = pytest.mark.filterwarnings("ignore::Warning")
ROWS = 512
Same = Callable[[nn.Module, nn.Module], None]


def run(words: str, names: dict[str, Any], budget_bytes: int) -> None:
    """Run the page's one block of Python that has these words."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (block,) = (each for each in blocks if words in each)
    exec(block.replace('"4GB"', str(budget_bytes)), names)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    smooth = (nn.GELU(), nn.Tanh(), nn.SiLU(), nn.Sigmoid())
    return nn.Sequential(nn.Linear(16, 2048), *smooth, nn.Linear(2048, 4))


def loader(rows: int = ROWS) -> DataLoader[Any]:
    x = torch.randn(4 * ROWS, 16, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.argmax(1) % 4), batch_size=rows)


def acts(session: Any) -> bool:
    """True if it trains otherwise than plainly."""
    return bool(session.plan.micro_batch < ROWS or session.plan.policy.name != "plain")


def test_accelerate(budget: Callable[[int], int], same_weights: Same) -> None:
    """Accumulation of 2, clipping, a schedule."""

    def prepared() -> dict[str, Any]:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        names = ("model", "optimizer", "loader", "scheduler")
        made = accelerator.prepare(model, optimizer, loader(), schedule)
        more = {"accelerator": accelerator, "criterion": nn.functional.cross_entropy, "daf": daf}
        return dict(zip(names, made, strict=True)) | more

    plain = prepared()
    accelerator, model, optimizer = plain["accelerator"], plain["model"], plain["optimizer"]
    for inputs, labels in plain["loader"]:
        with accelerator.accumulate(model):
            accelerator.backward(plain["criterion"](model(inputs), labels))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            plain["scheduler"].step()
            optimizer.zero_grad()
    ours = prepared()
    bound = budget(50_000_000)
    run("accelerator.scaler", ours, bound)
    run("accelerator.accumulate", ours, bound)
    same_weights(ours["model"], model)
    assert ours["session"].peak_bytes <= bound
    assert ours["optimizer"].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] < 1e-3


def test_accelerate_s_finder_recognises_a_refusal(budget: Callable[[int], int]) -> None:
    tried = []

    @find_executable_batch_size(starting_batch_size=4 * ROWS)
    def train(batch_size: int) -> None:
        tried.append(batch_size)
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with daf.Session(model, optimizer, bound, tolerance=0, split=False) as session:
            for batch in loader(batch_size):
                session.backward(batch, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]))
                optimizer.step()
                optimizer.zero_grad()

    bound = budget(50_000_000)
    train()
    assert len(tried) > 1
    assert not owners.living()


def test_fabric(budget: Callable[[int], int]) -> None:
    lightning = pytest.importorskip("lightning", reason="the extra `hosts` has it")
    trained = []
    for precision, within in product(("32-true", "bf16-mixed"), (False, True)):
        fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
        made = net()
        model, optimizer = fabric.setup(made, torch.optim.SGD(made.parameters(), 0.1))
        names = {"fabric": fabric, "model": model, "optimizer": optimizer, "daf": daf}
        names |= {"criterion": nn.functional.cross_entropy}
        names["loader"] = fabric.setup_dataloaders(loader())
        bound = budget(50_000_000)
        if within:
            run("fabric.clip_gradients", names, bound)
            assert names["session"].peak_bytes <= bound
        else:
            for inputs, labels in names["loader"]:
                optimizer.zero_grad()
                fabric.backward(names["criterion"](model(inputs), labels))
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
        trained.append(torch.cat([each.detach().flatten() for each in made.parameters()]))
    begun = torch.cat([each.detach().flatten() for each in net().parameters()])
    torch.testing.assert_close(trained[1], trained[0], rtol=1e-4, atol=1e-6)
    assert (trained[3] - trained[2]).norm() < 0.02 * (trained[2] - begun).norm()


def classifier(folder: Path) -> dict[str, Any]:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=50, intermediate_size=64, **sizes)
    words = torch.arange(32 * 8).view(32, 8) % 50
    options = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    return {
        "Trainer": transformers.Trainer,
        "arguments": transformers.TrainingArguments(str(folder), max_steps=2, **options),
        "model": transformers.BertForSequenceClassification(config),
        "data": [{"input_ids": row, "labels": row[0] % 2} for row in words],
    }


@pytest.mark.parametrize("words", ["trainer = budgeted(Trainer", "class Mine"])
def test_trainer(words: str, tmp_path: Path, budget: Callable[[int], int]) -> None:
    names = classifier(tmp_path)
    run(words, names, bound := budget(200_000_000))
    assert names["trainer"].state.global_step == 2
    assert names["trainer"].daf_session.budget == bound


def test_groups(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    names = classifier(tmp_path) | {"torch": torch, "daf": daf}
    names["trainer"] = transformers.Trainer(names["model"], names["arguments"])
    from daf.integrations.transformers import budgeted

    run("def some_groups", names | {"budgeted": budgeted}, 1)
    rows: Tensor = torch.arange(8)
    assert names["trainer"]._daf_options["split"].take({"input_ids": rows}, 1, 2)[
        "input_ids"
    ].tolist() == [4, 5, 6, 7]


def test_lightning(budget: Callable[[int], int]) -> None:
    lightning = pytest.importorskip("lightning", reason="the extra `hosts` has it")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, index: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    def quiet(**options: Any) -> Any:
        none = {"enable_progress_bar": False, "enable_model_summary": False}
        return lightning.Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False, **none, **options
        )

    names = {"Trainer": quiet, "module": Module(), "loader": loader()}
    run("import DafStrategy", names, bound := budget(60_000_000))
    assert names["trainer"].global_step == 20
    assert names["trainer"].strategy.session.peak_bytes <= bound


def test_skorch(budget: Callable[[int], int], same_weights: Same) -> None:
    skorch = pytest.importorskip("skorch", reason="the extra `hosts-test` has it")
    names = {"NeuralNetClassifier": skorch.NeuralNetClassifier, "daf": daf, "nn": nn}
    x, y = loader().dataset.tensors  # type: ignore[attr-defined]
    names |= {"torch": torch, "Net": net, "inputs": x.numpy(), "labels": y.numpy()}
    options = {"max_epochs": 2, "batch_size": ROWS, "lr": 0.1, "verbose": 0}
    plain = skorch.NeuralNetClassifier(net, criterion=nn.CrossEntropyLoss, **options)
    plain.fit(names["inputs"], names["labels"])  # which loads scikit-learn, too
    run("NeuralNetClassifier", names, bound := budget(50_000_000))
    ours = names["net"]
    same_weights(ours.module_, plain.module_)
    for name in ("train_loss", "valid_loss", "valid_acc"):
        found, expected = ours.history[:, name], plain.history[:, name]
        assert found == pytest.approx(expected, rel=1e-3)
    assert ours.session.peak_bytes <= bound
    assert acts(ours.session)
    assert not owners.living()


def test_fastai(budget: Callable[[int], int], same_weights: Same) -> None:
    """Its schedule, clipping and metrics too."""
    reason = "the extra `hosts-test` has it"
    pytest.importorskip("fastai.callback.schedule", reason=reason)  # gives learners their fits
    from fastai.callback.core import Callback, CancelBatchException
    from fastai.callback.training import GradientClip
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.metrics import accuracy
    from fastai.optimizer import OptimWrapper

    def clipped(*args: Any, **kwargs: Any) -> Any:
        kwargs["cbs"] = [GradientClip(0.5), *filter(None, [kwargs.get("cbs")])]
        return Learner(*args, metrics=accuracy, **kwargs)

    names = {"Callback": Callback, "CancelBatchException": CancelBatchException, "partial": partial}
    names |= {"OptimWrapper": OptimWrapper, "Learner": clipped, "daf": daf, "nn": nn}
    names |= {"torch": torch, "dls": DataLoaders(loader(), loader()), "model": net()}
    adamw = partial(OptimWrapper, opt=torch.optim.AdamW)
    plain = clipped(names["dls"], net(), loss_func=nn.CrossEntropyLoss(), opt_func=adamw)
    plain.fit_one_cycle(2, 1e-3)
    run("OptimWrapper", names, bound := budget(50_000_000))
    ours = names["learner"]
    same_weights(ours.model, plain.model)
    for found, expected in zip(ours.recorder.values, plain.recorder.values, strict=True):
        assert [*found] == pytest.approx([*expected], rel=1e-3)
    assert ours.recorder.hps["lr"] == plain.recorder.hps["lr"]
    (session,) = (each.session for each in ours.cbs if each.name == "budgeted")
    assert session.peak_bytes <= bound
    assert acts(session)
    assert not owners.living()
