"""Situations that people train in, each a model, a batch and a loss: losses, statistics, batches,
modules that do not repeat themselves, unusual graphs. ``SITUATIONS`` lists them all.
"""

from daf_bench.conformance.situations import (
    changing_modules,
    containers,
    coupled_losses,
    late_and_transformed,
    random_modules,
    sequences,
    several_passes,
    statistics,
    tensor_kinds,
    unusual_tensors,
    weighted_losses,
    written_buffers,
)

SITUATIONS = [
    *coupled_losses.CASES,
    *weighted_losses.CASES,
    *statistics.CASES,
    *written_buffers.CASES,
    *sequences.CASES,
    *containers.CASES,
    *random_modules.CASES,
    *changing_modules.CASES,
    *several_passes.CASES,
    *tensor_kinds.CASES,
    *unusual_tensors.CASES,
    *late_and_transformed.CASES,
]
