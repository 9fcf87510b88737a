"""``python -m daf``."""

from daf.cli import main

if __name__ == "__main__":
    main()
