"""`streamgrad data`: fetched files are the published ones, or they are not kept."""

import json

import numpy as np
import pytest
import sklearn.datasets

from streamgrad_lab.cli.main import main
from streamgrad_lab.tasks import find_task, mnist
from tests.lab.test_tasks import idx, small_mnist  # noqa: F401, a fixture


@pytest.fixture
def openml(small_mnist, monkeypatch):  # noqa: F811
    """An OpenML that has the small MNIST; gives its arrays, to spoil them, and what was asked for."""
    found = {key: mnist.read_idx(mnist.find_file(small_mnist, file), file) for key, file in mnist.FILES.items()}
    images = np.concatenate([found[split, "images"] for split in ("train", "test")]).reshape(-1, 784).astype(float)
    labels = np.concatenate([found[split, "labels"] for split in ("train", "test")]).astype(str).astype(object)
    asked = []

    def fetch_openml(name, **options):
        asked.append((name, options["version"]))
        if not len(images):
            raise OSError("no route to host")
        return images, labels

    monkeypatch.setattr(sklearn.datasets, "fetch_openml", fetch_openml)
    return images, labels, asked


def test_mnist_is_fetched_once_and_verified(openml, tmp_path, capsys):
    folder = tmp_path / "data"
    assert main(["data", "check", "--data", str(folder), "--json"]) == 1
    assert all("no file" in entry["state"] for entry in json.loads(capsys.readouterr().out))
    assert main(["data", "mnist", "--data", str(folder)]) == 0
    assert capsys.readouterr().out.count("good") == 4
    assert main(["data", "mnist", "--data", str(folder)]) == 0
    assert openml[2] == [("mnist_784", 1)]
    assert len(list((folder / "mnist").iterdir())) == 4
    task = find_task("mnist", folder=folder, split="test")
    np.testing.assert_array_equal(task.data.steps.reshape(6, 784), openml[0][6:])


def test_what_is_not_mnist_is_not_kept(openml, tmp_path, capsys):
    openml[0][3, 5] += 1
    assert main(["data", "mnist", "--data", str(tmp_path / "data")]) == 1
    assert "md5 differs" in capsys.readouterr().err
    assert list((tmp_path / "data" / "mnist").iterdir()) == []


def test_no_network(openml, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sklearn.datasets, "fetch_openml", lambda *_, **__: (_ for _ in ()).throw(OSError("no route")))
    assert main(["data", "mnist", "--data", str(tmp_path / "data")]) == 1
    error = capsys.readouterr().err
    assert "could not be fetched, no route: try again, or copy train-images-idx3-ubyte.gz" in error
