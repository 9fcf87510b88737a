"""Reports of finished runs: an HTML page, PNG charts and terminal text."""
