"""What is carried over from past windows to the next: Q_0 and α of a noisy estimator."""

from streamgrad.adapt.carried import carried

__all__ = ["carried"]
