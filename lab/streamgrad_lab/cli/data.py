"""`streamgrad data`: fetch MNIST, or check the files of a data folder."""

import dataclasses
import gzip
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Literal

import numpy as np
import tyro

from streamgrad_lab.cli.show import print_table


@dataclasses.dataclass(frozen=True)
class Options:
    """Fetch or check data sets.

    `mnist` fetches MNIST from OpenML by scikit-learn's client, writes its four IDX files into the data folder, and
    checks that they are the published ones; what is there already is not fetched again. `check` looks at what is there.
    """

    action: tyro.conf.Positional[Literal["mnist", "check"]]
    """What to do."""
    data: Path | None = None
    """The data folder; by default that of the environment variable STREAMGRAD_DATA."""
    json: bool = False
    """Print JSON, for a program to read."""


def main(options: Options) -> int:
    """Fetch or check."""
    from streamgrad_lab.tasks.mnist import data_folder

    folder = data_folder(options.data)
    if options.action == "mnist" and any(found != "good" for _, found in inspect_files(folder)):
        fetch_mnist(folder)
    files = inspect_files(folder)
    if options.json:
        print(json.dumps([{"file": name, "state": found} for name, found in files], indent=2))
    else:
        print_table(["file", "state"], files)
    return 0 if all(found == "good" for _, found in files) else 1


def inspect_files(folder: Path) -> list[tuple[str, str]]:
    """Each of MNIST's files, and either "good" or what is wrong with it."""
    from streamgrad_lab.tasks.mnist import FILES, find_file, read_idx

    found = []
    for file in FILES.values():
        try:
            path = find_file(folder, file)
            read_idx(path, file)
            found.append((str(path), "good"))
        except ValueError as error:
            found.append((file.name, str(error)))
    return found


def fetch_mnist(folder: Path) -> None:
    """Fetch MNIST into `folder/mnist`; files that are not the published ones are not kept."""
    from sklearn.datasets import fetch_openml

    from streamgrad_lab.files import check_room, writing
    from streamgrad_lab.tasks.mnist import FILES, read_idx

    where = folder / "mnist"
    check_room(where, 12 << 20)
    print("fetching MNIST from OpenML; this takes a minute or two", file=sys.stderr)
    try:
        # This parser needs no further package.
        with warnings.catch_warnings():  # of its retries: the error below says it if they fail
            warnings.simplefilter("ignore")
            images, labels = fetch_openml(
                "mnist_784", version=1, as_frame=False, return_X_y=True, cache=False, parser="liac-arff"
            )
    except (OSError, ValueError) as error:
        names = ", ".join(f"{file.name}.gz" for file in FILES.values())
        raise OSError(f"MNIST could not be fetched, {error}: try again, or copy {names} into {where}.") from error
    first = FILES["train", "images"].shape[0]
    for (split, part), file in FILES.items():
        values = np.asarray(images if part == "images" else labels).astype(np.uint8)
        values = values[:first] if split == "train" else values[first:]
        header = np.array([0x0800 + len(file.shape), *file.shape], ">i4").tobytes()
        with tempfile.TemporaryDirectory(dir=where, prefix=".part-") as inside:  # of this user alone
            beside = Path(inside) / f"{file.name}.gz"
            with writing(where / beside.name):
                beside.write_bytes(gzip.compress(header + values.tobytes(), mtime=0))
                read_idx(beside, file)
                os.replace(beside, where / beside.name)
