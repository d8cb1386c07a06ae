"""What a run goes on with: the data it was begun with, a format that is known, and files that are what they were."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from streamgrad_lab.cli.main import main
from streamgrad_lab.experiments import MODULES
from streamgrad_lab.experiments.reproduce import reproduce
from streamgrad_lab.manifest import FORMAT, load_manifest, save_manifest
from streamgrad_lab.report.page import Content, write_report
from streamgrad_lab.tasks import find_task
from streamgrad_lab.tasks.base import digest
from streamgrad_lab.training import metrics, train
from streamgrad_lab.training.checkpoint import Checkpoints, steps
from streamgrad_lab.training.session import _check_resumed
from tests.lab import fake_experiment
from tests.lab.counting import PLAN, counting, parts, same, summarise
from tests.tools import one_sentence

SMALL = ["--cell", "vanilla", "--hidden", "2", "--batch-size", "2", "--length", "2", "--updates", "2", "--every", "2"]


def go(folder, hidden=2, **more):
    about = {"summarise": summarise, "describe": {"rate": 0.05}, "resume": True}
    return train(folder, PLAN, *parts(counting(), hidden), **(about | more))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return go(tmp_path_factory.mktemp("runs") / "unbroken")


@pytest.fixture
def run(unbroken, tmp_path):
    """The folder of a finished run, to be spoilt."""
    return shutil.copytree(unbroken.folder, tmp_path / "run")


CHANGES = {
    "text": ("to be or not to be", "to be or not to bo"),
    "text, other letters": ("abcabcabc", "abdabdabd"),  # the same numbers for other characters
    "series": ("1 2 3 4 5 4 3 2 1", "1 2 3 4 5 4 3 2 0"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_file_that_has_changed_is_noticed(case, tmp_path, capsys):
    file, folder, (old, new) = tmp_path / "file", tmp_path / "run", CHANGES[case]
    task = case.split(",")[0]
    command = ["train", str(folder), "--task", task, "--task-options", f"path={file}", *SMALL]
    file.write_text(old)
    assert main(command) == 0
    known = load_manifest(folder).data_hash
    before = (folder / metrics.CSV).read_bytes()
    capsys.readouterr()
    file.write_text(new)
    assert main([*command, "--resume"]) == 1
    error = capsys.readouterr().err
    assert f"the data has changed since the run in {folder} was begun (its hash was {known} and is now" in error
    assert "put it back as it was, or begin again in another folder." in error and len(error.splitlines()) == 1
    assert (folder / metrics.CSV).read_bytes() == before and load_manifest(folder).data_hash == known
    file.write_text(old)
    assert main([*command, "--resume"]) == 0


def test_a_hash_tells_all_data_apart():
    task = find_task("digits")
    assert digest(task) == digest(find_task("digits", batch_size=3)) != digest(find_task("digits", split="test"))
    one = jax.tree.map(lambda leaf: leaf.at[(0,) * leaf.ndim].add(1), task.data)
    other = task.data._replace(labels=task.data.labels.at[7].add(1))
    turned = task.data._replace(steps=task.data.steps.reshape(1500, 4, 16))
    found = {digest(task._replace(data=data)) for data in (task.data, one, other, turned, (), {"a": jax.random.key(3)})}
    assert len(found) == 6
    assert task.held_out is not None  # what is only measured, too
    held_out = task.held_out._replace(
        data=jax.tree.map(lambda leaf: leaf.at[(0,) * leaf.ndim].add(1), task.held_out.data)
    )
    assert digest(task._replace(held_out=held_out)) != digest(task)


def test_an_experiment_goes_on_with_its_data(tmp_path, capsys, monkeypatch):
    hashes = iter(["first", "first", "second"])
    with_data = dataclasses.replace(fake_experiment.EXPERIMENT, data_hash=lambda config, data: next(hashes))
    monkeypatch.setattr(fake_experiment, "EXPERIMENT", with_data)
    monkeypatch.setitem(MODULES, "fake", "tests.lab.fake_experiment")
    command = ["reproduce", "fake", "--preset", "smoke", "--out", str(tmp_path / "run"), "--resume"]
    monkeypatch.setenv("FAKE_STOPS_AT", "2")
    assert main(command) == 1 and main(command) == 1
    assert "No space left" in capsys.readouterr().err
    assert main(command) == 1
    assert "(its hash was first and is now second)" in capsys.readouterr().err


def test_the_text_of_streams_has_a_hash(tmp_path):
    from streamgrad_lab.experiments import streams

    config = streams.PRESETS["paper"]
    found = []
    for words in ("to be or not", "to be or nut", "to be or not"):
        (tmp_path / "tinyshakespeare.txt").write_text(words)
        found.append(streams.EXPERIMENT.data_hash(config, tmp_path))
    assert found[0] == found[2] != found[1] and len(found[0]) == 32
    assert streams.data_hash(dataclasses.replace(config, settings=config.settings[:2]), None) == ""


def test_another_precision_is_named(run):
    found = load_manifest(run)
    save_manifest(run, dataclasses.replace(found, device=found.device.removesuffix(", float64")))
    with pytest.raises(ValueError, match="precision was 'float32' and is now 'float64'"):
        go(run)


def edit(run, change):
    found = json.loads((run / "run.json").read_text())
    change(found)
    (run / "run.json").write_text(json.dumps(found))


def older(run):
    """As the format before this one wrote it."""

    def change(found):
        del found["data_hash"]
        found["format"] = 2
        found["versions"]["streamgrad"] = "0.0.9"

    edit(run, change)


def test_a_run_of_an_older_format_goes_on_if_its_memory_fits(run, unbroken):
    older(run)
    assert load_manifest(run).format == 2 and load_manifest(run).data_hash == ""
    assert same(go(run).state, unbroken.state)
    found = load_manifest(run)
    assert found.format == FORMAT == 3 and len(found.data_hash) == 32


def test_a_run_of_an_older_format_on_data_that_is_cut_now_is_left_as_it_is(tmp_path, capsys):
    """The old version trained on what is held out by now: it is told from the beginning, and can still go on itself."""
    folder = tmp_path / "run"
    command = ["train", str(folder), "--task", "digits", "--cell", "vanilla", "--hidden", "2", "--estimator", "bptt"]
    assert main([*command, "--updates", "2", "--every", "1"]) == 0
    older(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main([*command, "--updates", "4", "--every", "1", "--resume"]) == 1
    said = capsys.readouterr().err
    assert "was made by streamgrad 0.0.9, format 2, which trained on what the task digits holds out by now" in said
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_of_an_older_format_with_another_memory_names_the_version_that_made_it(run):
    older(run)
    with pytest.raises(ValueError) as error:
        go(run, hidden=5)  # stands for an estimator that keeps something else by now
    said = str(error.value)
    assert f"the run in {run} was made by streamgrad 0.0.9, format 2, and the memory of this one, format 3, is" in said
    assert "(its state.params.cell['w'] is float64[2, 2, 4], not" in said and said.endswith(
        "go on with that version, or begin again in another folder."
    )
    assert one_sentence(error)


def test_a_format_that_is_not_known_is_named(run):
    edit(run, lambda found: found.update(format=9))
    with pytest.raises(ValueError, match=r"run\.json is of format 9, made by streamgrad .*, and not of format 2 or 3"):
        go(run)


def test_a_checkpoint_carries_its_format(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("streamgrad_lab.training.checkpoint.FORMAT", 9)
        checkpoints.save(5, {"a": np.ones(3)})
        assert list(checkpoints.read(5)) == ["['a']"]
    with pytest.raises(ValueError, match=r"5 is of format 9, and .* reads 3 and those before it: go on with the"):
        checkpoints.newest()


DEEP = "[" * 100_000 + "]" * 100_000
NESTED = '{"a":' * 300 + "1" + "}" * 300
NASTY = {
    "updates": (
        lambda found: found["describe"]["plan"].update(updates="12"),
        "plan.updates must be a whole number, not",
    ),
    "half": (lambda found: found["describe"]["plan"].update(seeds=2.5), "plan.seeds must be a whole number, not 2.5"),
    "truth": (lambda found: found["describe"]["plan"].update(checkpoints=1), "plan.checkpoints must be true or false"),
    "no plan": (lambda found: found["describe"].pop("plan"), "plan must be an object, not None"),
    "list": (lambda found: found["describe"].update(plan=[]), "plan must be an object, not []"),
    "deep": (DEEP, "nested more than 100 levels deep"),
    "nested": (f'{{"format": 3, "describe": {NESTED}}}', "nested more than 100 levels deep"),
    "many digits": ('{"format": ' + "9" * 5000 + "}", "not a whole JSON file"),
}


@pytest.mark.parametrize("case", NASTY)
def test_a_nasty_manifest_is_one_sentence(case, run, capsys):
    change, words = NASTY[case]
    (run / "run.json").write_text(change) if isinstance(change, str) else edit(run, change)
    before = (run / "run.json").read_bytes()
    with pytest.raises(ValueError) as error:
        go(run)
    assert words in str(error.value) and str(run / "run.json") in str(error.value)
    assert main(["report", str(run)]) == 1
    said = capsys.readouterr().err
    assert words in said and len(said.splitlines()) == 1
    assert (run / "run.json").read_bytes() == before


def places(value, path=()):
    """Every place in nested objects and lists."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


WRONG = (None, "x", -1, 1e400, True, [], {}, [1], {"x": {"y": 1}})


def spoilt(folder):
    """Every value of a manifest in turn is something else."""
    whole = json.loads((folder / "run.json").read_text())
    for *way, last in [path for path in places(whole) if path]:
        for value in WRONG:
            changed = json.loads(json.dumps(whole))
            inner = changed
            for key in way:
                inner = inner[key]
            inner[last] = value
            (folder / "run.json").write_text(json.dumps(changed))
            yield


def test_whatever_is_wrong_in_a_manifest_of_training_is_a_value_error(run):
    now, task, refused = load_manifest(run), counting(), 0
    for _ in spoilt(run):
        try:
            _check_resumed(run, PLAN, load_manifest(run), now, task)
        except ValueError as error:
            refused += 1
            assert str(run) in str(error)
    assert refused > 100


@dataclasses.dataclass(frozen=True)
class Chosen(fake_experiment.Config):
    note: str = ""
    settings: tuple[str, ...] = ("a", "b")


@pytest.fixture
def experiments(tmp_path, monkeypatch):
    monkeypatch.setitem(MODULES, "fake", "tests.lab.fake_experiment")
    chosen = dataclasses.replace(fake_experiment.EXPERIMENT, presets={"smoke": Chosen()})
    monkeypatch.setattr(fake_experiment, "EXPERIMENT", chosen)
    reproduce(["fake"], "smoke", tmp_path / "run", command="c")
    return tmp_path / "run"


def test_whatever_is_wrong_in_a_manifest_of_experiments_is_a_value_error(experiments, as_a_user):
    refused = 0
    for _ in spoilt(experiments):
        try:
            reproduce(["fake"], "smoke", experiments, command="c", resume=True)
        except ValueError as error:
            refused += 1
            assert str(experiments) in str(error)
        else:  # it can be read: then so can it be by the report, figures apart
            write_report(Content(experiments, load_manifest(experiments), [], []))
    assert refused > 100


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda found: found["describe"].clear(), "describe.preset must be text, not None"),
        (lambda found: found["experiments"]["fake"].update(done="no"), "done of .* must be true or false, not 'no'"),
        (lambda found: found["notes"].pop("started"), r"notes\.started must be text, not None"),
    ],
)
def test_a_nasty_manifest_of_experiments_is_one_sentence(change, words, experiments, capsys):
    edit(experiments, change)
    with pytest.raises(ValueError, match=words) as error:
        reproduce(["fake"], "smoke", experiments, resume=True)
    assert one_sentence(error) and main(["report", str(experiments)]) == 1
    assert capsys.readouterr().err == f"streamgrad report: {error.value}\n"


def test_experiments_of_an_older_format_go_on(experiments):
    older(experiments)
    reproduce(["fake"], "smoke", experiments, resume=True)
    assert json.loads((experiments / "run.json").read_text())["format"] == FORMAT


def test_names_that_are_no_steps_are_passed_over(run, unbroken):
    inside = run / "checkpoint"
    for name in ("²", "٣", "007", "9" * 30, "-1", "1_0", "99.orbax-checkpoint-tmp-5"):
        shutil.copytree(inside / "8", inside / name)
    (inside / "999").write_text("a file")
    assert steps(inside) == [8, 12]
    assert same(go(run).state, unbroken.state)
    assert (inside / "999").read_text() == "a file" and (inside / "²").is_dir(), "they are somebody else's"
    assert not (inside / "99.orbax-checkpoint-tmp-5").exists(), "this is ours"


def test_a_row_whose_number_is_no_number(run):
    csv = run / metrics.CSV
    csv.write_text(csv.read_text().replace("\n4,3,", "\n²,3,"))
    with pytest.raises(ValueError, match="line 4 is no row of metrics"):
        go(run)
