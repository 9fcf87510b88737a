"""The command line: train, plan, bench, doctor."""
