"""The documentation site is whole: every page, every link, every docstring it names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import daf

pytest.importorskip("mkdocs", reason="the extra 'docs' is not installed")
pytest.importorskip("mkdocstrings", reason="the extra 'docs' is not installed")
ROOT = Path(__file__).parents[1]
LOADED = re.compile(r'<(?:script|link|img)[^>]*(?:src|href)="(https?:[^"]*)"')


def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    site = tmp_path / "site"
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    pages = {page.stem: page.read_text() for page in site.glob("*.html")}
    documents = {page.stem for page in (ROOT / "docs").glob("*.md")}
    assert documents <= set(pages)
    for name in daf.__all__:
        assert re.search(rf'<h\d[^>]*id="daf\.[\w.]*{name}"', pages["api"]), name
    assert "allow_batchnorm_split" in pages["api"]
    loaded = {url for page in pages.values() for url in LOADED.findall(page)}
    assert loaded == set()
