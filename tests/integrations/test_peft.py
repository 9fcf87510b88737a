"""PEFT's adapters on plain and quantized weights train within a budget as they do without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

peft = pytest.importorskip("peft", reason="the adapters are its own")
transformers = pytest.importorskip("transformers", reason="the model is its own")

import daf
from daf.core.step_report import StepReport

pytestmark = pytest.mark.filterwarnings("ignore::Warning")
WORDS, LENGTH, ROWS, STEPS, RANK = 200, 64, 32, 4, 4
CUT_BYTES, WHOLE_BYTES = 50_000_000, 105_000_000  # the least of a whole batch takes 70 to 87 MB
TARGETS = ["q_proj", "v_proj", "up_proj", "down_proj"]
Budget = Callable[[int], int]
Make = Callable[[nn.Module], nn.Module]


def decoder() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 1024, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=WORDS, **sizes, **heads, use_cache=False)
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def four_bits_of_bitsandbytes(model: nn.Module) -> nn.Module:
    """QLoRA's base: autograd's function holds the weight on ``ctx``, where no hook sees it."""
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="its weights of 4 bits")
    model.is_loaded_in_4bit = True
    for name, each in [*model.named_modules()]:
        if isinstance(each, nn.Linear) and "lm_head" not in name:
            made = bitsandbytes.nn.Linear4bit(
                each.in_features,
                each.out_features,
                bias=False,
                compute_dtype=torch.float32,
                quant_type="nf4",
            )
            weight = each.weight.detach().clone()
            made.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
            model.set_submodule(name, made.to("cpu"))
    assert model.model.layers[0].mlp.up_proj.weight.dtype is torch.uint8
    return model


def quantized_by_torchao(config: str, kind: str, model: nn.Module, **options: Any) -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization", reason="its weights of few bits")
    made = getattr(quantization, config)(**options)
    quantization.quantize_(model.model, made)
    assert type(model.model.layers[0].mlp.up_proj.weight).__name__ == kind
    return model


def eight_bits_of_torchao(model: nn.Module) -> nn.Module:
    return quantized_by_torchao("Int8WeightOnlyConfig", "Int8Tensor", model)


def four_bits_of_torchao(model: nn.Module) -> nn.Module:
    granularity = pytest.importorskip("torchao.quantization.granularity")
    options = {"weight_dtype": torch.int4, "granularity": granularity.PerGroup(32)}
    return quantized_by_torchao(
        "IntxWeightOnlyConfig", "IntxUnpackedToInt8Tensor", model, **options
    )


def adapted(base: Make, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=RANK, lora_alpha=8, target_modules=TARGETS, **options)
    model: nn.Module = peft.get_peft_model(base(decoder()), config)
    with torch.no_grad():  # B begins at 0, and so would A's gradient
        for name, each in model.named_parameters():
            if "lora_B" in name:
                each.normal_(std=0.1)
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], 1e-2)


def lorafa(model: nn.Module) -> torch.optim.Optimizer:
    optimizers = pytest.importorskip("peft.optimizers")
    made: torch.optim.Optimizer = optimizers.create_lorafa_optimizer(
        model=model, r=RANK, lora_alpha=8, lr=1e-2
    )
    return made


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator) for _ in range(STEPS)]


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    found: Tensor = model(input_ids=tokens, labels=tokens).loss
    return found


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if "lora_" in n}


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for tokens in batches():
        optimizer.zero_grad()
        loss_of(model, tokens).backward()
        optimizer.step()


def within(
    model: nn.Module, optimizer: torch.optim.Optimizer, bound: int, **options: Any
) -> tuple[StepReport, daf.Session]:
    """Train as ``by_hand`` does; return the last report, and the session."""
    with daf.Session(model, optimizer, bound, tolerance=0, **options) as session:
        reports = [session.step(tokens, loss_of) for tokens in batches()]
    assert session.peak_bytes <= bound
    return reports[-1], session


def unquantized(model: nn.Module) -> nn.Module:
    return model


def velora(start: str) -> Callable[[], nn.Module]:
    """Its inputs are projected on a direction: a random one, or the mean of its batch or first."""

    def make() -> nn.Module:
        config = getattr(peft, "VeloraConfig", None)
        if config is None:
            pytest.skip("this PEFT has no VeLoRA")
        return adapted(unquantized, velora_config=config(num_groups=8, init_type=start))

    return make


def on(base: Make, **options: Any) -> Callable[[], nn.Module]:
    return lambda: adapted(base, **options)


LONG = pytest.mark.thorough
CASES = [
    pytest.param(on(unquantized), adamw, WHOLE_BYTES, id="lora"),
    pytest.param(on(unquantized, use_dora=True), adamw, 150_000_000, id="dora", marks=LONG),
    pytest.param(on(unquantized), lorafa, 90_000_000, id="lora-fa", marks=LONG),
    pytest.param(velora("random"), adamw, WHOLE_BYTES, id="velora", marks=LONG),
    pytest.param(on(four_bits_of_bitsandbytes), adamw, WHOLE_BYTES, id="qlora of bitsandbytes"),
    pytest.param(on(eight_bits_of_torchao), adamw, WHOLE_BYTES, id="int8 of torchao", marks=LONG),
    pytest.param(on(four_bits_of_torchao), adamw, WHOLE_BYTES, id="int4 of torchao"),
]
STAY_WHOLE = [
    pytest.param(velora("batch_average"), "writes the buffer", id="velora", marks=LONG),
    pytest.param(velora("batch_average_once"), "writes the buffer", id="velora of a first batch"),
    pytest.param(
        on(four_bits_of_bitsandbytes, use_dora=True),
        "writes parameters",
        id="dora of bitsandbytes",
        marks=LONG,
    ),
]


def plainly(make: Callable[[], nn.Module], optimizer: Any) -> tuple[dict[str, Tensor], float]:
    """Return the adapters after training without DAF, and how far training moved them."""
    model = make()
    begun = trained(model)
    by_hand(model, optimizer(model))
    found = trained(model)
    return found, apart(begun, found)


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return sum(float((one[name] - other[name]).square().sum()) for name in one) ** 0.5


@pytest.mark.parametrize(("make", "optimizer", "whole_bytes"), CASES)
def test_adapters_are_those_of_a_plain_loop(
    make: Callable[[], nn.Module], optimizer: Any, whole_bytes: int, budget: Budget
) -> None:
    """Bit for bit where the batch is whole; within what reordered sums move where it is cut."""
    plain, moved = plainly(make, optimizer)
    model = make()
    report, session = within(model, optimizer(model), budget(CUT_BYTES))
    assert session.split_refusal == ""
    assert report.micro_batch < ROWS
    assert apart(trained(model), plain) < 0.005 * moved
    model = make()
    report, session = within(model, optimizer(model), budget(whole_bytes), split=False)
    assert report.micro_batch == ROWS
    assert session.plan is not None
    assert session.plan.policy.name != "plain"
    assert apart(trained(model), plain) == 0.0 < moved


@pytest.mark.parametrize(("make", "reason"), STAY_WHOLE)
def test_what_its_parts_would_train_otherwise_stays_whole(
    make: Callable[[], nn.Module], reason: str, budget: Budget
) -> None:
    plain, moved = plainly(make, adamw)
    model = make()
    report, session = within(model, adamw(model), budget(150_000_000))
    assert reason in session.split_refusal
    assert report.micro_batch == ROWS
    assert apart(trained(model), plain) == 0.0 < moved
