"""What every benchmark shares: workers, interleaving, baselines, results."""
