"""``python -m daf``."""

from __future__ import annotations

from daf.cli import main

if __name__ == "__main__":
    main()
