"""From a run folder to pictures and text."""
