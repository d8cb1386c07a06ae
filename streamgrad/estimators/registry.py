"""Every estimator with what it promises: drives the conformance tests, the docs' table and the command line.

To add an estimator: write its file, and add its row here.
"""

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from streamgrad.base import CUT_NAMES, GradientEstimator
from streamgrad.checks import check_choice
from streamgrad.deprecations import current_name
from streamgrad.estimators.artbp import artbp
from streamgrad.estimators.bptt import bptt
from streamgrad.estimators.dni import dni
from streamgrad.estimators.eprop import eprop
from streamgrad.estimators.immediate import immediate
from streamgrad.estimators.kernl import kernl
from streamgrad.estimators.local_rtrl import local_rtrl
from streamgrad.estimators.nobacktrack import nobacktrack
from streamgrad.estimators.ok import ok
from streamgrad.estimators.pes import pes
from streamgrad.estimators.preuoro import preuoro
from streamgrad.estimators.reinforce import reinforce
from streamgrad.estimators.rflo import rflo
from streamgrad.estimators.rtrl import rtrl
from streamgrad.estimators.sketch import sketch
from streamgrad.estimators.snap import snap
from streamgrad.estimators.spatial_rtrl import spatial_rtrl
from streamgrad.estimators.uoro import uoro
from streamgrad.estimators.uoro_across import uoro_across
from streamgrad.estimators.windowed_bptt import windowed_bptt

Promise = Literal[
    "exact",
    "exact in the chunk",
    "biased",
    "unbiased",
    "unbiased for the noisy network",
    "unbiased for the smoothed loss",
]


class Row(NamedTuple):
    """What an estimator promises; the conformance tests hold it to that.

    Attributes:
      name: how it is called.
      make: `make(model, **options) -> GradientEstimator`; takes `cut` if there are several, and `noise` if it is noisy.
      promise: "exact" (equals BPTT of the whole sequence, however it is chunked), "exact in the chunk", "biased"
        (equals its own textbook recursion, noise pattern by noise pattern where it has noise), "unbiased" (its mean
        over the noise equals BPTT of the whole sequence), "unbiased for the noisy network" (the noise is in the state;
        the mean is the gradient of the expected loss), or "unbiased for the smoothed loss" (the noise is in the
        parameters; likewise).
      time: per step and stream, for S state units, N preactivations, A features, P recurrent parameters, chunks of K.
      memory: likewise.
      cuts: where it can cut the transition; empty if it does not.
      summary: one line.
      options: the default options.
      variants: other options worth comparing with them, one mapping for each.
      learns: whether streams learn something together: then a batch is more than the mean of its streams.
      advances: whether it can `advance` before the losses are known.
    """

    name: str
    make: Callable[..., GradientEstimator]
    promise: Promise
    time: str
    memory: str
    cuts: tuple[str, ...]
    summary: str
    options: Mapping[str, Any] = MappingProxyType({})
    variants: tuple[Mapping[str, Any], ...] = ()
    learns: bool = False
    advances: bool = True

    @property
    def noisy(self) -> bool:
        """Whether it draws noise, whatever it promises: it takes `noise`, and its updates a key."""
        return "noise" in inspect.signature(self.make).parameters


ROWS = (
    Row(
        "bptt", bptt, "exact in the chunk", "P", "T S", (),
        "backpropagation through the chunk; `recompute=k` stores T/k + k states",
    ),
    Row(
        "windowed_bptt", windowed_bptt, "biased", "window/every P", "window S", (),
        "losses reach back `window` steps, also across chunks; `every=k` sends those of k steps back together",
        MappingProxyType({"window": 3}),
        (MappingProxyType({"window": 10}), MappingProxyType({"window": 8, "every": 4})),
    ),
    Row(
        "artbp", artbp, "unbiased", "P + L P / K", "longest S", (),
        "truncations at random, compensated, every `mean_length` = L steps in the mean; `longest` steps are kept",
        MappingProxyType({"mean_length": 2, "tail": None, "longest": 64}),
        (MappingProxyType({"mean_length": 16, "tail": None}), MappingProxyType({"mean_length": 16, "tail": 4})),
    ),
    Row(
        "dni", dni, "biased", "P + S² / K", "S²", (),
        "backpropagation in the chunk, and a learnt prediction of the gradient that will come from beyond it",
        learns=True, advances=False,
    ),
    Row(
        "immediate", immediate, "biased", "P", "0", (),
        "the current step alone, with the state before it held fixed",
    ),
    Row(
        "rtrl", rtrl, "exact", "S P + S² P / K; diagonal cells P", "S P; diagonal cells P", (),
        "backpropagation in the chunk, dh/dθ across chunks, kept where it can be non-zero",
    ),
    Row(
        "local_rtrl", local_rtrl, "biased", "as rtrl, by layers", "as rtrl, by layers", (),
        "RTRL inside each layer of a stack, backpropagation across layers at the same step",
    ),
    Row(
        "snap", snap, "biased", "P per own unit", "P per own unit", ("preactivation",),
        "dh/dθ where `order=n` steps can reach; with n = 1 at a weight's own units (an LSTM's: 2, its output gate: 1)",
        variants=(MappingProxyType({"order": 2}), MappingProxyType({"inside": "backprop"})),
    ),
    Row(
        "eprop", eprop, "biased", "P per own unit", "P per own unit", ("preactivation",),
        "eligibility traces of what each unit does by itself, and a learning signal",
        variants=(MappingProxyType({"feedback": "random"}),),
    ),
    Row(
        "rflo", rflo, "biased", "P", "P", ("preactivation",),
        "one trace for each weight, which leaks as its unit does; feedback through random weights or symmetric",
        MappingProxyType({"feedback": "symmetric"}), (MappingProxyType({"feedback": "random"}),),
    ),
    Row(
        "kernl", kernl, "biased", "P + S²", "P per own unit", ("preactivation", "state"),
        "sensitivities and time constants of units, learnt from a perturbed twin; one trace for each weight",
        variants=(MappingProxyType({"immediate": "exact"}),), learns=True,
    ),
    Row(
        "ok", ok, "unbiased", "S P", "r (S N + A)", ("preactivation",),
        "backpropagation in the chunk, a sum of r Kronecker products across chunks",
        variants=(MappingProxyType({"rank": 1}),),
    ),
    Row(
        "sketch", sketch, "biased", "r² P + S² (S + N)", "r P", ("preactivation",),
        "SnAp-1, the rest of dh/dθ as a matrix of rank r, and a bound of its error",
    ),
    Row(
        "spatial_rtrl", spatial_rtrl, "unbiased", "S² P", "S P", CUT_NAMES,
        "RTRL with the immediate Jacobian projected onto noise",
    ),
    Row(
        "uoro", uoro, "unbiased", "G P", "P", CUT_NAMES,
        "dh/dθ as a product of two vectors; `groups=G` trades time for variance",
        variants=(
            MappingProxyType({"groups": 4}),
            MappingProxyType({"groups": 16}),
            MappingProxyType({"immediate": "exact"}),
            MappingProxyType({"cut": "state"}),
        ),
    ),
    Row(
        "uoro_across", uoro_across, "unbiased", "R P", "R P", (),
        "backpropagation in the chunk, across chunks a product of two vectors, or `blocks=R` of them for less variance",
        variants=(MappingProxyType({"blocks": 8}), MappingProxyType({"shrink": "auto"})),
    ),
    Row(
        "preuoro", preuoro, "unbiased", "N P", "N S", ("preactivation",),
        "UORO without the spatial projection (KF-RTRL): variance N times smaller",
    ),
    Row(
        "nobacktrack", nobacktrack, "unbiased", "S P", "S P", ("state",),
        "UORO with the noise of each state unit scaled by the norm of its immediate gradient",
    ),
    Row(
        "reinforce", reinforce, "unbiased for the noisy network", "P", "P", ("state",),
        "noise in the state, its score times the loss; UORO at the state as `sigma` goes to 0",
    ),
    Row(
        "pes", pes, "unbiased for the smoothed loss", "R P", "R P / 2", (),
        "evolution strategies: `particles=R` with noisy parameters, whose noise adds up over the chunks of an episode",
        variants=(MappingProxyType({"accumulate": False}),),
    ),
)  # fmt: skip

REGISTRY: Mapping[str, Row] = MappingProxyType({row.name: row for row in ROWS})


def find_estimator(name: str) -> Row:
    """The row of that name.

    Example:
      >>> find_estimator("rtrl").promise
      'exact'
    """
    if current_name(name, silent=True) in REGISTRY:
        name = current_name(name)
    check_choice("estimator", name, tuple(REGISTRY))
    return REGISTRY[name]


def markdown_table() -> str:
    """The registry as the table that stands in the README."""
    lines = [("estimator", "gradient", "time per step", "memory", "cuts", "what it is"), ("---",) * 6]
    for row in ROWS:
        cuts = ", ".join(row.cuts) or "none"
        lines.append((f"`{row.name}`", row.promise, row.time, row.memory, cuts, row.summary))
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)
