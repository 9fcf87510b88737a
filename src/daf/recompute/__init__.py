"""Values that are computed again in backward: replay of module calls, with state and inputs restored."""
