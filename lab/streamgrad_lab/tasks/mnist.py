"""MNIST from its four IDX files in a data folder. Nothing is fetched from here; `streamgrad data mnist` does that."""

import gzip
import hashlib
import os
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from streamgrad_lab.tasks.base import Task
from streamgrad_lab.tasks.images import check_split, image_task

VARIABLE = "STREAMGRAD_DATA"
ADVICE = "fetch the four files with `streamgrad data mnist`, or copy them there"


class IdxFile(NamedTuple):
    """One of the four.

    Attributes:
      name: as it is published, without ".gz".
      shape: of the array in it.
      md5: of its uncompressed content, since anyone may compress it again.
    """

    name: str
    shape: tuple[int, ...]
    md5: str


FILES = {
    ("train", "images"): IdxFile("train-images-idx3-ubyte", (60000, 28, 28), "6bbc9ace898e44ae57da46a324031adb"),
    ("train", "labels"): IdxFile("train-labels-idx1-ubyte", (60000,), "a25bea736e30d166cdddb491f175f624"),
    ("test", "images"): IdxFile("t10k-images-idx3-ubyte", (10000, 28, 28), "2646ac647ad5339dbf082846283269ea"),
    ("test", "labels"): IdxFile("t10k-labels-idx1-ubyte", (10000,), "27ae3e4e09519cfbb04c329615203637"),
}


def mnist(
    folder: str | Path | None = None,
    read: str = "rows",
    batch_size: int = 50,
    length: int | None = None,
    split: str = "train",
) -> Task:
    """Handwritten digits of 28x28 pixels, classified at every step.

    Args:
      folder: the four IDX files lie in it or in its subfolder `mnist`, compressed (.gz) or plain; by default that of
        the environment variable STREAMGRAD_DATA.
      read: "rows" (28 steps of 28 pixels) or "pixels" (784 steps of one).
      batch_size: B, digits at once.
      length: T, steps of a chunk; a whole digit by default, else a number that divides its steps.
      split: "train" (60,000 digits, with the others held out) or "test" (the other 10,000).

    Returns:
      The task; pixels lie between 0 and 1. The files are checked by shape and md5.
    """
    check_split(split)
    where = data_folder(folder)

    def images_and_labels(split: str) -> tuple[np.ndarray, np.ndarray]:
        images, labels = (FILES[split, part] for part in ("images", "labels"))
        return read_idx(find_file(where, images), images), read_idx(find_file(where, labels), labels)

    own = images_and_labels(split)
    kept = images_and_labels("test") if split == "train" else None
    return image_task("mnist", *own, 255, 10, read, batch_size, length, kept)


def data_folder(folder: str | Path | None) -> Path:
    """The folder of that name, or that of the environment."""
    if folder is None:
        folder = os.environ.get(VARIABLE) or None
    if folder is None:
        raise ValueError(f"no data folder was given: name one, or set the environment variable {VARIABLE}.")
    return Path(folder)


def find_file(folder: Path, file: IdxFile) -> Path:
    """Where in the folder, or in its subfolder `mnist`, that file lies."""
    for inside in (folder, folder / "mnist"):
        for name in (file.name, file.name + ".gz"):
            if (inside / name).is_file():
                return inside / name
    raise ValueError(f"{folder} has no file {file.name} or {file.name}.gz: {ADVICE}.")


def read_idx(path: Path, file: IdxFile) -> np.ndarray:
    """The array of an IDX file, if it is the published one."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read, {error}: remove it, and {ADVICE}.") from error
    rank = len(file.shape)
    header = np.array([0x0800 + rank, *file.shape], ">i4").tobytes()
    if len(content) != len(header) + np.prod(file.shape) or not content.startswith(header):
        shape = "x".join(map(str, file.shape))
        raise ValueError(f"{path} is not an IDX file of {shape} bytes: remove it, and {ADVICE}.")
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != file.md5:
        raise ValueError(f"{path} is not the published {file.name}, its md5 differs: remove it, and {ADVICE}.")
    return np.frombuffer(content, np.uint8, offset=len(header)).reshape(file.shape)
