"""The grid search: what it trains, what it leaves out when it goes on, and what is made of its losses."""

import dataclasses

import numpy as np
import pytest

from streamgrad_lab.experiments import tune, tune_report, variance
from streamgrad_lab.tables import write_rows

BEST = {
    "identity-gir": (0.007, 0.5, 0.5, 0.5),
    "identity-optimal": (0.007, 0.5, 0.5, 0.5),
    "optimal-gir": (0.007, 0.5, 0.8, 5e-4),
    "optimal-optimal": (0.007, 0.5, 0.8, 5e-4),
}
PAPER = {setting.name: tune_report.paper_point(setting) for setting in variance.SETTINGS}
LEVEL = {"identity-gir": 1.7, "identity-optimal": 1.6, "optimal-gir": 1.6, "optimal-optimal": 1.4}


def lines_of(path):
    return path.read_text().splitlines()


@pytest.mark.slow
def test_tune_leaves_out_what_is_finished(tmp_path):
    config = dataclasses.replace(tune.PRESETS["smoke"], settings=variance.SETTINGS[3:])
    part = dataclasses.replace(config, learning_rates=config.learning_rates[:1])
    tune.run(part, tmp_path)
    first = lines_of(tmp_path / tune.POINTS)
    assert len(first) == 1 + part.trials, "a row for each training"
    seen = []
    tune.run(config, tmp_path, lambda *what: seen.append(what[:3]), resume=True)
    assert seen[0] == ("optimal-optimal, points", 6, 6), "four trainings were missing, and run at once"
    lines = lines_of(tmp_path / tune.POINTS)
    assert len(lines) == 7 and lines[: len(first)] == first
    for seed in ("0", "1"):
        losses = {line.split(",")[6] for line in lines[1:] if line.split(",")[5] == seed}
        assert len(losses) == 3  # every point learns by its own hyperparameters
    seen.clear()
    tune.run(config, tmp_path, lambda *what: seen.append(what), resume=True)
    assert not seen
    search, again = tune.EXPERIMENT.sections(tmp_path)
    assert [row[5] for row in search.table.rows] == ["3"]
    assert [claim.holds for claim in again.claims] == [None, None], "one of four settings was run"
    assert len(tune.grid(tune.PRESETS["paper"], variance.SETTINGS[3])) == 90
    tune.run(part, tmp_path)
    assert lines_of(tmp_path / tune.POINTS) == first, "without resume it starts over, and gives the same"


def test_best_points_are_trained_again_with_fresh_seeds(tmp_path, monkeypatch):
    """Every point of the grid with every seed of the search; then the best and the paper's with others."""
    trained = []

    def search(config, setting, model, task):
        def loss(point, seed):
            """The point in BEST is the best on average, though not with the first seed."""
            return 2.5 - point[0] if point != BEST[setting.name] else 3.0 if seed == 0 else 1.0

        def losses(trainings):
            assert len(trainings) <= config.width
            trained.extend((setting.name, *one) for one in trainings)
            return np.array([loss(*one) for one in trainings])

        return losses

    monkeypatch.setattr(tune, "make_search", search)
    config = dataclasses.replace(tune.PRESETS["laptop"], trials=3, again=4, width=7, seed=0)
    tune.run(config, tmp_path)
    known, again = (tune_report.read_losses(tmp_path / file) for file in (tune.POINTS, tune.AGAIN))
    assert len(trained) == len(set(trained)) and set(trained) == set(known) | set(again)
    assert len(known) == 3 * (10 + 10 + 90 + 90)
    assert {seed for _, _, seed in known} == {0, 1, 2} and {seed for _, _, seed in again} == {3, 4, 5, 6}
    for setting in variance.SETTINGS:
        assert tune_report.best_point(known, setting.name) == BEST[setting.name]
        assert set(tune_report.by_point(again, setting.name)) == {BEST[setting.name], PAPER[setting.name]}
    assert PAPER["optimal-gir"] == (0.005, 0.5, 0.9, 0.008), "which is not on the grid"
    assert len(again) == 4 * 4 * 2


def record(folder, change=lambda name, point, loss: loss, settings=LEVEL, hard=1.0):
    """Write losses of two points for each setting, then trained again with ten seeds that spread by 1.5%."""
    rng = np.random.default_rng(0)
    files = {tune_report.POINTS: [], tune_report.AGAIN: []}
    for name in settings:
        for point in (BEST[name], PAPER[name]):
            searched = [1.0 if point == BEST[name] else 2.0] * 2
            again = LEVEL[name] * np.exp(rng.permutation(np.linspace(-0.015, 0.015, 10))) * hard
            for rows, first, losses in zip(files.values(), (0, 2), (searched, again), strict=True):
                rows += [(name, *point, first + i, change(name, point, loss)) for i, loss in enumerate(losses)]
    for file, rows in files.items():
        write_rows(folder / file, [dict(zip(tune_report.HEADER, row, strict=True)) for row in rows])
    return tune_report.sections(folder)


def test_claims_about_the_chosen_points(tmp_path):
    def holds(change=lambda name, point, loss: loss, **options):
        return [claim.holds for claim in record(tmp_path, change, **options)[1].claims]

    def with_the_paper(factor):
        return lambda name, point, loss: loss * (factor if (name, point) == ("optimal-gir", PAPER[name]) else 1)

    def with_both_optimal(factor):
        return lambda name, point, loss: loss * (factor if name == "optimal-optimal" else 1)

    assert holds() == [True, True]
    assert holds(with_the_paper(1.03)) == [True, True]
    assert holds(with_the_paper(1.05)) == [None, True]
    assert holds(with_the_paper(1.07)) == [False, True]
    assert holds(with_the_paper(0.8)) == [True, True], "the paper's choice may be better"
    assert holds(with_both_optimal(1.6 / 1.4)) == [True, None]
    assert holds(with_both_optimal(1.2)) == [True, False]
    assert holds(with_the_paper(np.inf)) == [None, None], "one diverged"
    assert holds(settings=["identity-gir", "optimal-optimal"]) == [None, None]


def test_seeds_are_compared_in_pairs(tmp_path):
    """Seeds that are hard for both points do not blur their difference."""
    record(tmp_path, hard=np.exp(np.random.default_rng(1).normal(size=10)))
    pairs = tune_report.read_pairs(tmp_path)
    assert all(pair.log_ratio.half < 0.02 for pair in pairs.values())
    first, second = tune_report.claims(pairs)
    assert first.holds and second.holds is None, "settings are compared as in Figure 1, by their means"


def test_the_report_shows_every_hyperparameter(tmp_path):
    search, again = record(tmp_path)
    assert [ax.get_xlabel() for ax in search.figure.axes] == list(tune_report.HYPERPARAMETERS)
    assert len(again.table.rows) == 4
    assert again.table.rows[3][1] == "0.007, 0.5, 0.8, 0.0005" and again.table.rows[0][3] == "0.005, 0.8"
    (tmp_path / tune_report.AGAIN).unlink()
    _, again = tune_report.sections(tmp_path)
    assert again.table.rows == [] and [claim.holds for claim in again.claims] == [None, None]
    with pytest.raises(ValueError, match="no grid points yet"):
        tune_report.sections(tmp_path / "elsewhere")
