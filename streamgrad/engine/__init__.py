"""From an algorithm to an estimator: checks, compilation, the scan over time, many streams."""
