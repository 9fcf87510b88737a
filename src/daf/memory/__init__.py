"""The process's memory: measuring it, and what glibc does with freed blocks."""
