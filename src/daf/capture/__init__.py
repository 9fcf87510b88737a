"""The forward pass with saved-tensor hooks: what ``compress`` and a session run a model under."""
