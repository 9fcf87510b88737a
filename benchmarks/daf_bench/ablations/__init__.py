"""The papers' mechanisms inside a training step: one after another, and one at a time."""
