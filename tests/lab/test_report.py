"""The report in a real browser, what it is made of, and the commands around it."""

import base64
import dataclasses
import json
import os
import re
import shutil
import xml.etree.ElementTree as ET

import pytest

from streamgrad_lab.cli.claims import EarlyClaims, print_claims
from streamgrad_lab.cli.main import main
from streamgrad_lab.experiments import MODULES, Claim
from streamgrad_lab.manifest import Manifest, load_manifest, save_manifest
from streamgrad_lab.report.figure import inline_svg
from tests.lab.browser import Page, find_browser
from tests.lab.fake_experiment import NASTY


@pytest.fixture(scope="module", autouse=True)
def fake():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODULES, "fake", "tests.lab.fake_experiment")
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert main(["reproduce", "fake", "--preset", "smoke", "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """The folder of a finished run, to be spoilt."""
    return shutil.copytree(finished, tmp_path / "run")


def test_reproduce_prints_the_claims_and_the_page(tmp_path, capsys):
    folder = tmp_path / "run"
    assert main(["reproduce", "fake", "--preset", "smoke", "--out", str(folder), "--seed", "7"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == f"report: {folder / 'report.html'}"
    assert [line.split("\t")[0] for line in out.splitlines()[:3]] == ["holds", "fails", "undecided"]
    assert "fake: one: 3 of 3" in err
    record = json.loads((folder / "run.json").read_text())["experiments"]["fake"]
    assert record["done"] and record["config"]["seed"] == 7
    assert (folder / "fake" / "curve.csv").read_text().splitlines()[1].endswith(",7")


def test_resume_goes_on_where_it_stopped(tmp_path, capsys, monkeypatch):
    folder, whole = tmp_path / "run", tmp_path / "whole"
    command = ["reproduce", "fake", "--preset", "smoke", "--out", str(folder)]
    monkeypatch.setenv("FAKE_STOPS_AT", "2")
    assert main(command) == 1
    assert "No space left" in capsys.readouterr().err
    assert not (folder / "report.html").exists()
    assert main(["report", str(folder)]) == 1
    assert "is finished" in capsys.readouterr().err
    monkeypatch.delenv("FAKE_STOPS_AT")
    assert main(command) == 1
    assert "has a run already" in capsys.readouterr().err
    assert main([*command, "--resume", "--seed", "1"]) == 1
    assert "fake.seed was 0 and is now 1" in capsys.readouterr().err
    assert main([*command[:3], "laptop", *command[4:], "--resume"]) == 1
    assert "preset was 'smoke' and is now 'laptop'" in capsys.readouterr().err
    assert main([*command, "--resume", "--json"]) == 0
    assert [claim["holds"] for claim in json.loads(capsys.readouterr().out)["claims"]] == [True, False, None] * 2
    monkeypatch.setenv("FAKE_STOPS_AT", "start")
    assert main([*command, "--resume"]) == 0, "what is done is not run again"
    monkeypatch.delenv("FAKE_STOPS_AT")
    assert main([*command[:-1], str(whole)]) == 0
    assert (folder / "fake" / "curve.csv").read_bytes() == (whole / "fake" / "curve.csv").read_bytes()


def test_report_is_the_same_anew(run, capsys):
    before = (run / "report.html").read_bytes()
    (run / "report.html").unlink()
    assert main(["report", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["report"] == str(run / "report.html")
    assert (run / "report.html").read_bytes() == before
    assert not list(run.rglob("*.tmp"))


def test_report_of_a_run_from_the_source_tree(run):
    """Where streamgrad is not installed, as on a borrowed GPU, the manifest does not know its version."""
    manifest = load_manifest(run)
    save_manifest(run, dataclasses.replace(manifest, versions={"jax": "0.1"}))
    assert main(["report", str(run)]) == 0
    assert "streamgrad, preset" in (run / "report.html").read_text()


@pytest.mark.parametrize(
    "file, content, says",
    [
        ("fake/curve.csv", None, "has no CSV files"),
        ("fake/curve.csv", b"", "is empty"),
        ("fake/curve.csv", b"update,loss,seed\n", "no rows"),
        ("fake/curve.csv", b"update,loss,seed\n0,1.0,0\n1,0.", "line 3"),
        ("fake/curve.csv", b"update,loss,seed\n0,1.0,0\n1,x,0\n", "loss must be a number"),
        ("fake/curve.csv", b"\xff\xfe\x00", "not a CSV file"),
        ("fake/curve.csv", b"other,names\n1,2\n", "KeyError"),
        ("run.json", None, "does not exist"),
        ("run.json", b'{"format": 2, ', "not a whole JSON file"),
        ("run.json", b'{"format": 1}', "format 2"),
        ("run.json", b'{"format": 2}', "must have the fields"),
    ],
)
def test_a_bad_file_is_named(run, capsys, file, content, says):
    (run / file).unlink() if content is None else (run / file).write_bytes(content)
    assert main(["report", str(run)]) == 1
    error = capsys.readouterr().err
    assert says in error and str((run / file).parent) in error and len(error.splitlines()) == 1
    assert (content is None and says.startswith("has no")) or str(run / file) in error


def test_claims_are_shown_as_soon_as_an_experiment_is_done(finished, capsys):
    told = []
    early = EarlyClaims(finished, lambda *words: told.append(words))
    early("next: one", 1, 2, "loss 1.0")
    assert [line.split("\t")[:2] for line in capsys.readouterr().out.splitlines()][:2] == [
        ["holds", "fake"],
        ["fails", "fake"],
    ]
    early("next: one", 2, 2, "loss 0.5")
    early("another: one", 1, 2, "loss 0.5")
    assert capsys.readouterr().out == "" and early.shown == {"fake"}
    assert [words[1] for words in told] == [1, 2, 1]


def test_claims_fit_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    print_claims([("fake", Claim("A claim of many words. " * 5, None, "Its numbers, in many more words. " * 9))])
    out = re.sub("\x1b\\[[0-9]+m", "", capsys.readouterr().out)
    assert out.startswith("undecided  fake: A claim") and max(map(len, out.splitlines())) <= 60
    assert out.count("many") == 14


def test_an_unknown_experiment_is_answered_with_the_choices(capsys):
    assert main(["reproduce", "figure9"]) == 2
    assert "variance, ablation" in capsys.readouterr().err


def test_ids_and_references_get_the_prefix():
    drawing = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="0 0 300 9">'
        '<clipPath id="c"/><use xlink:href="#m" clip-path="url(#c)" style="fill: #ffffff; stroke: #1f77b4"/></svg>'
    )
    root = ET.fromstring(inline_svg(drawing, "x-", 'a "label" <&>'))
    assert root.get("aria-label") == 'a "label" <&>'
    assert root.get("style") == "--natural: 400px"
    assert root[0].get("id") == "x-c"
    assert root[1].attrib == {
        "href": "#x-m",
        "clip-path": "url(#x-c)",
        "style": "fill: var(--paper); stroke: #1f77b4",
    }


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    path = find_browser()
    if path is None:
        message = "no Chromium found: install chromium, or set STREAMGRAD_CHROMIUM to its path"
        if os.environ.get("STREAMGRAD_REQUIRE_BROWSER"):
            pytest.fail(message)
        pytest.skip(message)
    page = Page(path, tmp_path_factory.mktemp("profile"))
    yield page
    page.close()


@pytest.mark.parametrize("width, dark", [(1280, False), (360, True)])
def test_in_a_browser(run, browser, width, dark):
    browser.errors.clear()
    browser.requests.clear()
    browser.open(run / "report.html", width, dark)
    look = browser.evaluate

    def each(selector: str, value: str) -> list:
        return look(f"[...document.querySelectorAll('{selector}')].map(e => {value})")

    assert look("innerWidth") == width
    assert look("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
    assert look(f"document.body.innerText.includes({json.dumps(NASTY)})"), "what was in the files is not shown as it is"
    assert look("document.scripts.length") == 0

    figures = each(".figure svg", "[e.getAttribute('class'), e.getBoundingClientRect().toJSON()]")
    shown = [box for kind, box in figures if kind == ("narrow" if width < 600 else "wide")]
    assert len(shown) == 2 and all(box["width"] > 200 and box["height"] > 150 for box in shown)
    assert sum(box["width"] > 0 for _, box in figures) == 2, "one form of each figure is seen, and not the other"
    ids = each("[id]", "e.id")
    assert len(ids) == len(set(ids))
    targets = each('[href^="#"]', "e.getAttribute('href').slice(1)")
    assert set(targets) <= set(ids)
    letters = [height for height in each(".figure svg text", "e.getBoundingClientRect().height") if height]
    assert min(letters) > 9, "too small to read"

    # Ink on paper, in either form of the page: relative luminance, roughly.
    def luminance(expression: str) -> float:
        rgb = look(f"{expression}.match(/\\d+/g).slice(0, 3).map(Number)")
        return sum(rgb) / 3

    paper = luminance("getComputedStyle(document.body).backgroundColor")
    assert paper < 60 if dark else paper > 240
    for ink in ("getComputedStyle(document.body).color", "getComputedStyle(document.querySelector('svg text')).fill"):
        assert abs(luminance(ink) - paper) > 150

    links = each("a[download]", "[e.download, e.href]")
    assert [name for name, _ in links] == ["fake-curve.csv"], "each file once, however many sections name it"
    head, data = links[0][1].split(",", 1)
    assert head.startswith("data:text/csv") and base64.b64decode(data) == (run / "fake" / "curve.csv").read_bytes()

    assert each('[src], [srcset], link:not([href^="data:"])', "e.outerHTML") == []
    assert [link for link in each("[href]", "e.getAttribute('href')") if link[:1] != "#" and link[:5] != "data:"] == []
    assert browser.requests == [(run / "report.html").resolve().as_uri()]
    assert browser.errors == []


def write_training(folder, metrics):
    folder.mkdir()
    described = {"cell": "gru", "hidden": 8, "estimator": "uoro", "task": "queue", "note": NASTY}
    described["plan"] = {"updates": 40, "every": 10, "seeds": 2, "seed": 4}
    save_manifest(folder, Manifest("training", described, {"jax": "1"}, "CPU"))
    if metrics is not None:
        (folder / "metrics.csv").write_text(metrics)
    return folder


ROWS = "".join(f"{u},{s},{1 / u + s},{2.0 * u},{u - 20}\n" for u in (10, 20, 30) for s in (4, 7) if (u, s) != (30, 7))


def test_a_training_run_has_a_report(tmp_path, capsys):
    """Two seeds, of which one stopped, a column that is below 0, and half a row at the end."""
    folder = write_training(tmp_path / "run", f"update,seed,loss,gradient_norm,extra\n{ROWS}30,7,0.")
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"report: {folder / 'report.html'}\n"
    page = (folder / "report.html").read_text()
    assert "gru of 8 units on the task queue, by uoro: 30 of 40 updates, 2 seeds." in page
    assert "<script>" not in page and "seed 7" in page and "Other columns" in page
    rows = [row.split("</td>")[:-1] for row in page.split("<tbody>")[1].split("<tr>")[1:]]
    cells = [[cell.split(">")[-1] for cell in row] for row in rows]
    assert [row[:2] for row in cells] == [["4", "30"], ["7", "20"]] and cells[0][4] == "4.03"
    assert len(list((folder / "figures").glob("training-*.svg"))) == 3
    assert main(["report", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(folder / "report.html")}


def test_a_name_with_dollars_is_no_formula(tmp_path, capsys):
    names = [r"cost $\frac{$", "$a$", "5 $"]
    rows = "".join(f"{update},0,1.0,1.0,1,2,3\n" for update in (10, 20))
    folder = write_training(tmp_path / "run", f"update,seed,loss,gradient_norm,{','.join(names)}\n{rows}")
    assert main(["report", str(folder)]) == 0, capsys.readouterr().err
    page = (folder / "report.html").read_text()
    assert all(f">{name}</text>" in page for name in names)


def test_final_numbers_are_those_of_the_last_tenth(tmp_path, capsys):
    """Of the updates that a seed has made: of 40 the last 4, of 20 the last 2."""
    made = {4: 40, 7: 20}
    rows = "".join(f"{u},{s},{u},{2 * u}\n" for u in range(1, 41) for s in made if u <= made[s])
    folder = write_training(tmp_path / "run", f"update,seed,loss,gradient_norm\n{rows}")
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    table = [row.split("</td>")[:-1] for row in page.split("<tbody>")[1].split("<tr>")[1:]]
    cells = [[cell.split(">")[-1] for cell in row] for row in table]
    assert cells[0] == ["4", "40", "1.00", "38.5", "1.00", "77.0"]  # means of 37 … 40, and of their doubles
    assert cells[1] == ["7", "20", "1.00", "19.5", "1.00", "39.0"]


@pytest.mark.parametrize(
    "metrics, says",
    [
        (None, "metrics.csv does not exist"),
        ("update,seed,loss,gradient_norm\n", "has no rows yet"),
        ("a,b\n1,2\n", "no numbers in columns update and seed"),
        ("update,seed,loss,gradient_norm\nx,0,1.0,1.0\n", "metrics.csv has no numbers in columns update and seed"),
        ("update,seed,loss\n1,0,1.0\n", "no numbers in its columns loss and gradient_norm"),
    ],
)
def test_a_bad_training_run_is_named(tmp_path, capsys, metrics, says):
    folder = write_training(tmp_path / "run", metrics)
    assert main(["report", str(folder)]) == 1
    error = capsys.readouterr().err
    assert says in error and str(folder) in error and len(error.splitlines()) == 1


def test_a_training_run_in_a_browser(tmp_path, browser):
    folder = write_training(tmp_path / "run", f"update,seed,loss,gradient_norm,extra\n{ROWS}")
    assert main(["report", str(folder)]) == 0
    browser.errors.clear()
    browser.open(folder / "report.html", 360, True)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 360
    assert browser.evaluate(f"document.body.innerText.includes({json.dumps(NASTY)})")
    assert browser.errors == []
