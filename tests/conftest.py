"""What all tests share: choices that are kept between processes are kept apart from the user's."""

from __future__ import annotations

import os
import tempfile

os.environ["DAF_CACHE"] = tempfile.mkdtemp(prefix="daf-cache-")
