"""The rows of SAGE (Gim and Ko, MobiSys 2022): techniques, strategies, models, curves."""

from __future__ import annotations

from daf_bench.papers.row import SAGE, Ours, PaperRow

_POLICIES = "daf bench sweep --policies --out FILE.json --picture FILE.png --json"
_OPERATORS = "daf bench operators --images cifar10:FILE.npz --text text:FILE --json"


def _trained_by(policy: str) -> str:
    return f"daf train resnet18 cifar10:FILE.npz --policy {policy} --budget 900MB"


def _model(title: str, where: str, name: str) -> PaperRow:
    """The row of one of SAGE's models, with every lever of ours at one bit."""
    return PaperRow(
        SAGE,
        f"model: {title}",
        where,
        _OPERATORS,
        "a model of the headline figure",
        "one bit and all levers of ours, exact only under the policies above",
        (
            Ours("operators", f"{name}_saved_ratio", "bytes saved, plain's ÷ ours"),
            Ours("operators", f"{name}_peak_ratio", "peak above the floor, plain's ÷ ours"),
            Ours("operators", f"{name}_step_ratio", "step ÷ plain's"),
        ),
    )


TECHNIQUES = (
    PaperRow(
        SAGE,
        "headline: memory",
        "benchmarks/daf_bench/operators/run.py",
        _OPERATORS,
        "over 20 × less memory",
        "codes at one bit are among our levers, which SAGE has not",
        (
            Ours("operators", "densenet121_saved_ratio", "bytes saved of DenseNet-121"),
            Ours("operators", "densenet121_peak_ratio", "its peak above the floor"),
        ),
    ),
    PaperRow(
        SAGE,
        "operator separation, a gradient graph to rearrange",
        "src/daf/recompute/values.py",
        "daf bench values --out FILE.json",
        "differentiable operators are separated from computable ones",
        "PyTorch's own border: autograd's operators above, aten's below; exact, whole batches",
        (
            Ours("values", "resnet50_saved_ratio_115", "bytes saved of ResNet-50, plain's ÷ ours"),
            Ours("values", "resnet50_step", "its pass ÷ plain's"),
            Ours("values", "bert_small_saved_ratio_115", "bytes saved of BERT-small"),
        ),
    ),
    PaperRow(
        SAGE,
        "operator fusion",
        "src/daf/operators/batch_norm/function.py",
        "daf bench operators --speed --json",
        "operators are fused",
        "normalisation, addition and activation; each proven against PyTorch's sequence",
        (
            Ours("operator_speed", "worst_step_ratio", "time ÷ PyTorch's, the worst operator"),
            Ours("operator_speed", "mean_backward_bytes_ratio", "bytes moved in backward, mean"),
        ),
    ),
    PaperRow(
        SAGE,
        "subgraph reduction",
        "src/daf/recompute/recipe.py",
        _trained_by("reduce"),
        "subgraphs of at most five operators are reduced",
        "policy reduce replays module calls of at most five operators; recipes of values do it "
        "across modules under the other policies",
    ),
    PaperRow(
        SAGE,
        "operator-level memory optimisation",
        "src/daf/operators/chunked/products.py",
        _OPERATORS,
        "convolution and matrix product need less memory, operator by operator",
        "chunks of the batch, chosen by the planner",
        (
            Ours("operators", "resnet50_peak_ratio", "peak above the floor of ResNet-50"),
            Ours("operators", "resnet50_peak_ratio_same_allocator", "the same allocator for plain"),
        ),
    ),
    PaperRow(
        SAGE,
        "ablation: four techniques one after another",
        "benchmarks/daf_bench/ablations/run.py",
        "daf bench ablations --out FILE.json",
        "separation, fusion, reduction, operator-level memory, in turn",
        "figures of ResNet-18 where no model is named, whole batches, nothing lossy",
        tuple(
            Ours("ablations", f"{workload}/{stage}/peak_ratio", f"peak: plain's ÷ ours, {words}")
            for workload, stage, words in (
                ("w1", "separation", "separation"),
                ("w1", "fusion", "fusion, too"),
                ("w1", "reduction", "reduction, too"),
                ("w1", "operator memory", "operators' memory, too"),
                ("w3", "operator memory", "all four, BERT-small"),
                ("w4", "operator memory", "all four, GPT-2's shape"),
            )
        ),
    ),
)

STRATEGIES = (
    PaperRow(
        SAGE,
        "dynamic gradient accumulation (DGA)",
        "src/daf/planning/policies.py",
        _trained_by("accumulate"),
        "micro-batches by the budget",
        "refused where batch normalisation would see other statistics, unless that is allowed "
        "(allow_batchnorm_split), as in the comparison of strategies",
    ),
    PaperRow(
        SAGE,
        "dynamic gradient checkpointing (DGC)",
        "src/daf/planning/policies.py",
        _trained_by("checkpoint"),
        "recomputation by the budget",
        "evicts by time per byte among recipes of values and replays of modules",
    ),
    PaperRow(
        SAGE,
        "hybrid of both",
        "src/daf/planning/policies.py",
        _POLICIES,
        "accumulation until the processor is under-used, then recomputation",
        "the same order, on profiles of a few small steps; batch statistics are cut as in SAGE",
        (
            Ours("policies", "sage_models", "models with all eight strategies"),
            Ours("policies", "sage_vs_best_static_worst", "step ÷ the better of SGC and SGA"),
            Ours("policies", "sage_fits_where_static_fits", "share of budgets of SGC or SGA kept"),
        ),
    ),
    PaperRow(
        SAGE,
        "the knee, where accumulation turns into recomputation",
        "benchmarks/daf_bench/sweep/plot.py",
        _POLICIES,
        "the point of under-utilisation is measured",
        "the smallest micro-batch within 5 % of the best examples a second; the picture says "
        "beside SAGE's points how many examples it takes at once and what it computes again",
    ),
    PaperRow(
        SAGE,
        "baseline: static checkpointing (SGC)",
        "benchmarks/daf_bench/harness/peer_methods.py",
        _POLICIES,
        "less throughput within a budget than the hybrid",
        "by hand around blocks, half of them and all; policy checkpoint-static takes a level of "
        "the model's tree; numbers in docs/sweep.md",
    ),
    PaperRow(
        SAGE,
        "baseline: static accumulation (SGA)",
        "benchmarks/daf_bench/harness/peer_methods.py",
        _POLICIES,
        "less throughput within a budget than the hybrid",
        "by hand in 2, 4 and 8 parts; with batch normalisation it computes something else, as "
        "SAGE's does; numbers in docs/sweep.md",
    ),
    PaperRow(
        SAGE,
        "throughput against the budget",
        "benchmarks/daf_bench/sweep/plot.py",
        _POLICIES,
        "the hybrid keeps more throughput than SGC, SGA, DGC and DGA",
        "SAGE's four models at half and at a quarter of plain's peak; our own plan on all "
        "workloads by daf bench sweep",
        (
            Ours("sweep", "step_ratio_w1_50", "our step ÷ plain's at half, ResNet-18"),
            Ours("sweep", "step_ratio_w3_50", "BERT-small"),
        ),
    ),
    PaperRow(
        SAGE,
        "a budget that moves",
        "src/daf/session/budget_controller.py",
        "daf bench pressure --picture FILE.png --json",
        "follows it by accumulation and recomputation",
        "also inside a step: planes are evicted, or the step is tried again",
        (
            Ours("pressure", "within_budget_ms", "ms until a halved budget is kept"),
            Ours("pressure", "lost_steps", "steps lost"),
        ),
    ),
)

MODELS = (
    _model("ResNet-50", "benchmarks/daf_bench/models/resnet50.py", "resnet50"),
    _model("DenseNet-121", "benchmarks/daf_bench/models/densenet.py", "densenet121"),
    _model("MobileNet-v2", "benchmarks/daf_bench/models/mobilenet.py", "mobilenet_v2"),
    _model("BERT-small", "benchmarks/daf_bench/models/language.py", "bert_small"),
)

ROWS = (*TECHNIQUES, *STRATEGIES, *MODELS)
