"""What the recorded numbers of the `variance` experiment say: figures, tables and claims."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from streamgrad_lab.experiments import plots
from streamgrad_lab.experiments.base import Claim, Section, Table
from streamgrad_lab.experiments.evidence import Estimate, difference, judge, log_ratio, mean_of, show_ratio, within
from streamgrad_lab.experiments.records import Record, finite_trials, read_settings, show, show_interval

LABELS = {
    "identity-gir": "Q₀ = I, α = GIR",
    "identity-optimal": "Q₀ = I, α optimal",
    "optimal-gir": "Q₀ optimal, α = GIR",
    "optimal-optimal": "Q₀ and α optimal",
}
NAMES = list(LABELS)
BEST = "optimal-optimal"

# Where in training settings are compared: V(Q) is heavy-tailed, and single updates say nothing.
LATE, FINAL = 0.5, 0.1
# ‖ĝ - g‖² - ‖g‖² of very few samples may be below 0, where its logarithm is to be far away.
TINY = 1e-30

Records = dict[str, Record]


def sections(folder: Path) -> list[Section]:
    """The three figures, and what of the paper's claims the numbers bear out."""
    records = read_settings(folder, NAMES)
    return [_training(records), _variances(records), _alphas(records)]


def all_claims(folder: Path) -> list[Claim]:
    """Every claim of this experiment, without its figures."""
    records = read_settings(folder, NAMES)
    return [*variance_claims(records), *training_claims(records), *alpha_claims(records)]


def typical_log_ratio(record: Record) -> np.ndarray:
    """log of measured over predicted V(Q) for each trial: the median over its windows of the last half.

    A window, one row of the record, holds means over many updates. A median of windows, because V(Q) has so heavy a
    tail that a single window may outweigh all others: of its few episodes of enormous V(Q) the theory sees the mean
    over all noise, the measurement one draw.
    """
    late = record.update > record.update[-1] * (1 - LATE)
    actual, expected = finite_trials(record, "actual")[:, late], finite_trials(record, "expected")[:, late]
    ratios = actual / expected
    return np.log(np.maximum(np.median(ratios, axis=1), TINY))


def mean_ratio(record: Record) -> float:
    """Measured V(Q) over predicted V(Q): the ratio of their means over trials and the last half of the updates."""
    return float(np.mean(_late(record, "actual")) / np.mean(_late(record, "expected")))


def variance_claims(records: Records) -> list[Claim]:
    """What Figure 2 is held against."""
    ratios = {name: mean_of(typical_log_ratio(record)) for name, record in records.items()}
    measured = {name: np.maximum(_late(record, "actual"), TINY) for name, record in records.items()}
    typical = "Measured over predicted, median over the windows of the last half of the updates, with its 95% interval"
    optimal, gir = ["identity-optimal", "optimal-optimal"], ["identity-gir", "optimal-gir"]

    def listed(names: list[str]) -> str:
        return "; ".join(f"{LABELS[name]}: {show_ratio(ratios[name])}" for name in names if name in ratios)

    means = "; ".join(f"{LABELS[name]}: {show(mean_ratio(records[name]))}" for name in optimal if name in records)
    relative = "; ".join(
        f"{LABELS[name]}: {show(float(np.mean(measured[name]) / np.mean(_late(record, 'intrinsic'))))}"
        for name, record in records.items()
    )
    return [
        judge(
            "The predicted V(Q) is within 15% of the measured one when α is optimal.",
            _if_run(records, optimal, lambda: [m for name in optimal for m in within(ratios[name], 0.15)]),
            f"{typical}: {listed(optimal)}. Ratio of the means over all of them, which few episodes decide: {means}.",
            "Few samples of a heavy-tailed quantity may be off by this much.",
        ),
        judge(
            "The predicted V(Q) is too high when α is GIR's.",
            _if_run(records, gir, lambda: [ratios[name].below(0.0) for name in gir]),
            f"{typical}: {listed(gir)}. The theory takes α to be independent of the noise; GIR looks at the noise, and "
            "shrinks what happens to be large.",
            "Here that did not lower the measured variance below the prediction.",
        ),
        lowest(
            "The measured V(Q) is lowest when both Q₀ and α are optimal.",
            measured,
            "Mean over trials and the last half of the updates",
            "The settings train different networks, whose gradients differ in size.",
            f" Means relative to the squared norm of the gradient: {relative}.",
        ),
    ]


def training_claims(records: Records) -> list[Claim]:
    """What Figure 1 is held against."""
    return [
        lowest(
            "The training curve is lowest when both Q₀ and α are optimal.",
            {name: _late(record, "loss", FINAL) for name, record in records.items()},
            "Loss over the last tenth of the updates, mean over trials and its 95% interval",
            "The gain in variance did not outweigh the setting's lower learning rate, or chance.",
        )
    ]


def lowest(text: str, trials: dict[str, np.ndarray], what: str, if_fails: str, more: str = "") -> Claim:
    """Whether the trials of the best setting are below those of every other, by the ratio of geometric means."""
    others = [name for name in trials if name != BEST and BEST in trials]
    logs = {name: log_ratio(trials[name], trials[BEST]) for name in others}
    numbers = "; ".join(f"{LABELS[name]}: {show_interval(values)}" for name, values in trials.items())
    over = "; ".join(f"{LABELS[name]}: {show_ratio(log)}" for name, log in logs.items())
    detail = f"{what}: {numbers}." + (f" Over {LABELS[BEST]}, geometric means: {over}." if over else "") + more
    return judge(text, list(logs.values()) if set(trials) == set(NAMES) else None, detail, if_fails)


def alpha_claims(records: Records) -> list[Claim]:
    """What Figure 3 is held against."""
    late = {name: _alpha_steps(record) for name, record in records.items()}
    early = {name: _alpha_steps(record, early=True) for name, record in records.items()}
    spread = {name: np.ptp(np.stack(list(values.values())), axis=0) for name, values in early.items()}
    rises = {name: values[max(values)] - values[min(values)] for name, values in late.items()}
    pairs = [(f"{q0}-gir", f"{q0}-optimal") for q0 in ("identity", "optimal")]
    texts = "; ".join(f"{LABELS[name]}: {show_interval(trials)}" for name, trials in spread.items())
    ends = "; ".join(
        f"{LABELS[name]}: {show(float(np.mean(values[min(values)])))} to "
        f"{show(float(np.mean(values[max(values)])))}, a rise of {show_interval(rises[name])}"
        for name, values in late.items()
    )
    return [
        judge(
            "Early in training GIR's coefficients are more extreme than the optimal ones.",
            _if_run(records, NAMES, lambda: [difference(spread[a], spread[b]) for a, b in pairs]),
            "Largest less smallest log α_s over the first tenth of the updates, mean over trials and its 95% interval: "
            f"{texts}.",
            "The paper puts GIR's extremes down to gradients that vanish early in training; a forget gate that begins "
            "with a bias of 1, as here, lets less of them vanish. The paper does not say how its weights begin.",
        ),
        judge(
            "With both optimal the order is reversed: the last step of an episode has a larger α than the first.",
            _if_run(records, [BEST], lambda: [mean_of(rises[BEST])]),
            f"log α of the first and the last step over the last half of the updates: {ends}.",
            "The figure shows the order at the steps between.",
        ),
    ]


def _training(records: Records) -> Section:
    fig, axes = plots.figure()
    ax = axes[0, 0]
    for name, record in records.items():
        plots.draw_curve(ax, record, "loss", LABELS[name], NAMES.index(name), plots.filter_width(record))
    ax.set_xlabel("update")
    ax.set_ylabel("classification loss")
    plots.legend_below(fig, ax)
    rows = [
        [LABELS[name], show_interval(_late(record, "loss", FINAL)), str(len(finite_trials(record, "loss")))]
        for name, record in records.items()
    ]
    width = plots.filter_width(next(iter(records.values())))
    text = (
        "Training loss of UORO on row-wise digits, for four choices of the noise-shaping matrix Q₀ and the "
        "coefficients α: mean over trials and the 95% interval of the mean, after a median filter over "
        f"{width} rows of each trial, as in the paper's figure."
    )
    table = Table(["setting", "loss, last tenth", "trials"], rows)
    return Section("Training curves (Figure 1)", fig, text, training_claims(records), table, _files(records))


def _variances(records: Records) -> Section:
    fig, axes = plots.figure(2, 2, height=2.7, sharex=True, sharey=True)
    shown = {"intrinsic": "intrinsic, ‖g‖²", "expected": "expected V(Q), theory", "actual": "actual V(Q), measured"}
    for ax, name in zip(axes.flat, NAMES, strict=True):
        ax.set_yscale("log")
        ax.set_title(LABELS[name], fontsize=11)
        if name in records:
            for index, (column, label) in enumerate(shown.items()):
                plots.draw_curve(
                    ax, records[name], column, label, (0, 2, 1)[index], style=("-", "-", "--")[index], band=False
                )
    for ax in axes[-1]:
        ax.set_xlabel("update")
    for ax in axes[:, 0]:
        ax.set_ylabel("variance")
    plots.legend_below(fig, _first_drawn(axes, records))
    header = [
        "setting",
        "measured V(Q)",
        "predicted V(Q)",
        "their ratio, median of windows",
        "ratio of the means",
        "V(Q) / ‖g‖²",
    ]
    rows = []
    for name, record in records.items():
        actual, expected = np.mean(_late(record, "actual")), np.mean(_late(record, "expected"))
        relative = actual / np.mean(_late(record, "intrinsic"))
        ratios = (float(np.exp(np.mean(typical_log_ratio(record)))), mean_ratio(record))
        rows.append([LABELS[name], *(show(float(x)) for x in (actual, expected, *ratios, relative))])
    text = (
        "The part of the variance that Q₀ and α can change: as the theory predicts it, and as it was measured while "
        "training, with the squared norm of the gradient beside it; each row of the record is a mean over a number of "
        "updates and the minibatch. The table has means over the last half of the updates. V(Q) is nearly all of the "
        "total variance here, and the correction of the paper's second term does not show."
    )
    return Section(
        "Variance, predicted and measured (Figure 2)",
        fig,
        text,
        variance_claims(records),
        Table(header, rows),
        _files(records),
    )


def _alphas(records: Records) -> Section:
    fig, axes = plots.figure(2, 2, height=2.7, sharex=True, sharey=False)
    steps: list[int] = []
    for ax, name in zip(axes.flat, NAMES, strict=True):
        ax.set_title(LABELS[name], fontsize=11)
        if name not in records:
            continue
        steps = _steps(records[name])
        for place, s in enumerate(steps):
            shade = plots.shade(place / max(1, len(steps) - 1))
            plots.draw_curve(ax, records[name], f"log_alpha_{s}", f"s = {s}", 0, style="-", band=False, color=shade)
    for ax in axes[-1]:
        ax.set_xlabel("update")
    for ax in axes[:, 0]:
        ax.set_ylabel("log αₛ − min log α")
    plots.legend_below(fig, _first_drawn(axes, records), 4)
    text = (
        "log αₛ at several steps s of an episode as training proceeds, less the smallest of the episode, mean over the "
        "minibatch and trials. The panels have scales of their own. Under GIR α is what its coefficients came to: "
        "αₛ = βₛ γₛ₊₁ … γ_T."
    )
    return Section("log α over training (Figure 3)", fig, text, alpha_claims(records), None, _files(records))


def _first_drawn(axes: np.ndarray, records: Records) -> Any:
    return next(ax for ax, name in zip(axes.flat, NAMES, strict=True) if name in records)


def _late(record: Record, name: str, fraction: float = LATE) -> np.ndarray:
    """For each trial that ran to the end, the mean over the last `fraction` of the updates."""
    values = record.late(name, fraction)
    return values[np.isfinite(values)]


def _steps(record: Record) -> list[int]:
    prefix = "log_alpha_"
    return sorted(int(name.removeprefix(prefix)) for name in record.columns if name.startswith(prefix))


def _alpha_steps(record: Record, early: bool = False) -> dict[int, np.ndarray]:
    """log α_s of each trial by s, mean over the first tenth or the last half of the updates."""
    last = record.update[-1]
    when = record.update <= max(last * 0.1, record.update[0]) if early else record.update > last * (1 - LATE)
    return {s: np.mean(finite_trials(record, f"log_alpha_{s}")[:, when], axis=1) for s in _steps(record)}


def _if_run(records: Records, needed: list[str], margins: Callable[[], list[Estimate]]) -> list[Estimate] | None:
    """None where a setting that is needed has no trial that reached the end."""
    return margins() if all(name in records for name in needed) else None


def _files(records: Records) -> list[str]:
    return [f"{name}/metrics.csv" for name in records]
