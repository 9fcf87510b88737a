"""What a hosts' comparison counts: lines, peaks, intervals and differences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daf_bench.hosts.catalogue import HOSTS, named_hosts
from daf_bench.hosts.exact import moved_apart
from daf_bench.hosts.figures import figures_of, share
from daf_bench.hosts.lines import SCRIPTS, body_lines, count_changed, lines_changed
from daf_bench.hosts.material import SMALL, load_texts
from daf_bench.workloads.sources import Sources
from host_tables import hosts_figures

from daf.core.errors import UnknownNameError

SCRIPT = '''
def plain(given):
    """Alone."""
    import this
    for batch in given:
        # a comment
        backward(batch)

        update()


def budgeted(given):
    """Within."""
    from that import session
    with session(given) as opened:
        for batch in given:
            opened.backward(batch)
            update()
'''


def test_only_lines_that_a_user_would_write_count() -> None:
    before, after = body_lines(SCRIPT, "plain"), body_lines(SCRIPT, "budgeted")
    assert before == ["for batch in given:", "backward(batch)", "update()"]
    assert count_changed(before, after) == 2
    assert count_changed(after, before) == 2
    assert count_changed(before, before) == 0
    assert count_changed(["a", "b", "c"], ["a", "x", "y", "c"]) == 2


def test_every_host_has_scripts_that_differ() -> None:
    assert len(HOSTS) >= 7
    assert {each: lines_changed(each) for each in HOSTS} == dict.fromkeys(HOSTS, 1) | {
        "fabric": 2,
        "accelerate": 2,
        "own": 2,
    }
    assert all("daf" not in "".join(plain_lines(each)).lower() for each in HOSTS)


def plain_lines(host: str) -> list[str]:
    return body_lines((SCRIPTS / f"{host}.py").read_text(), "plain")


def test_an_unknown_host_is_told_with_the_nearest() -> None:
    assert named_hosts("SFT, own") == ("sft", "own")
    with pytest.raises(UnknownNameError, match="did you mean 'lightning'"):
        named_hosts("lightening")


def test_windows_go_round_and_name_words_of_the_vocabulary() -> None:
    texts = load_texts(Sources(), SMALL.vocabulary)
    count = len(texts.numbers) // SMALL.length
    assert (texts.window(0, SMALL.length) == texts.window(count, SMALL.length)).all()
    assert texts.numbers.max() < len(texts.words) == SMALL.vocabulary
    assert len(texts.sentence(3, SMALL.length).split()) == SMALL.length


def test_how_far_parameters_end_apart_is_told_by_how_far_they_moved(tmp_path: Path) -> None:
    first, plain, ours = (tmp_path / name for name in ("first", "plain", "ours"))
    np.array([1, 1], np.float32).tofile(first)
    np.array([4, 5], np.float32).tofile(plain)
    np.array([4, 5.5], np.float32).tofile(ours)
    assert moved_apart(ours, plain, first) == pytest.approx(0.1)
    assert moved_apart(plain, plain, first) == 0


def rows() -> list[dict[str, Any]]:
    peaks = {"floor_bytes": 100, "plain_peak_bytes": 300, "budget_bytes": share(100, 300)}
    own = {"host": "own", "lines_changed": 2, **peaks}
    ms = {"plain": [10.0] * 12, "ours": [10.5] * 11 + [99.0]}
    return [
        {"part": "exact", **own, "peak_bytes": 180, "moved_apart": 0.5},
        {"part": "in turn", **own, "peak_bytes": 200, "ms": ms},
        {"part": "exact", **own, "host": "sft", "refused": "too little"},
        {"part": "in turn", **own, "host": "dpo", "failed": "ended"},
        {"part": "skipped", "host": "fabric", "reason": "lightning not installed"},
    ]


def test_figures_take_near_ends_and_count_what_passes_the_budget() -> None:
    assert share(100, 300) == 190
    figures = figures_of(rows())
    assert figures["step_ratio_worst"] == pytest.approx(1.05)
    assert figures["peak_ratio_least"] == 2
    assert figures["lines_changed_most"] == 2
    names = ("hosts", "over_budget", "mismatches", "refused", "failed", "skipped")
    assert [figures[name] for name in names] == [1] * len(names)


def test_the_table_says_how_each_host_ended() -> None:
    machine = {"processor": "P", "cores": 2, "torch": "2"}
    result = {"rows": rows(), "machine": machine, "notes": ["n"], "figures": figures_of(rows())}
    lines = hosts_figures(result).splitlines()
    assert "| a loop of one's own | 2 | 0 | 0 | 2.00 | 1.050 (1.050 to 1.050) |" in lines
    assert "| TRL's `DPOTrainer` | failed | | | | |" in lines
    assert "| TRL's `SFTTrainer` | refused | | | | |" in lines
    assert "| Fabric | skipped | | | | |" in lines
