"""``daf bench jobs``: the files it writes, what its figures say, and one job trained small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from daf_bench.data.cifar import load_cifar10, load_cifar100
from daf_bench.data.folder import load_folder
from daf_bench.data.sentences import load_e2e, load_mrpc, load_sst2, load_stsb
from daf_bench.data.webnlg import load_webnlg
from daf_bench.jobs import made, run
from daf_bench.jobs.run import JOBS
from daf_bench.workloads.sources import Sources

from daf.core.errors import UnknownNameError

LOADERS = {
    "cifar10": load_cifar10,
    "cifar100": load_cifar100,
    "images": load_folder,
    "sst2": load_sst2,
    "mrpc": load_mrpc,
    "stsb": load_stsb,
    "e2e": load_e2e,
    "webnlg": load_webnlg,
}


@pytest.mark.parametrize("name", JOBS)
def test_made_examples_are_as_many_as_asked_and_their_loader_reads_them(
    name: str, tmp_path: Path
) -> None:
    job = JOBS[name]
    assert not job.write(made.Asked(tmp_path, 12, Sources()))
    options = {"context": 512} if job.config else {}
    data = LOADERS[job.data](tmp_path, **options)
    written = 5 * 12 if job.data == "cifar10" else 12
    assert len(data.train) == written
    if job.config is not None:
        assert data.context == 512
        assert max(1, data.classes) == (job.classes if job.config is made.ROBERTA_BASE else 1)


@pytest.mark.shared_data
@pytest.mark.parametrize("name", ["roberta-sst2", "roberta-mrpc", "roberta-stsb", "gpt2-e2e"])
def test_published_examples_are_the_files_first(
    name: str, tmp_path: Path, shared_data: Path
) -> None:
    job = JOBS[name]
    assert job.write(made.Asked(tmp_path, 12, Sources(shared_data)))
    few = LOADERS[job.data](tmp_path, context=128)
    place = {"e2e": "e2e", "sst2": "glue/SST-2", "mrpc": "glue/MRPC", "stsb": "glue/STS-B"}
    whole = LOADERS[job.data](shared_data / place[job.data], context=128)
    assert len(few.train) == 12
    assert few.train.tokens.tolist() == whole.train.tokens[:12].tolist()


def test_configurations_are_the_published_shapes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="it reads config.json")
    counts = {}
    for kind, config in (("roberta", made.ROBERTA_BASE), ("gpt2", made.GPT2_MEDIUM)):
        made.write_model(config, 2, tmp_path / kind, is_small=False)
        found = json.loads((tmp_path / kind / "config.json").read_text())
        read = transformers.AutoConfig.from_pretrained(tmp_path / kind)
        assert read.architectures == found["architectures"]
        wide, layers = read.hidden_size, read.num_hidden_layers
        places = getattr(read, "max_position_embeddings", 0)
        counts[kind] = wide * (read.vocab_size + places) + layers * 12 * wide * wide
    # Published: 125 and 355 million; norms and biases are left out here.
    assert counts["roberta"] == pytest.approx(125e6, rel=0.02)
    assert counts["gpt2"] == pytest.approx(355e6, rel=0.01)


def trained(peak_bytes: int, saved: int, step_ms: float, **more: Any) -> dict[str, Any]:
    said = {"peak_bytes": peak_bytes, "saved_bytes_plain": 800, "saved_bytes_peak": saved}
    return said | {"step_ms_median": step_ms} | more


def test_figures_are_of_the_first_budget_and_count_what_passed_one() -> None:
    runs = [
        trained(500, 80, 120.0, policy="optimal", budget_bytes=500),
        trained(501, 100, 90.0, policy="daf", budget_bytes=500),
        trained(300, 10, 500.0, policy="optimal", budget_bytes=300),
        {"policy": "daf", "budget_bytes": 300, "failed": "no"},
    ]
    rows = [{"job": "a", "plain": trained(1000, 800, 100.0), "runs": runs}]
    rows.append({"job": "b", "plain": {"failed": "no"}, "runs": []})
    figures = run.figures_of(rows)
    assert figures["a/optimal/saved_ratio"] == 10.0
    assert figures["a/optimal/step_ratio"] == pytest.approx(1.2)
    assert figures["a/daf/peak_ratio"] == pytest.approx(0.501)
    assert figures["daf_step_ratio_median"] == pytest.approx(0.9)
    assert (figures["jobs"], figures["over_budget"], figures["failed"]) == (2, 1, 2)


def test_unknown_jobs_are_named() -> None:
    assert run.named_jobs("gpt2-e2e, roberta-sst2") == ("gpt2-e2e", "roberta-sst2")
    with pytest.raises(UnknownNameError, match="unknown job 'gpt3'; known: resnet18-cifar10"):
        run.named_jobs("gpt2-e2e,gpt3")


@pytest.mark.thorough
def test_a_small_job_trains_plainly_and_within_a_budget_that_it_names(tmp_path: Path) -> None:
    job = run.JobsJob(("roberta-mrpc",), steps=2, is_small=True, sources=Sources())
    found = run.run(job, tmp_path / "rows.jsonl")
    assert found.figures["failed"] == found.figures["over_budget"] == 0
    (row,) = found.rows
    assert [each["policy"] for each in row["runs"]] == ["optimal", "daf"]
    assert all(each["refused"] for each in row["runs"])  # so small a job is all libraries
    assert run.run(job, tmp_path / "rows.jsonl").rows == found.rows
