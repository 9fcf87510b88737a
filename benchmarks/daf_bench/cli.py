"""``daf bench``: comparisons that print one JSON object with machine, rows and figures."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from daf.training.job import checked_device
from daf_bench import exact_gradients as gradients_bench
from daf_bench import gpu as gpu_bench
from daf_bench import main_job
from daf_bench.accuracy import jobs
from daf_bench.accuracy import run as accuracy_bench
from daf_bench.accuracy.plot import draw_curves
from daf_bench.cli_ablations import ablations_command, levers_command
from daf_bench.cli_bias import bias_command
from daf_bench.cli_conformance import conformance_command
from daf_bench.cli_doors import doors_command
from daf_bench.cli_faults import faults_command
from daf_bench.cli_hosts import hosts_command
from daf_bench.cli_output import (
    ImagesOption,
    JsonOption,
    OnlyOption,
    OutOption,
    PictureOption,
    QuickOption,
    VaryingOption,
    counted_progress,
    keep,
    measure,
    of_data,
    rows_beside,
    show,
    to_file,
    to_picture,
)
from daf_bench.cli_papers import jobs_command, papers_command
from daf_bench.cli_peers import peers_command
from daf_bench.cli_start import start_command
from daf_bench.cli_values import values_command
from daf_bench.kernels import bit_packing, device_codecs
from daf_bench.kernels import reductions as reduce_bench
from daf_bench.kernels import run as kernels_bench
from daf_bench.kernels.plot import draw_roofline
from daf_bench.kernels.reductions_plot import draw_reduce
from daf_bench.kernels.varying_reductions import VaryingJob, quick_varying_job, run_varying
from daf_bench.memory import allocator as allocator_bench
from daf_bench.memory import outside as outside_bench
from daf_bench.memory import pressure as pressure_bench
from daf_bench.memory import survival as survival_bench
from daf_bench.memory.allocator_plot import draw_trade
from daf_bench.memory.pressure_plot import draw_pressure
from daf_bench.offload import run as pack_bench
from daf_bench.offload import shared_memory
from daf_bench.offload.plot import draw_pack
from daf_bench.operators import run as operators_bench
from daf_bench.operators import speed as operator_speed
from daf_bench.operators.plot import draw_waterfall
from daf_bench.pool import run as pool_bench
from daf_bench.pool.plot import draw_times
from daf_bench.sweep import run as sweep_bench
from daf_bench.sweep.plot import draw_sweep
from daf_bench.workloads import named_workloads

app = typer.Typer(help="Measure DAF against what a user would pick instead.", rich_markup_mode=None)

app.command("peers")(peers_command)
app.command("papers")(papers_command)
app.command("jobs")(jobs_command)
app.command("ablations")(ablations_command)
app.command("levers")(levers_command)
app.command("conformance")(conformance_command)
app.command("faults")(faults_command)
app.command("doors")(doors_command)
app.command("hosts")(hosts_command)
app.command("values")(values_command)
app.command("bias")(bias_command)
app.command("start")(start_command)


@app.callback()
def bench() -> None:
    """Measure DAF against what a user would pick instead."""
    os.environ["DAF_CACHE"] = ""  # no row begins with what another one measured


@app.command("main")
def main_command(
    data: Annotated[
        str | None, of_data("Data set; by default CIFAR-10 if the measuring data is there.")
    ] = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare the main job (ResNet-18 within a budget) with plain PyTorch, interleaved."""
    name = data or main_job.default_data()
    job = main_job.quick_job(name) if quick else main_job.MainJob(name)
    measure(partial(main_job.run, job), as_json=as_json)


@app.command("allocator")
def allocator_command(
    images: ImagesOption = None,
    text: Annotated[
        str | None, of_data("A text for the BERT-small, as text:FILE; without it, images only.")
    ] = None,
    picture: Annotated[
        Path | None, to_picture("Draw step time against peak into this PNG file.")
    ] = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare the recycling allocator at several caps with glibc and others, interleaved."""
    name = images or main_job.default_data()
    job = allocator_bench.quick_job(name) if quick else allocator_bench.full_job(name, text)
    measure(partial(allocator_bench.run, job), as_json=as_json, draw=draw_trade, picture=picture)


@app.command("outside")
def outside_command(quick: QuickOption = False, as_json: JsonOption = False) -> None:
    """Measure what libraries take beside the process's account, which no limit refuses."""
    size = outside_bench.MB * (20 if quick else 100)
    measure(partial(outside_bench.run, size), as_json=as_json)


@app.command("operators")
def operators_command(
    images: ImagesOption = None,
    text: Annotated[
        str | None, of_data("A text for the BERT-small, as text:FILE; without it, images only.")
    ] = None,
    picture: Annotated[
        Path | None, to_picture("Draw what each lever takes off into this PNG file.")
    ] = None,
    speed: Annotated[
        bool, typer.Option("--speed", help="Time each operator alone, forward and backward.")
    ] = False,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare fused and chunked operators, codes and gradient release with plain PyTorch."""
    if speed:
        time_operators(quick=quick, as_json=as_json)
        return
    name = images or main_job.default_data()
    job = operators_bench.quick_job(name) if quick else operators_bench.full_job(name, text)
    measure(
        partial(operators_bench.run, job), as_json=as_json, draw=draw_waterfall, picture=picture
    )


def time_operators(*, quick: bool, as_json: bool) -> None:
    """Each operator beside PyTorch's own sequence."""
    job = operator_speed.quick_job() if quick else operator_speed.SpeedJob()
    measure(partial(operator_speed.run, job), as_json=as_json)


@app.command("gpu")
def gpu_command(
    device: Annotated[str, typer.Option(help="Where: cuda, cuda:1; cpu to try it.")] = "cuda",
    images: ImagesOption = None,
    text: Annotated[
        str | None,
        of_data("A text for GPT-2 Medium's shape, as text:FILE; without it, images only."),
    ] = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare codes with plain PyTorch on a GPU: reserved bytes, step time, the largest batch."""
    checked_device(device)
    name = images or main_job.default_data()
    job = gpu_bench.quick_job(device, name) if quick else gpu_bench.full_job(device, name, text)
    measure(partial(gpu_bench.run, job), as_json=as_json)


@app.command("pool")
def pool_command(
    picture: Annotated[
        Path | None, to_picture("Draw time against live pages into this PNG file.")
    ] = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Time the paged pool, and compare what it wastes with malloc, best fit and fixed growth."""
    job = pool_bench.quick_job() if quick else pool_bench.PoolJob()
    measure(partial(pool_bench.run, job), as_json=as_json, draw=draw_times, picture=picture)


@app.command("pressure")
def pressure_command(
    picture: Annotated[
        Path | None, to_picture("Draw budget, memory and throughput over time into this PNG file.")
    ] = None,
    out: Annotated[Path | None, to_file("Write the result to this JSON file.")] = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Halve a run's budget in mid-step, restore it, then squeeze it by a second process."""
    job = pressure_bench.quick_job() if quick else pressure_bench.full_job()
    run = partial(pressure_bench.run, job)
    keep(measure(run, as_json=as_json, draw=draw_pressure, picture=picture), out)


@app.command("gradients")
def gradients_command(
    only: OnlyOption = None, quick: QuickOption = False, as_json: JsonOption = False
) -> None:
    """Compare exact policies' gradients with plain PyTorch's on every workload."""
    job = gradients_bench.quick_job() if quick else gradients_bench.GradientsJob()
    if only is not None:
        job = replace(job, workloads=named_workloads(only))
    with counted_progress() as report:
        result = gradients_bench.run(job, report)
    show(result, as_json=as_json)


@app.command("survival")
def survival_command(
    out: OutOption = None,
    runs: Annotated[int | None, typer.Option(min=1, help="How many models.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of models, budgets and events.")] = 0,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train random models under random budgets, each in a memory cgroup of that size."""
    job = survival_bench.quick_job() if quick else survival_bench.SurvivalJob()
    job = replace(job, runs=runs or job.runs, seed=seed)
    with counted_progress() as report:
        result = survival_bench.run(job, rows_beside(out), report)
    keep(result, out)
    show(result, as_json=as_json)


@app.command("sweep")
def sweep_command(
    out: OutOption = None,
    only: OnlyOption = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps at every point.")] = None,
    policies: Annotated[
        bool,
        typer.Option("--policies", help="SAGE's eight strategies on its four models: some hours."),
    ] = False,
    percents: Annotated[
        str | None, typer.Option(help="Budgets, as 50,25: % of plain's peak above the floor.")
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(min=0, help="The sessions' noise tolerance.")
    ] = None,
    picture: Annotated[
        Path | None, to_picture("Draw throughput against memory into this PNG file.")
    ] = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train every workload at several budgets: peaks, predictions, refusals and times."""
    job = sweep_bench.quick_job() if quick else sweep_bench.SweepJob()
    if policies:
        job = sweep_bench.strategies_job()
        job = replace(job, percents=job.percents[:2], steps=3) if quick else job
    if only is not None:
        names = named_workloads(only)
        job = replace(job, workloads=names, timed=names if policies else job.timed)
    if percents is not None:
        job = replace(job, percents=_percents(percents))
    job = replace(job, steps=steps or job.steps, tolerance=tolerance)
    with counted_progress() as report:
        result = sweep_bench.run(job, rows_beside(out), report)
    keep(result, out)
    if picture is not None:
        draw_sweep(result.rows, picture)
    show(result, as_json=as_json)


def _percents(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(each) for each in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"--percents: asked for {text!r}; give such as 50,25") from None


@app.command("packing")
def packing_command(
    picture: Annotated[Path | None, to_picture("Draw the stages into this PNG file.")] = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Time quantizing, packing and changing layouts apart, and beside one native pass."""
    job = bit_packing.quick_job() if quick else bit_packing.PackingJob()
    measure(
        partial(bit_packing.run, job),
        as_json=as_json,
        draw=bit_packing.draw_packing,
        picture=picture,
    )


@app.command("kernels")
def kernels_command(
    picture: Annotated[Path | None, to_picture("Draw a roofline into this PNG file.")] = None,
    device: Annotated[
        str | None, typer.Option(help="A GPU, such as cuda, whose codecs are timed instead.")
    ] = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Time every kernel on every instruction set against memcpy, interleaved; or a GPU's codecs."""
    if device is not None:
        if picture is not None:
            raise typer.BadParameter("the roofline is the processor's; leave --picture or --device")
        make = device_codecs.quick_job if quick else device_codecs.DeviceCodecsJob
        codecs = make(str(device_codecs.checked_device(device)))
        measure(partial(device_codecs.run, codecs), as_json=as_json)
        return
    job = kernels_bench.quick_job() if quick else kernels_bench.KernelsJob()
    measure(partial(kernels_bench.run, job), as_json=as_json, draw=draw_roofline, picture=picture)


@app.command("accuracy")
def accuracy_command(
    tasks: Annotated[
        str | None, typer.Option(help=f"Of {', '.join(jobs.TASK_NAMES)}; by default all.")
    ] = None,
    policies: Annotated[
        str | None, typer.Option(help="Such as plain,rotated-2,allocated-1.5,minmax-4,gact-2.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many.")] = 3,
    data: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder of the measuring data; by default ../shared/data.",
        ),
    ] = None,
    rows: Annotated[Path | None, to_file("JSON lines to write rows to, and to go on from.")] = None,
    picture: Annotated[Path | None, to_picture("A PNG to draw accuracy against bytes in.")] = None,
    first_seed: Annotated[int, typer.Option(min=0, help="For a job run in parts.")] = 0,
    steps_share: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Of every task's steps.")
    ] = 1.0,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare accuracy under DAF with plain PyTorch and published codecs, over seeds."""
    job = jobs.make_job(
        tasks, policies, seeds, data, quick=quick, first_seed=first_seed, steps_share=steps_share
    )

    def draw(drawn: list[dict[str, Any]], path: Path) -> None:
        draw_curves(drawn, accuracy_bench.metrics_of(job), path)

    run = partial(accuracy_bench.run, job, rows)
    measure(run, as_json=as_json, draw=draw, picture=picture)


@app.command("pack")
def pack_command(
    device: Annotated[
        str, typer.Option(metavar="cuda|cpu", help="cpu: another core packs, in one memory.")
    ] = "cuda",
    picture: PictureOption = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Pack beside a forward pass: a GPU's, by GPU and processor; the processor's, by a helper."""
    if device == "cpu":
        if picture is not None:
            raise typer.BadParameter("--device cpu has no picture; ask for one of the two")
        shared = shared_memory.quick_job() if quick else shared_memory.SharedJob()
        measure(partial(shared_memory.run, shared), as_json=as_json)
        return
    if device != "cuda":
        raise typer.BadParameter(f"asked for --device {device}; there are cuda and cpu")
    job = pack_bench.quick_job() if quick else pack_bench.PackJob()
    measure(partial(pack_bench.run, job), as_json=as_json, draw=draw_pack, picture=picture)


@app.command("reduce")
def reduce_command(
    picture: PictureOption = None,
    varying: VaryingOption = False,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Time ranges of tensors and channels by every strategy, PyTorch, CUB and the chosen one."""
    if varying:
        if picture is not None:
            raise typer.BadParameter("--varying has no picture; ask for one of the two")
        job = quick_varying_job() if quick else VaryingJob()
        measure(partial(run_varying, job), as_json=as_json)
        return
    job = reduce_bench.quick_job() if quick else reduce_bench.ReduceJob()
    measure(partial(reduce_bench.run, job), as_json=as_json, draw=draw_reduce, picture=picture)
