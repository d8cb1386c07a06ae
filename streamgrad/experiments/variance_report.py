"""What the recorded numbers of the `variance` experiment say: figures, tables and claims."""

from pathlib import Path
from typing import Any

import numpy as np

from streamgrad.experiments.base import Claim, Section, Table
from streamgrad.experiments.records import Record, finite_trials, read_settings, show, show_interval

LABELS = {
    "identity-gir": "Q₀ = I, α = GIR",
    "identity-ours": "Q₀ = I, α = ours",
    "ours-gir": "Q₀ = ours, α = GIR",
    "ours-ours": "Q₀ = ours, α = ours",
}
NAMES = list(LABELS)
BEST = "ours-ours"

# Where in training settings are compared: V(Q) is heavy-tailed, so that single updates say nothing.
LATE, FINAL = 0.5, 0.1

Records = dict[str, Record]


def sections(folder: Path) -> list[Section]:
    """The three figures, and what of the paper's claims the numbers bear out."""
    records = read_finished(folder)
    return [_training(records), _variances(records), _alphas(records)]


def all_claims(folder: Path) -> list[Claim]:
    """Every claim of this experiment, without its figures."""
    records = read_finished(folder)
    return [*variance_claims(records), *training_claims(records), *alpha_claims(records)]


def read_finished(folder: Path) -> Records:
    """The settings of which at least one trial has run to the end with finite numbers."""
    records = {name: r for name, r in read_settings(Path(folder), NAMES).items() if len(finite_trials(r, "loss"))}
    if not records:
        raise ValueError(f"{folder} has no metrics of the variance experiment.")
    return records


def typical_ratio(record: Record) -> float:
    """Measured V(Q) over predicted V(Q): the median over the windows of the last half, of all trials.

    A window, one row of the record, holds means over many updates. A median of windows, because V(Q) has so heavy a
    tail that a single window may outweigh all others: of its few episodes of enormous V(Q) the theory sees the mean
    over all noise, the measurement one draw.
    """
    late = record.update > record.update[-1] * (1 - LATE)
    actual, expected = finite_trials(record, "actual")[:, late], finite_trials(record, "expected")[:, late]
    return float(np.median(actual / expected))


def mean_ratio(record: Record) -> float:
    """Measured V(Q) over predicted V(Q): the ratio of their means over trials and the last half of the updates."""
    return float(np.mean(_late(record, "actual")) / np.mean(_late(record, "expected")))


def variance_claims(records: Records) -> list[Claim]:
    """What Figure 2 is held against."""
    ratios = {name: typical_ratio(record) for name, record in records.items()}
    means = {name: mean_ratio(record) for name, record in records.items()}
    measured = {name: float(np.mean(_late(record, "actual"))) for name, record in records.items()}
    relative = {name: measured[name] / float(np.mean(_late(r, "intrinsic"))) for name, r in records.items()}
    where = "Means over trials and the last half of the updates"
    typical = "median over all windows of updates in the last half"

    def listed(values: dict[str, float], names: list[str]) -> str:
        return "; ".join(f"{LABELS[name]}: {show(values[name])}" for name in names if name in values)

    ours, gir = ["identity-ours", "ours-ours"], ["identity-gir", "ours-gir"]
    right = _judge(records, ours, all(abs(ratios[name] - 1) <= 0.15 for name in ours if name in ratios))
    over = _judge(records, gir, all(ratios[name] < 1 for name in gir if name in ratios))
    lowest = _judge(records, NAMES, min(measured, key=measured.__getitem__) == BEST)
    return [
        Claim(
            "The predicted V(Q) is within 15% of the measured one when α is optimal.",
            right,
            f"Measured over predicted, {typical}: {listed(ratios, ours)}. Ratio of the means over all of them, which "
            f"few episodes can decide: {listed(means, ours)}."
            + _why(right, "Few samples of a heavy-tailed quantity may be off by this much."),
        ),
        Claim(
            "The predicted V(Q) is too high when α is GIR's.",
            over,
            f"Measured over predicted, {typical}: {listed(ratios, gir)}. The theory takes α to be independent of the "
            "noise; GIR looks at the noise, and shrinks what happens to be large."
            + _why(over, "Here that did not lower the measured variance below the prediction."),
        ),
        Claim(
            "The measured V(Q) is lowest when both Q₀ and α are ours.",
            lowest,
            f"{where}, measured V(Q): {listed(measured, NAMES)}. Relative to the squared norm of the gradient: "
            f"{listed(relative, NAMES)}."
            + _why(lowest, "The settings train different networks, whose gradients differ in size."),
        ),
    ]


def training_claims(records: Records) -> list[Claim]:
    """What Figure 1 is held against."""
    final = {name: _late(record, "loss", FINAL) for name, record in records.items()}
    means = {name: float(np.mean(trials)) for name, trials in final.items()}
    lowest = _judge(records, NAMES, min(means, key=means.__getitem__) == BEST)
    texts = "; ".join(f"{LABELS[name]}: {show_interval(trials)}" for name, trials in final.items())
    return [
        Claim(
            "The training curve is lowest when both Q₀ and α are ours.",
            lowest,
            f"Loss over the last tenth of the updates, mean over trials and its 95% interval: {texts}."
            + _why(lowest, "The gain in variance did not outweigh the setting's lower learning rate, or chance."),
        )
    ]


def alpha_claims(records: Records) -> list[Claim]:
    """What Figure 3 is held against."""
    late = {name: _alpha_steps(record) for name, record in records.items()}
    early = {name: _alpha_steps(record, early=True) for name, record in records.items()}
    spread = {name: max(values.values()) - min(values.values()) for name, values in early.items()}
    extreme = _judge(
        records,
        NAMES,
        all(spread[f"{q0}-gir"] > spread[f"{q0}-ours"] for q0 in ("identity", "ours") if len(spread) == 4),
    )
    reversed_order = _judge(records, [BEST], BEST in late and late[BEST][max(late[BEST])] > late[BEST][min(late[BEST])])
    texts = "; ".join(f"{LABELS[name]}: {show(value)}" for name, value in spread.items())
    ends = "; ".join(
        f"{LABELS[name]}: {show(values[min(values)])} to {show(values[max(values)])}" for name, values in late.items()
    )
    return [
        Claim(
            "Early in training GIR's coefficients are more extreme than the optimal ones.",
            extreme,
            f"Largest less smallest log α_s, means over the first tenth of the updates: {texts}."
            + _why(extreme, "See the figure."),
        ),
        Claim(
            "With both ours the order is reversed: the last step of an episode has a larger α than the first.",
            reversed_order,
            f"log α of the first and the last step, means over the last half of the updates: {ends}."
            + _why(reversed_order, "See the figure."),
        ),
    ]


def _training(records: Records) -> Section:
    from streamgrad.experiments import plots

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
    from streamgrad.experiments import plots

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
        ratios = (typical_ratio(record), mean_ratio(record))
        rows.append([LABELS[name], *(show(float(x)) for x in (actual, expected, *ratios, relative))])
    text = (
        "The part of the variance that Q₀ and α can change: as the theory predicts it, and as it was measured while "
        "training, with the squared norm of the gradient beside it; each row of the record is a mean over a number of "
        "updates and the minibatch. The table has means over the last half of the updates. V(Q) is nearly all of the "
        "total variance here, so that the correction of the paper's second term does not show."
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
    from streamgrad.experiments import plots

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


def _alpha_steps(record: Record, early: bool = False) -> dict[int, float]:
    """log α_s by s, mean over trials and the first tenth or the last half of the updates."""
    last = record.update[-1]
    when = record.update <= max(last * 0.1, record.update[0]) if early else record.update > last * (1 - LATE)
    return {s: float(np.mean(finite_trials(record, f"log_alpha_{s}")[:, when])) for s in _steps(record)}


def _judge(records: Records, needed: list[str], verdict: bool) -> bool | None:
    """None where a setting that is needed has no trial that reached the end."""
    return bool(verdict) if all(name in records for name in needed) else None


def _why(holds: bool | None, reason: str) -> str:
    if holds is None:
        return " Not all of the settings were run to the end."
    return "" if holds else f" It fails here. {reason}"


def _files(records: Records) -> list[str]:
    return [f"{name}/metrics.csv" for name in records]
