"""Noise and what shapes it: where it comes from, Q_0, rescaling, groups of preactivations."""
