"""Q_0 and α of a noisy estimator, carried over from past windows to the next."""

from streamgrad.adapt.carried import carried

__all__ = ["carried"]
