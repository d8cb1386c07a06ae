"""The report of the REINFORCE experiment: distance to UORO, variance and bias over σ, the effect of Q_0."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from streamgrad_lab.experiments.base import Claim, Section, Table
from streamgrad_lab.experiments.evidence import Estimate, judge, log_ratio_of_means, power, show_ratio, within
from streamgrad_lab.tables import read_rows

# σ small enough for the leading term to be all that is seen.
SMALL = 1e-2
SMALLER = 1e-3  # likewise for variances, to which UORO's own adds
# How close a measured variance must be to the predicted one.
TOLERANCE = 0.15
Z = 1.96  # standard errors of a mean over thousands of samples in half of its 95% interval

LABELS = {
    "none": "no baseline",
    "average": "average of past losses",
    "position": "average for each position",
    "noise_free": "noise-free twin",
}
COLOURS = {"none": "#b2182b", "average": "#ef8a62", "position": "#fdb863", "noise_free": "#2166ac"}

FILES = ("limit.csv", "variance.csv", "shaping.csv")

Rows = list[dict[str, Any]]


def sections(folder: Path) -> list[Section]:
    """Three parts: the limit, the variance, and Q_0."""
    for file in FILES:
        if not (Path(folder) / file).exists():
            raise ValueError(f"{folder} has no results of the reinforce experiment: {file} is missing.")
    limit, variance, shaping = (read_rows(Path(folder) / file) for file in FILES)
    return [_limit(limit), _variance(variance), _shaping(shaping)]


def small_power(sigma: np.ndarray, value: np.ndarray, largest: float = SMALL) -> Estimate:
    """The power of σ that `value` follows, fitted over σ up to `largest`."""
    small = sigma <= largest * (1 + 1e-9)
    return power(sigma[small], value[small])


def _near(estimate: Estimate, goal: float, tolerance: float) -> list[Estimate]:
    """Margins for an estimate to be within a tolerance of its goal."""
    return [estimate.above(goal - tolerance), estimate.below(goal + tolerance)]


def _series(rows: Rows, value: str = "value", **where: Any) -> tuple[np.ndarray, np.ndarray]:
    """σ and a column, in the rows where the others are so."""
    found = [row for row in rows if all(row[key] == want for key, want in where.items())]
    return np.array([row["sigma"] for row in found]), np.array([row[value] for row in found])


def _unique(rows: Rows, column: str) -> list[str]:
    return list(dict.fromkeys(row[column] for row in rows))


def _axes(width: float = 7.0) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4.2), layout="constrained")
    ax = figure.subplots()
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("σ, size of the noise")
    ax.grid(alpha=0.3)
    return figure, ax


def _limit(rows: Rows) -> Section:
    figure, ax = _axes()
    fitted, table = {}, []
    for cell in _unique(rows, "cell"):
        for q0, style in (("identity", "-"), ("best", "--")):
            sigma, distance = _series(rows, "distance", cell=cell, q0=q0, precision="float64")
            fitted[cell, q0] = small_power(sigma, distance)
            colour = f"C{_unique(rows, 'cell').index(cell)}"
            ax.plot(sigma, distance, style, color=colour, label=cell if q0 == "identity" else f"{cell}, best $Q_0$")
            single, rounded = _series(rows, "distance", cell=cell, q0=q0, precision="float32")
            if len(single):
                ax.plot(single, rounded, ":", color=colour, label=f"{cell}, float32")
            nearest = f"{rounded.min():.1g} at {single[rounded.argmin()]:.1g}" if len(single) else ""
            table.append([cell, q0, f"{fitted[cell, q0].value:.3f}", f"{distance[-1]:.1e}", nearest])
    ax.set_ylabel("relative distance to UORO")
    ax.legend(frameon=False, fontsize=9)
    listed = ", ".join(f"{cell} ({q0} Q_0) {_fit(found)}" for (cell, q0), found in fitted.items())
    claim = judge(
        "With the loss of a noise-free twin as baseline, REINFORCE becomes UORO at the state as the noise goes to "
        "zero: under the same noise their distance falls in proportion to its size.",
        [margin for found in fitted.values() for margin in _near(found, 1.0, 0.05)],
        f"Fitted powers for σ up to {SMALL:g}, with their 95% intervals: {listed}.",
    )
    text = (
        "The same noise is given to both estimators. The dotted line is in float32, where the difference of two losses "
        "is divided by the size of the noise: rounding takes over when that is small."
    )
    header = ["cell", "Q_0", "fitted power", "distance at the smallest noise", "nearest in float32"]
    return Section("REINFORCE becomes UORO (Section 9)", figure, text, [claim], Table(header, table), ["limit.csv"])


def _variance(rows: Rows) -> Section:
    figure, ax = _axes()
    measured, table = {}, []
    for baseline, label in LABELS.items():
        sigma, value = _series(rows, baseline=baseline, quantity="variance")
        _, error = _series(rows, "error", baseline=baseline, quantity="variance")
        measured[baseline] = (sigma, value, error)
        ax.errorbar(sigma, value, 2 * error, fmt="o-", ms=3, color=COLOURS[baseline], label=label)
        table.append([label, f"{small_power(sigma, value, SMALLER).value:.3f}", f"{value[0]:.3g}", f"{value[-1]:.3g}"])
    _, term = _series(rows, "predicted", baseline="none", quantity="variance")
    _, limit = _series(rows, "predicted", baseline="noise_free", quantity="variance")
    sigma, bias = _series(rows, quantity="bias")
    _, bias_error = _series(rows, "error", quantity="bias")
    seen = bias > 4 * bias_error**2
    ax.plot(sigma, term, "--", color="grey", lw=1, label="predicted: the loss without noise times the score")
    ax.axhline(limit[0], color="grey", ls=":", lw=1, label="UORO at the state, exact")
    ax.plot(sigma[seen], bias[seen], "-", color="#4d9221", label="squared bias of the noise")
    ax.set_ylabel("variance / squared norm of the gradient")
    ax.legend(frameon=False, fontsize=8)

    claims = _variance_claims(measured, term, limit[0])
    text = (
        f"Total variance of the gradient with respect to the cell's parameters ({_unique(rows, 'cell')[0]}), over its "
        "squared norm; bars are two standard errors. The squared bias is that of the gradient of the expected loss, "
        "which REINFORCE estimates, against that of the network without noise; where it is not above its error it is "
        "left out. An average of past losses does harm where a stream's losses are unlike those averaged over."
    )
    header = ["baseline", "fitted power", "at the largest noise", "at the smallest"]
    title = "Variance of REINFORCE (Section 9)"
    return Section(title, figure, text, claims, Table(header, table), ["variance.csv"])


def _variance_claims(
    measured: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]], term: np.ndarray, limit: float
) -> list[Claim]:
    """What the variances over σ are held against: the predicted term, and UORO's variance as the limit."""
    powers = {name: small_power(*measured[name][:2], SMALLER) for name in ("none", "average", "position")}
    sigma, values, errors = measured["none"]
    small = sigma <= SMALLER * (1 + 1e-9)
    known = zip(values[small], errors[small], term[small], strict=True)
    ratios = [log_ratio_of_means(Estimate(v, Z * e), Estimate(t, 0.0)) for v, e, t in known]
    worst = max(ratios, key=lambda log: abs(log.value))
    last = Estimate(float(measured["noise_free"][1][-1]), Z * float(measured["noise_free"][2][-1]))
    end = log_ratio_of_means(last, Estimate(float(limit), 0.0))
    gains = {name: measured[name][1][-1] / measured["none"][1][-1] for name in ("average", "position")}
    return [
        judge(
            "Without a baseline the variance grows as the inverse square of the noise, as the predicted term says.",
            [*_near(powers["none"], -2.0, 0.1), *(margin for log in ratios for margin in within(log, 0.05))],
            f"Fitted power {_fit(powers['none'])}; measured over predicted, the worst for σ up to {SMALLER:g}: "
            f"{show_ratio(worst)}.",
        ),
        judge(
            "With the noise-free baseline the variance stays bounded, and becomes that of UORO at the state, "
            f"within {100 * TOLERANCE:.0f}%.",
            within(end, TOLERANCE),
            f"{last} at the smallest noise, where UORO's is {limit:.4g}: {show_ratio(end)} times.",
        ),
        judge(
            "An average of past losses, over all steps or for each position of an episode, is no such baseline: "
            "the variance still grows as the inverse square of the noise.",
            [margin for name in gains for margin in _near(powers[name], -2.0, 0.1)],
            f"Fitted powers {_fit(powers['average'])} and {_fit(powers['position'])}; at the smallest noise the "
            f"variance is {gains['average']:.3g} and {gains['position']:.3g} times that without a baseline.",
        ),
    ]


def _fit(found: Estimate) -> str:
    return f"{found.value:.3f} ± {found.half:.3f}"


def _shaping(rows: Rows) -> Section:
    table, details, margins = [], [], []
    for cell in _unique(rows, "cell"):
        plain, best = (
            next(row for row in rows if row["cell"] == cell and row["q0"] == q0) for q0 in ("identity", "best")
        )
        predicted = plain["predicted"] / best["predicted"]
        variances = [Estimate(row["value"], Z * row["error"]) for row in (plain, best)]
        found = log_ratio_of_means(*variances)
        # What is predicted is exact: it lowers the variance, or the claim fails.
        margins += [Estimate(predicted - 1 + 1e-9, 0.0), *within(found.above(math.log(predicted)), TOLERANCE)]
        details.append(f"{cell} {show_ratio(found)} measured, {predicted:.3g} predicted")
        for row in (plain, best):
            shown = f"{float(row['value']):.4g} ± {float(row['error']):.2g}"
            term = row["score_at_1"]
            table.append([cell, row["q0"], shown, f"{float(row['predicted']):.4g}", f"{term:.4g}"])
    claim = judge(
        "The Q_0 that lowers UORO's variance lowers REINFORCE's as the covariance of its noise, and as much, "
        f"within {100 * TOLERANCE:.0f}%.",
        margins,
        f"Variance without over that with the best Q_0: {'; '.join(details)}.",
    )
    text = (
        "Variance over the squared norm of the gradient, with the noise-free baseline, at a small noise. The best Q_0 "
        "minimises V(Q) at the state, and has the trace of the identity. The last column is the term that a missing "
        "baseline adds, times the squared size of the noise: Q_0 is not chosen for it."
    )
    header = ["cell", "Q_0", "measured", "predicted", "term without baseline"]
    return Section(
        "Noise shaping for REINFORCE (Section 9)", None, text, [claim], Table(header, table), ["shaping.csv"]
    )
