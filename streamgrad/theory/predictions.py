"""The theory of each estimator: the total variance of its gradient, as far as it is known."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from streamgrad._typing import Array, Float
from streamgrad.theory import Episode, across_variance, spatial_total_variance, total_variance

SIGNS = -2.0  # excess kurtosis of random signs, the estimators' own noise


class Prediction(NamedTuple):
    """The predicted variance of an estimator.

    Attributes:
      variance: `variance(episode, alpha, options)`, the total variance given α of each step and the options of the
        estimator.
      options: those that it knows of; with others there is no prediction.
      rescaled: whether α matters. If it looks at the noise, as GIR's does, the prediction is an over-estimate.
      across: whether its steps are chunks: the episode is from `collect_chunks`, and α has an entry for each chunk.
    """

    variance: Callable[[Episode, Array, Mapping[str, Any]], Float[Array, ""]]
    options: frozenset[str]
    rescaled: bool = True
    across: bool = False


# By the estimator's name in the registry.
PREDICTIONS: Mapping[str, tuple[Prediction, ...]] = MappingProxyType(
    {
        "spatial_rtrl": (
            Prediction(
                lambda episode, alpha, options: spatial_total_variance(episode, kurtosis=SIGNS),
                frozenset({"cut"}),
                False,
            ),
        ),
        "preuoro": (
            Prediction(
                lambda episode, alpha, options: total_variance(episode, alpha, groups=episode.size, kurtosis=SIGNS),
                frozenset({"cut"}),
            ),
        ),
        "uoro": (
            Prediction(
                lambda episode, alpha, options: total_variance(
                    episode, alpha, options.get("q0"), options.get("groups", 1), SIGNS
                ),
                frozenset({"cut", "groups", "rescale", "q0"}),
            ),
        ),
        "uoro_across": (
            # Noise that the last chunk adds is never seen.
            Prediction(
                lambda episode, alpha, options: across_variance(
                    episode, alpha[: episode.length], options.get("blocks", 1), SIGNS
                ),
                frozenset({"blocks", "rescale"}),
                across=True,
            ),
        ),
    }
)


def find_prediction(name: str, options: Mapping[str, Any]) -> Prediction | None:
    """The theory of an estimator with these options, or None where there is none.

    Args:
      name: of the estimator, in the registry.
      options: that it was made with.

    Returns:
      The prediction.

    Example:
      >>> find_prediction("uoro_across", {"blocks": 8}).across
      True
      >>> find_prediction("uoro", {"cut": "state", "immediate": "exact"}) is None
      True
    """
    return next((found for found in PREDICTIONS.get(name, ()) if set(options) <= found.options), None)
