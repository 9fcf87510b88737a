"""A user's type checker sees DAF's types."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import daf

pytest.importorskip("mypy", reason="the extra 'test' is not installed")

USER = """
import daf

error = daf.BudgetError("too little", least_bytes="5 MB")
least: str = error.least_bytes
daf.no_such_name
"""
# Only the packages that these lines need are read: the whole of DAF takes a minute.
SETTINGS = """
[mypy]
strict = true
[mypy-daf.core.*]
follow_imports = silent
[mypy-daf.*,torch.*,numpy.*]
follow_imports = skip
[mypy-daf]
follow_imports = silent
"""


def test_a_wrong_type_is_found_in_a_user_s_file(tmp_path: Path) -> None:
    package = Path(daf.__file__).parent
    assert (package / "py.typed").is_file()
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "user.py"]
    environment = dict(os.environ)
    if package.parent.name == "src":  # a checkout; what is installed is found as packages are
        environment["MYPYPATH"] = str(package.parent)
    checked = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    found = [line for line in checked.stdout.splitlines() if line.startswith("user.py:")]
    assert [line.split(":")[1] for line in found] == ["4", "5", "6"], checked.stdout
    assert 'incompatible type "str"; expected "int | None"' in found[0]
