"""Benchmarks: cost per step, memory, against peers."""
