"""Values computed again in backward: replay of module calls, state and inputs restored."""
