"""(Profile, budget) to Plan: pure functions, no torch, no device."""
