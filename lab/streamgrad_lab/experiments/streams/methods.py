"""The methods that are compared: estimators of the registry with their options, under the names of the tables."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from streamgrad import GradientEstimator, Model, batched
from streamgrad.estimators import find_estimator
from streamgrad_lab.experiments.plots import COLOURS


class Method(NamedTuple):
    """An estimator and its options.

    Attributes:
      estimator: its name in the registry.
      options: in place of the defaults.
    """

    estimator: str
    options: dict[str, Any]


WINDOWED = "windowed_bptt"

METHODS = {
    "rtrl": Method("rtrl", {}),
    "ok(8)": Method("ok", {"rank": 8}),
    "preuoro": Method("preuoro", {}),
    "uoro": Method("uoro", {}),
    "uoro, 64 groups": Method("uoro", {"groups": 64}),
    "uoro_across": Method("uoro_across", {}),
    "uoro_across, shrunk": Method("uoro_across", {"shrink": "auto"}),
    "snap(1)": Method("snap", {"order": 1}),
    "snap(1) inside chunks": Method("snap", {"order": 1, "inside": "backprop"}),
    "sketch(4)": Method("sketch", {"rank": 4}),
    "eprop": Method("eprop", {}),
    "rflo": Method("rflo", {}),  # through random weights, as published
    "dni": Method("dni", {}),
    "artbp(16)": Method("artbp", {"mean_length": 16, "longest": 64, "tail": None}),
    "spatial_rtrl": Method("spatial_rtrl", {}),
    "nobacktrack": Method("nobacktrack", {}),
    "reinforce": Method("reinforce", {}),
    "bptt": Method("bptt", {}),  # chunk by chunk
    "windowed_bptt(25)": Method(WINDOWED, {"window": 25}),
    "windowed_bptt(16)": Method(WINDOWED, {"window": 16}),
    "windowed_bptt(5)": Method(WINDOWED, {"window": 5}),
    "immediate": Method("immediate", {}),
    "local_rtrl": Method("local_rtrl", {}),
}


def make_estimator(name: str, model: Model) -> GradientEstimator:
    """The estimator of that method, for one stream.

    Args:
      name: one of `METHODS`.
      model: the model.

    Returns:
      The estimator.
    """
    if name not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, not {name!r}.")
    method = METHODS[name]
    return find_estimator(method.estimator).make(model, **method.options)


def for_streams(name: str, model: Model, streams: int) -> GradientEstimator:
    """The same for a batch of streams."""
    return batched(make_estimator(name, model), streams)


def in_order(names: Iterable[str]) -> list[str]:
    """Each name once, in the order of `METHODS`."""
    found = set(names)
    return [name for name in METHODS if name in found]


# A colour for what is kept of the past, a style for its variants: the same on all pages.
_FAMILIES = ("rtrl", "ok", "uoro", "snap", "bptt", "immediate", "preuoro")


def look(name: str) -> dict[str, Any]:
    """Colour and line of a method in the figures."""
    family = "bptt" if METHODS[name].estimator == WINDOWED else METHODS[name].estimator
    place = _FAMILIES.index(family) if family in _FAMILIES else 0
    alike = [other for other in METHODS if METHODS[other].estimator == METHODS[name].estimator]
    style = ("-", "--", ":", "-.")[alike.index(name) % 4] if family in _FAMILIES else ":"
    return {"color": COLOURS[place], "linestyle": style, "linewidth": 1.6, "label": name}
