"""The experiments: their estimator against slow versions, their records and claims, and runs from end to end."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import streamgrad as sg
from streamgrad_lab.cli.main import main
from streamgrad_lab.experiments import ablation, find_experiment, records, tune, variance, variance_report
from streamgrad_lab.experiments.episodic import episodic_uoro, shown_steps, summarise_episodes
from streamgrad_lab.experiments.reproduce import reproduce
from streamgrad_lab.experiments.roots import damped_q0
from streamgrad_lab.manifest import load_manifest

MODEL = sg.Model(sg.cells.lstm(2, 2), sg.heads.softmax(3))
B, T = 2, 3


def example(key):
    keys = jax.random.split(jax.random.key(key), 3)
    params = MODEL.init(keys[0])
    inputs = jax.random.normal(keys[1], (B, T, 2))
    return params, sg.Chunk(inputs, jax.random.randint(keys[2], (B, T), 0, 3))


def stream(chunk, i):
    return jax.tree.map(lambda leaf: leaf[i], chunk)


@pytest.mark.parametrize("root", ["eigh", "newton"])
def test_q0_is_the_optimal_one_but_for_its_scale(root):
    x = jax.random.normal(jax.random.key(0), (6, 9)) * jnp.exp(-jnp.arange(6.0))[:, None]
    b = x @ x.T
    q0, inverse = damped_q0(b, jnp.asarray(0.005), root)
    expected = sg.theory.optimal_q0(b, 0.005) * (jnp.trace(b) / 6) ** 0.25
    np.testing.assert_allclose(q0, expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(q0 @ inverse, np.eye(6), atol=1e-12)


def test_the_root_by_products_is_good_in_float32():
    """200 units, eigenvalues over eight orders, the smallest damping of the paper's grid."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 300)) * np.exp(-np.arange(200) / 20)[:, None]
    b, damping = x @ x.T, 5e-5
    values, vectors = np.linalg.eigh(b / np.trace(b) * 200 + damping * np.eye(200))
    exact = (vectors * values**-0.25) @ vectors.T
    q0, inverse = damped_q0(jnp.asarray(b, jnp.float32), jnp.float32(damping), "newton")
    assert q0.dtype == jnp.float32
    np.testing.assert_allclose(q0, exact, atol=2e-5 * np.abs(exact).max())
    np.testing.assert_allclose(np.asarray(q0, float) @ np.asarray(inverse, float), np.eye(200), atol=1e-5)


def test_no_b_yet_is_the_identity():
    q0, inverse = damped_q0(jnp.zeros((3, 3)), 0.01)
    np.testing.assert_allclose(q0 / q0[0, 0], np.eye(3), atol=1e-15)
    np.testing.assert_allclose(q0 @ inverse, np.eye(3), atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", ["optimal", "gir"])
def test_estimator_is_uoro_with_the_q0_of_past_episodes(alpha):
    """Gradient, theory, measurement and the average of B of the second update, each by the slow way."""
    params, chunk = example(0)
    est = episodic_uoro(MODEL, B, "optimal", alpha, decay=0.8, damping=0.01)
    _, before, _ = est.update(params, est.init(params), chunk, jax.random.key(5))
    grads, after, info = est.update(params, before, chunk, jax.random.key(6))
    found, keys = info.diagnostics, jax.random.split(jax.random.key(6), B)

    @jax.jit
    def one_by_one(stream, key, used):
        q0 = sg.theory.optimal_q0(before.shared.b, 0.01)
        ep = sg.theory.collect(MODEL, params, stream)
        best = sg.theory.optimal_alpha(sg.theory.c_matrix(ep, q0))
        uoro = sg.uoro(MODEL, noise="gaussian", rescale=used if alpha == "optimal" else "gir", q0=q0)
        ours, _, told = uoro.update(params, uoro.init(params), stream, key)
        theory = sg.theory.v(ep, used, q0), sg.theory.total_variance(ep, used, q0)
        return ep, best.value, ours, told, theory

    all_b, all_grads = [], []
    for i in range(B):
        used = jnp.exp(found["log_alpha"][i])
        ep, best, ours, told, theory = jax.device_get(one_by_one(stream(chunk, i), keys[i], used))
        all_grads.append(ours)
        all_b.append(slow_b(ep, np.asarray(used)))
        if alpha == "optimal":
            np.testing.assert_allclose(found["expected"][i], best, rtol=1e-5)
        else:
            gamma, beta = told.diagnostics["gamma"][:, 0], told.diagnostics["beta"][:, 0]
            slow = np.array([beta[s] * np.prod(gamma[s + 1 :]) for s in range(T)])
            np.testing.assert_allclose(used / used[-1], slow / slow[-1], rtol=1e-9)
        off, norm = ours.cell["w"] - ep.gradient.cell["w"], np.sum(ep.gradient.cell["w"] ** 2)
        slowly = {
            "intrinsic": norm,
            "expected": theory[0],
            "actual": np.sum(off**2) - norm,
            "total": theory[1],
            "total_actual": np.sum(off**2),
        }
        for name, value in slowly.items():
            np.testing.assert_allclose(found[name][i], value, rtol=1e-8, err_msg=name)
        np.testing.assert_allclose(info.loss[i], told.loss, rtol=1e-12)
    mean = jax.tree.map(lambda *leaves: sum(leaves) / B, *all_grads)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-12), grads, mean)
    average = 0.8 * np.asarray(before.shared.b) + 0.2 * sum(all_b) / B
    np.testing.assert_allclose(after.shared.b, average, rtol=1e-9, atol=1e-12)


def slow_b(ep, alpha):
    """B, Equation 15, term by term."""
    b, a = np.asarray(ep.b), np.asarray(ep.features)
    total = np.zeros((ep.size, ep.size))
    for q in range(T):
        for r in range(T):
            g = sum(b[t, r] for t in range(q, T))
            total += alpha[r] ** 2 / alpha[q] ** 2 * (a[q] @ a[q]) * np.outer(g, g)
    return total


def test_the_summary_averages_over_the_minibatch():
    log_alpha = jnp.array([[3.0, 1.0, 2.0], [0.0, 5.0, 1.0]])
    one = jnp.array([1.0, 3.0])
    names = ("intrinsic", "expected", "actual", "total", "total_actual", "residual")
    info = sg.Info(jnp.zeros((2, 3)), dict.fromkeys(names, one) | {"log_alpha": log_alpha})
    row = summarise_episodes(3)(example(0)[1], info, example(0)[0])
    assert {name: float(value) for name, value in row.items()} == dict.fromkeys(names, 2.0) | {
        "log_alpha_1": 1.0,
        "log_alpha_2": 2.5,
        "log_alpha_3": 1.0,
    }
    assert shown_steps(28) == [0, 4, 8, 12, 15, 19, 23, 27]


def test_bad_choices_are_named():
    with pytest.raises(ValueError, match="q0 must be one of"):
        episodic_uoro(MODEL, 2, q0="best")
    with pytest.raises(ValueError, match="damping must lie between 0 and 1"):
        episodic_uoro(MODEL, 2, damping=0.0)
    with pytest.raises(ValueError, match="single weight matrix"):
        episodic_uoro(sg.Model(sg.cells.gru(2, 2), sg.heads.softmax(2)), 2)
    params, chunk = example(0)
    est = episodic_uoro(MODEL, 3)
    with pytest.raises(ValueError, match="has 2 streams, but the estimator was made for 3"):
        est.update(params, est.init(params), chunk, jax.random.key(0))


def test_a_record_knows_trials_that_stopped(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("update,seed,loss\n2,7,1.0\n2,8,3.0\n4,7,0.5\n4,8,nan\n6,7,0.25\n6,8")
    record = records.read_record(path)
    np.testing.assert_array_equal(record["loss"], [[1.0, 0.5, 0.25], [3.0, np.nan, np.nan]])
    np.testing.assert_array_equal(records.finite_trials(record, "loss"), [[1.0, 0.5, 0.25]])
    np.testing.assert_allclose(record.late("loss", 0.5), [0.375, np.nan])  # of updates 4 and 6
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="not a file of metrics"):
        records.read_record(path)


def write_variance(folder, actual, expected, loss, rows=20):
    for name in variance_report.NAMES:
        (folder / name).mkdir(parents=True)
        falls, lines = name != "optimal-optimal", []
        for row in range(1, rows + 1):
            for seed in range(3):
                first, last = (2.0, 0.0) if falls else (0.0, 1.0)
                first *= 2 if name.endswith("gir") else 1
                line = [row, seed, loss[name] + 0.01 * seed, 1.0, expected[name], actual[name]]
                lines.append(",".join(map(str, [*line, expected[name], actual[name], first, last])))
        header = "update,seed,loss,intrinsic,expected,actual,total,total_actual,log_alpha_1,log_alpha_8"
        (folder / name / "metrics.csv").write_text("\n".join([header, *lines]) + "\n")


def test_claims_follow_the_numbers(tmp_path):
    names = variance_report.NAMES
    good = dict(zip(names, [100.0, 80.0, 60.0, 20.0], strict=True))
    expected = dict(zip(names, [150.0, 82.0, 90.0, 21.0], strict=True))
    loss = dict(zip(names, [1.4, 1.3, 1.2, 1.1], strict=True))
    write_variance(tmp_path / "good", good, expected, loss)
    claims = variance_report.all_claims(tmp_path / "good")
    assert [claim.holds for claim in claims] == [True] * 6
    assert "0.976" in claims[0].detail

    bad = dict(zip(names, [160.0, 80.0, 60.0, 65.0], strict=True))
    write_variance(tmp_path / "bad", bad, expected, loss | {"optimal-optimal": 1.25})
    claims = variance_report.all_claims(tmp_path / "bad")
    assert [claim.holds for claim in claims] == [False, False, False, False, True, True]
    assert all("fails here" in claim.detail for claim in claims[:4])

    (tmp_path / "bad" / "optimal-gir" / "metrics.csv").unlink()
    assert [claim.holds for claim in variance_report.all_claims(tmp_path / "bad")][1:4] == [None, None, None]
    with pytest.raises(ValueError, match="no metrics"):
        variance_report.sections(tmp_path)


def test_every_preset_is_a_valid_plan():
    for experiment in (variance.EXPERIMENT, ablation.EXPERIMENT):
        assert list(experiment.presets) == ["smoke", "laptop", "paper"]
        for config in experiment.presets.values():
            plan = variance.plan_of(config)
            assert plan.updates % plan.checkpoint_every == 0


def one_setting():
    config = find_experiment("variance").presets["smoke"]
    return dataclasses.replace(config, settings=config.settings[:1])


@pytest.mark.slow
def test_variance_resumes(tmp_path):
    variance.run(one_setting(), tmp_path / "whole")
    variance.run(dataclasses.replace(one_setting(), updates=4), tmp_path / "parts")
    variance.run(one_setting(), tmp_path / "parts", resume=True)
    parts, whole = (records.read_settings(tmp_path / name, variance_report.NAMES) for name in ("parts", "whole"))
    np.testing.assert_array_equal(parts["identity-gir"]["loss"], whole["identity-gir"]["loss"])


def test_variance_runs_and_reports(tmp_path):
    seen = []
    variance.run(one_setting(), tmp_path, lambda *what: seen.append(what[:3]))
    assert seen == [("identity-gir", done, 8) for done in (0, 1, 4, 8)]
    with pytest.raises(ValueError, match="has a run already"):
        variance.run(one_setting(), tmp_path)
    (record,) = records.read_settings(tmp_path, variance_report.NAMES).values()
    assert record.update.tolist() == [2, 4, 6, 8]
    assert record["loss"].shape == (2, 4)
    assert np.all(np.isfinite(record["actual"])) and np.all(record["expected"] > 0)
    assert [name for name in record.columns if "alpha" in name] == [f"log_alpha_{s}" for s in range(1, 9)]
    parts = variance.EXPERIMENT.sections(tmp_path)
    assert len(parts) == 3 and all(part.figure.axes for part in parts)
    assert parts[0].files == ["identity-gir/metrics.csv"]
    assert [row[2] for row in parts[0].table.rows] == ["2"]
    assert [claim.holds for part in parts for claim in part.claims] == [None] * 6


@pytest.mark.slow
def test_ablation_runs_from_the_command_line(tmp_path, capsys):
    """One setting after the other, as a machine with little time and without orbax would."""
    options = ["reproduce", "ablation", "--preset", "smoke", "--out", str(tmp_path), "--no-checkpoints"]
    assert main([*options, "--settings", "temporal"]) == 0
    capsys.readouterr()
    assert main([*options, "--settings", "temporal", "both", "--resume"]) == 0
    error = capsys.readouterr().err
    assert "both: 8 of 8" in error and "temporal" not in error, "what is done is not run again"
    manifest = load_manifest(tmp_path).experiments["ablation"]
    assert manifest["done"] and manifest["config"]["settings"] == ["temporal", "both"]
    (section,) = ablation.EXPERIMENT.sections(tmp_path / "ablation")
    final = [float(row[2].split(" ")[0]) for row in section.table.rows]
    assert len(section.figure.axes[0].lines) == 2 and np.all(np.isfinite(final))
    assert [claim.holds for claim in section.claims] == [None, None, None], "2 trials of 8 updates decide nothing"
    assert not list((tmp_path / "ablation").rglob("checkpoint"))
    assert main([*options, "--settings", "none", "--resume"]) == 1
    assert "settings must be among neither, spatial" in capsys.readouterr().err


def test_an_experiment_goes_on_as_it_was_begun(tmp_path, monkeypatch):
    never = dataclasses.replace(tune.EXPERIMENT, run=lambda *_, **__: None)
    monkeypatch.setattr(tune, "EXPERIMENT", never)
    reproduce(["tune"], "smoke", tmp_path)
    for change, words in (
        ({"updates": 5}, "tune.updates was 4 and is now 5"),
        ({"seed": 1}, "seed was 0 and is now 1"),
    ):
        with pytest.raises(ValueError, match=words):
            reproduce(["tune"], "smoke", tmp_path, resume=True, **change)
    with pytest.raises(ValueError, match="has a run already"):
        reproduce(["tune"], "smoke", tmp_path)
    with pytest.raises(ValueError, match="has no hidden_units to choose"):
        reproduce(["tune"], "smoke", tmp_path, resume=True, hidden_units=3)
