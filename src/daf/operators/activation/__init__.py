"""GELU and SiLU, which keep a code of their derivative."""
