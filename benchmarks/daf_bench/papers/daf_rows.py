"""The rows of DAF (arXiv 2507.07149): headline, mechanisms, baselines, jobs, open questions."""

from __future__ import annotations

from daf_bench.papers.row import DAF, Ours, PaperRow

_POLICY = "daf train resnet18 cifar10:FILE.npz --policy daf --budget 700MB"
_ACCURACY = "daf bench accuracy --tasks"

HEADLINES = (
    PaperRow(
        DAF,
        "headline: memory",
        "benchmarks/daf_bench/operators/run.py",
        "daf bench operators --images cifar10:FILE.npz --text text:FILE --json",
        "up to 22.9 × less memory",
        "one bit with all levers, not the published code; both terms are stated, since a process "
        "holds more than saved activations",
        (
            Ours("operators", "saved_ratio", "bytes saved of ResNet-18, plain's ÷ ours"),
            Ours("operators", "peak_ratio", "peak above the floor, plain's ÷ ours"),
        ),
    ),
    PaperRow(
        DAF,
        "headline: speed",
        "benchmarks/daf_bench/peers/run.py",
        "daf bench peers --out FILE.json",
        "up to 3.2 × as fast as earlier dynamic quantization",
        "the baseline runs on our native kernels, so codes and treatments are compared, not "
        "implementations; another machine",
        (
            Ours("peers", "speed_vs_minmax_baseline", "whole steps, median of the workloads"),
            Ours("peers", "w4_speed_vs_minmax_baseline", "GPT-2 with LoRA"),
        ),
    ),
    PaperRow(
        DAF,
        "headline: accuracy",
        "benchmarks/daf_bench/accuracy/run.py",
        f"{_ACCURACY} keywords,minilm-mrpc-full --policies plain,planned --seeds 8 --json",
        "under 1 % of accuracy lost",
        "our codes, half of each task's steps; an interval where there are eight seeds (spoken "
        "digits, MiniLM on MRPC), a mean of few elsewhere",
        (
            Ours("accuracy", "keywords/planned/behind_plain", "spoken digits, points lost"),
            Ours("accuracy", "keywords/planned/behind_plain_high", "at most, of the 95 % interval"),
            Ours("accuracy", "keywords/planned/saved_ratio", "bytes saved there"),
            Ours("accuracy", "minilm-mrpc-full/planned/behind_plain", "MiniLM on MRPC, F1 lost"),
            Ours("accuracy", "minilm-mrpc-full/planned/behind_plain_high", "at most"),
            Ours("accuracy", "minilm-mrpc-full/planned/saved_ratio", "bytes saved there"),
            Ours("accuracy", "resnet20/plain/accuracy_percent", "ResNet-20, plain, %"),
            Ours("accuracy", "resnet20/fused-allocated-1.25/accuracy_percent", "1.25 bits, %"),
        ),
    ),
)

CODES = (
    PaperRow(
        DAF,
        "the whole system in training",
        "src/daf/planning/policies.py",
        "daf bench papers --json",
        "quantizes, packs and pages activations while it trains",
        "within half of plain's peak above the floor; eviction of its codes, fixed growth and "
        "packing beside forward are not in this policy",
        (
            Ours("papers", "daf_published_runs", "workloads trained within the budget"),
            Ours("papers", "daf_published_tried", "tried"),
        ),
    ),
    PaperRow(
        DAF,
        "dynamic activation quantization: ranges of tensors",
        "src/daf/codecs/ranged.py",
        _POLICY,
        "min–max codes whose ranges are measured in every step",
        "the same range of a whole tensor; 4 bits everywhere train, 2 bits do not always",
        (
            Ours("accuracy", "keywords/tensor-2/failed", "runs at 2 bits that diverged"),
            Ours("accuracy", "keywords/tensor-4/accuracy_percent", "spoken digits, 4 bits, %"),
            Ours("accuracy", "keywords/plain/accuracy_percent", "plain, %"),
        ),
    ),
    PaperRow(
        DAF,
        "the same: ranges of channels",
        "src/daf/codecs/ranges.py",
        _POLICY.replace("daf --", "daf-channels --"),
        "a range for each channel",
        "the same",
        (Ours("accuracy", "keywords/channel-2/accuracy_percent", "spoken digits, 2 bits, %"),),
    ),
    PaperRow(
        DAF,
        "widths by importance",
        "src/daf/sensitivity/estimate.py",
        f"{_ACCURACY} resnet20 --policies allocated-1.25,gact-2 --json",
        "more bits where their loss harms more",
        "importance is a measured variance of the gradient, and widths are those of least noise "
        "by an integer program",
        (
            Ours(
                "accuracy",
                "resnet20/allocated-1.25/sensitivity_overhead",
                "share of the time that measuring takes",
            ),
        ),
    ),
    PaperRow(
        DAF,
        "as published beside ours",
        "benchmarks/daf_bench/papers/equal_noise.py",
        "daf bench papers --json",
        "no such comparison",
        "bytes at equal noise of the gradient, whole batches without a plan; steps at the same "
        "budget, which both fill",
        (
            Ours("papers", "ours_vs_daf_published_saved", "bytes saved, published ÷ ours"),
            Ours("papers", "ours_vs_daf_published_step", "step, ours ÷ published"),
        ),
    ),
)

REDUCTION = (
    PaperRow(
        DAF,
        "hybrid reduction",
        "csrc/reductions/ranges.cpp",
        "daf bench reduce --picture FILE.png --json",
        "between a tree and atomics, for mobile memory hierarchies",
        "the processor's caches favour trees; the strategy is chosen by measurement, PyTorch's "
        "own among the candidates",
        (
            Ours("reduce", "hybrid_worst_vs_best", "hybrid's time ÷ the best one's, worst shape"),
            Ours("reduce", "worst_vs_best", "the chosen one's ÷ the best one's, worst shape"),
        ),
    ),
    PaperRow(
        DAF,
        "hybrid reduction on a GPU",
        "src/daf/kernels/triton/reductions.py",
        "daf bench reduce --json",
        "accumulators of each thread's own, then one atomic each, in one launch",
        "large tensors take three kernels, not one launch; measured with --quick on an H200 only",
        (
            Ours("reduce-gpu", "hybrid_worst_vs_best", "hybrid's time ÷ the best one's, worst"),
            Ours("reduce-gpu", "worst_vs_best", "the chosen one's ÷ the best one's, worst"),
        ),
    ),
    PaperRow(
        DAF,
        "strategy under changing load",
        "benchmarks/daf_bench/kernels/retiming.py",
        "daf bench reduce --varying --json",
        "no such experiment that we know of",
        "timing again does not pay; the choice of first use stays",
        (Ours("reduce_varying", "retimed_vs_kept", "time when timed again ÷ kept"),),
    ),
)

PACKING = (
    PaperRow(
        DAF,
        "what bit-packing costs",
        "benchmarks/daf_bench/kernels/bit_packing.py",
        "daf bench packing --picture FILE.png --json",
        "the overhead of dynamic quantization, packing included, prevents its use",
        "stages by PyTorch's operators on one thread, 2 bits",
        (
            Ours("packing", "packing_share", "packing's share of quantizing and packing"),
            Ours("packing", "fused_speed_vs_stages", "both stages' time ÷ one native pass's"),
        ),
    ),
    PaperRow(
        DAF,
        "unified layout",
        "csrc/codecs/block_io.h",
        "daf bench kernels --json",
        "processor and accelerator share a layout, so that none converts it",
        "planes of bits, the same bytes from every back end; measured in one pass, not as a "
        "conversion saved on a phone",
        (
            Ours("packing", "relayout_share", "share that a change of layout would take"),
            Ours("kernels", "minmax_encode_vs_memcpy", "memcpy's time ÷ min–max encoding's"),
        ),
    ),
    PaperRow(
        DAF,
        "collaborative CPU–GPU packing",
        "src/daf/offload/routing.py",
        "daf bench pack --json",
        "processor and accelerator pack together, beside the forward pass",
        "exists for codes that wait on the host; tested on a simulated device, no result of a GPU "
        "is committed",
    ),
    PaperRow(
        DAF,
        "the processor's half on shared memory",
        "benchmarks/daf_bench/offload/shared_memory.py",
        "daf bench pack --device cpu --json",
        "packing is hidden behind the forward pass by other cores",
        "measured by a helper thread of the benchmark's; DAF packs in one native pass on the "
        "thread of the forward pass, since a core that packs is one that forward lacks",
        (
            Ours("pack_shared", "w1_helper_step_ratio", "step, helper ÷ forward's thread"),
            Ours("pack_shared", "w1_hidden_share", "of packing hidden, ResNet-18"),
            Ours("pack_shared", "w3_helper_step_ratio", "step, BERT-small"),
            Ours("pack_shared", "w3_hidden_share", "hidden, BERT-small"),
        ),
    ),
)

POOL = (
    PaperRow(
        DAF,
        "importance-aware paged pool",
        "csrc/pool/pool.cpp",
        "daf bench pool --picture FILE.png --json",
        "pages of one contiguous region hold the codes",
        "the same; also on a GPU, where a plane is a block of PyTorch's allocator",
        (Ours("pool", "op_us_at_1e6", "µs of the dearest operation on a page, a million live"),),
    ),
    PaperRow(
        DAF,
        "red–black tree by importance",
        "csrc/pool/tree.h",
        "daf bench pool --json",
        "a red–black tree orders pages by importance",
        "the tree holds tensors, by their least significant plane, not pages",
        (Ours("pool", "tree_us_at_1e6", "µs of the dearest operation, a million nodes"),),
    ),
    PaperRow(
        DAF,
        "eviction of planes",
        "csrc/pool/pool.h",
        "daf bench pool --json",
        "the least important go first when memory runs short",
        "only of rotated codes; min–max codes, those of policy daf too, go as whole activations",
        (
            Ours("pool", "cap_halved_ms", "ms until a halved cap is kept"),
            Ours("pool", "halved_gradient_error_vs_predicted", "gradient error ÷ predicted"),
        ),
    ),
    PaperRow(
        DAF,
        "eviction of whole activations",
        "csrc/pool/pool.cpp",
        "daf bench papers --only w6,w3 --json",
        "an activation goes as a whole",
        "offered (--pool-evicts activations), not the default: backward reads zeros instead, and "
        "planes add less to the gradient's error at the same bytes",
        (Ours("papers", "eviction_whole_over_planes", "error added, whole ÷ planes, least"),),
    ),
    PaperRow(
        DAF,
        "growth by 100 MB",
        "csrc/pool/growth.h",
        "daf bench pool --json",
        "the pool grows in steps of 100 MB",
        "both are offered (--pool-growth 100MB); adaptive growth is the default, holds less and "
        "takes longer, and a cut fixed size evicts as few pages",
        (Ours("pool", "evictions_vs_fixed_increment", "pages evicted, adaptive ÷ 100 MB"),),
    ),
    PaperRow(
        DAF,
        "fragmentation",
        "benchmarks/daf_bench/pool/training.py",
        "daf bench pool --json",
        "pages do not fragment where an allocator's memory does",
        "ResNet-20's training with widths that move, and made-up traces of ten thousand iterations",
        (
            Ours("pool", "training_effective_over_theoretical_worst", "payload ÷ held in training"),
            Ours("pool", "training_effective_over_theoretical_drift", "its drift over the run"),
            Ours("pool", "effective_over_theoretical_worst", "of the traces, worst"),
            Ours("pool", "effective_over_theoretical_drift", "its drift over the trace"),
        ),
    ),
    PaperRow(
        DAF,
        "baselines: malloc and best fit",
        "benchmarks/daf_bench/pool/trace_player.py",
        "daf bench pool --json",
        "both hold more than they use as widths change",
        "the same traces on a best-fit arena and glibc's malloc; numbers in docs/pool.md",
    ),
    PaperRow(
        DAF,
        "open question: the metric of importance",
        "benchmarks/daf_bench/papers/eviction.py",
        "daf bench papers --only w6,w3 --json",
        "accuracy collapses if what is important goes; which metric is best is open",
        "the gradient's error on ResNet-20 and BERT-small, by measured, uniform, shuffled and "
        "inverted importance; accuracy of spoken digits after training in which half of the codes "
        "goes in every second step, over three seeds that tell little apart",
        (
            Ours("papers", "eviction_importance_gain", "error added, shuffled ÷ measured, least"),
            Ours("papers", "eviction_inverted_over_measured", "inverted ÷ measured"),
            Ours("pool", "halved_gradient_error_vs_predicted", "of a halved cap ÷ predicted"),
            Ours("accuracy", "keywords/falling-measured/accuracy_percent", "accuracy, measured, %"),
            Ours("accuracy", "keywords/falling-inverted/accuracy_percent", "inverted, %"),
        ),
    ),
)

JOBS = (
    PaperRow(
        DAF,
        "baselines: ActNN and GACT",
        "benchmarks/daf_bench/accuracy/published_allocation.py",
        f"{_ACCURACY} keywords --policies actnn-2,gact-2,allocated-2 --json",
        "the earlier dynamic quantization of the headline figures",
        "re-implemented on our kernels: their code and their allocation of widths",
        (
            Ours("accuracy", "keywords/actnn-2/accuracy_percent", "ActNN, 2 bits, %"),
            Ours("accuracy", "keywords/gact-2/accuracy_percent", "GACT, 2 bits, %"),
            Ours("accuracy", "keywords/allocated-2/accuracy_percent", "ours, 2 bits, %"),
        ),
    ),
    PaperRow(
        DAF,
        "job: ResNet-18 on CIFAR-10",
        "benchmarks/daf_bench/main_job.py",
        "daf bench main --data cifar10:FILE.npz --json",
        "a job of the headline figures",
        "a subset of CIFAR-10; our plan at 2 bits",
        (
            Ours("main", "saved_ratio", "bytes saved, plain's ÷ ours"),
            Ours("main", "step_ratio", "step ÷ plain's"),
            Ours("main", "loss_ratio", "training loss ÷ plain's, worst seed"),
        ),
    ),
    PaperRow(
        DAF,
        "job: ResNet-18 on CIFAR-100 and ImageNet",
        "benchmarks/daf_bench/jobs/run.py",
        "daf bench jobs --only resnet18-cifar100,resnet18-imagenet --json",
        "a job of the headline figures",
        "made-up images in the published formats, half of plain's peak, four steps each: bytes and "
        "time, no accuracy",
        (
            Ours("jobs", "resnet18-cifar100/optimal/step_ratio", "step ÷ plain's, CIFAR-100"),
            Ours("jobs", "resnet18-cifar100/daf/step_ratio", "DAF as published"),
            Ours("jobs", "resnet18-cifar100/optimal/saved_ratio", "bytes saved, plain's ÷ ours"),
            Ours("jobs", "resnet18-imagenet/optimal/step_ratio", "step ÷ plain's, 224²"),
            Ours("jobs", "resnet18-imagenet/daf/step_ratio", "DAF as published"),
            Ours("jobs", "resnet18-imagenet/optimal/peak_ratio", "process's peak ÷ plain's"),
        ),
    ),
    PaperRow(
        DAF,
        "job: RoBERTa-base with LoRA on SST-2, MRPC, STS-B",
        "benchmarks/daf_bench/accuracy/tasks.py",
        f"{_ACCURACY} minilm-sst2-lora,minilm-mrpc-lora,minilm-stsb-lora --json",
        "a job of the headline figures",
        "MiniLM's weights instead of RoBERTa's; half of the steps, few seeds, our codes; 0 means "
        "that none was near enough",
        (
            Ours(
                "accuracy",
                "minilm-sst2-lora/saved_ratio_within_half_point",
                "bytes saved within half a point, plain's ÷ ours, SST-2",
            ),
            Ours("accuracy", "minilm-mrpc-lora/saved_ratio_within_half_point", "MRPC"),
            Ours("accuracy", "minilm-stsb-lora/saved_ratio_within_half_point", "STS-B"),
        ),
    ),
    PaperRow(
        DAF,
        "job: RoBERTa-base's shape with LoRA, real size",
        "benchmarks/daf_bench/jobs/run.py",
        "daf bench jobs --only roberta-mrpc --json",
        "a job of the headline figures",
        "random weights, 16 sentences of 512, rank 8, half of plain's peak; much of plain's time "
        "goes into new memory",
        (
            Ours("jobs", "roberta-mrpc/optimal/peak_ratio", "process's peak ÷ plain's"),
            Ours("jobs", "roberta-mrpc/optimal/step_ratio", "step ÷ plain's"),
            Ours("jobs", "roberta-mrpc/daf/step_ratio", "DAF as published, step ÷ plain's"),
        ),
    ),
    PaperRow(
        DAF,
        "job: GPT-2 Medium with LoRA on E2E and WebNLG",
        "benchmarks/daf_bench/workloads/gpt2.py",
        f"{_ACCURACY} gpt2-e2e-lora --json",
        "a job of the headline figures",
        "a small GPT-2 on E2E; `daf bench jobs` has GPT-2 Medium's shape, none is drawn yet",
        (
            Ours("accuracy", "gpt2-e2e-lora/plain/token_loss", "loss a token, plain"),
            Ours("accuracy", "gpt2-e2e-lora/allocated-1.25/token_loss", "1.25 bits"),
        ),
    ),
    PaperRow(
        DAF,
        "ablation: one mechanism at a time",
        "benchmarks/daf_bench/ablations/run.py",
        "daf bench ablations --out FILE.json",
        "reduction, packing and pool, one at a time",
        "figures of ResNet-18 where no model is named, whole batches; PyTorch's operators",
        (
            Ours("ablations", "w1/ranges by tree/step_vs_whole", "step: tree ÷ hybrid"),
            Ours(
                "ablations", "w1/staged packing/step_vs_whole", "step: packing in stages ÷ at once"
            ),
            Ours("ablations", "w1/codes in malloc/peak_vs_whole", "peak: malloc ÷ pool"),
            Ours("ablations", "w1/codes by best fit/peak_vs_whole", "peak: best fit ÷ pool"),
            Ours("ablations", "w3/staged packing/step_vs_whole", "packing so, BERT-small"),
            Ours("ablations", "w4/staged packing/step_vs_whole", "packing so, GPT-2's shape"),
        ),
    ),
    PaperRow(
        DAF,
        "platforms: phones and boards",
        "benchmarks/daf_bench/gpu.py",
        "daf bench gpu --json",
        "phones and boards, memory shared with the GPU",
        "x86 processors and, for a quarter of an hour, one H200; no phone, no board",
        (Ours("gpu", "w1_float32_daf_step_ratio", "step ÷ plain's on an H200, ResNet-18"),),
    ),
    PaperRow(
        DAF,
        "open question: NPU and DSP",
        "src/daf/kernels/devices.py",
        "daf doctor",
        "left open",
        "not done: the command lists the back ends that there are, and none is an NPU's or a DSP's",
    ),
)

ROWS = (*HEADLINES, *CODES, *REDUCTION, *PACKING, *POOL, *JOBS)
