"""Images read as sequences and classified at every step: what `digits` and `mnist` share."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from streamgrad import Chunk, heads
from streamgrad._typing import Array, Int
from streamgrad.checks import check_choice, check_size
from streamgrad_lab.tasks.base import HeldOut, Task

READINGS = ("rows", "pixels")


class Images(NamedTuple):
    """A data set on the device.

    Attributes:
      steps: images cut into steps, whole numbers as they are stored: a quarter of the memory.
      labels: one per image.
    """

    steps: Array  # uint8[n, S, width]
    labels: Array  # int32[n]


class Position(NamedTuple):
    """Where the streams stand: which image each reads, and at which step of it all of them are."""

    image: Int[Array, " B"]
    step: Int[Array, ""]


def image_task(
    name: str,
    images: np.ndarray,
    labels: np.ndarray,
    brightest: int,
    n_classes: int,
    read: str = "rows",
    batch_size: int = 50,
    length: int | None = None,
    held_out: tuple[np.ndarray, np.ndarray] | None = None,
) -> Task:
    """Images as a task: a few pixels at each step, and the class of the image as the target of all of them.

    Args:
      name: of the task.
      images: whole numbers `[n, rows, columns]`.
      labels: `[n]`.
      brightest: the pixel value that becomes 1.
      n_classes: number of classes.
      read: "rows" (one at each step) or "pixels" (one at each step).
      batch_size: B, images at once.
      length: T, steps of a chunk; a whole image by default, else a number that divides its steps.
      held_out: images and labels that are not trained on, but measured; None for none.

    Returns:
      The task. Each image is drawn at random, with replacement, and begins with a reset.
    """
    check_choice("read", read, READINGS)
    check_size(batch_size=batch_size)
    check_images(images, labels, brightest, n_classes)
    width = images.shape[2] if read == "rows" else 1
    steps = images.shape[1] * images.shape[2] // width
    chunk_length = steps if length is None else length
    check_size(length=chunk_length)
    if steps % chunk_length:
        raise ValueError(f"length must divide the {steps} steps of an image, and {length} does not.")

    def on_device(images: np.ndarray, labels: np.ndarray) -> Images:
        return Images(jnp.asarray(images.reshape(-1, steps, width), jnp.uint8), jnp.asarray(labels, jnp.int32))

    kept = None
    if held_out is not None:
        check_images(*held_out, brightest, n_classes)
        kept = _held_out(on_device(*held_out), brightest, batch_size)

    def init(key: Array) -> Position:
        del key  # the first sample draws images
        return Position(jnp.zeros(batch_size, jnp.int32), jnp.zeros((), jnp.int32))

    def sample(data: Images, state: Position, key: Array) -> tuple[Chunk, Position]:
        drawn = jax.random.randint(key, (batch_size,), 0, len(data.labels), jnp.int32)
        image = jnp.where(state.step == 0, drawn, state.image)
        now = state.step + jnp.arange(chunk_length, dtype=jnp.int32)
        inputs = data.steps[image[:, None], now[None, :]].astype(float) / brightest
        targets = jnp.repeat(data.labels[image][:, None], chunk_length, axis=1)
        reset = jnp.repeat((now == 0)[None, :], batch_size, axis=0)
        return Chunk(inputs, targets, reset), Position(image, (state.step + chunk_length) % steps)

    head, episodic = heads.softmax(n_classes), chunk_length == steps
    data = on_device(images, labels)
    return Task(name, width, head, batch_size, chunk_length, episodic, data, init, sample, held_out=kept)


def _held_out(data: Images, brightest: int, batch_size: int) -> HeldOut:
    """Each image once, whole; those that fill up the last batch do not count."""
    count, steps = data.steps.shape[:2]

    def sample(data: Images, index: Array) -> Chunk:
        image = index.astype(jnp.int32) * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
        weight = jnp.repeat((image < count)[:, None].astype(float), steps, axis=1)
        image = jnp.minimum(image, count - 1)
        reset = jnp.zeros((batch_size, steps), bool).at[:, 0].set(True)
        targets = jnp.repeat(data.labels[image][:, None], steps, axis=1)
        return Chunk(data.steps[image].astype(float) / brightest, targets, reset, weight)

    return HeldOut(data, -(-count // batch_size), sample)


def check_images(images: np.ndarray, labels: np.ndarray, brightest: int, n_classes: int) -> None:
    """A data set is what `image_task` takes."""
    if np.ndim(images) != 3 or not _whole(images, min(brightest, 255)):
        raise ValueError(f"images must be whole numbers [n, rows, columns] from 0 to {min(brightest, 255)}.")
    if np.shape(labels) != (len(images),) or not _whole(labels, n_classes - 1):
        raise ValueError(
            f"labels must be whole numbers from 0 to {n_classes - 1}, one for each of {len(images)} images."
        )


def _whole(numbers: np.ndarray, most: int) -> bool:
    whole = np.issubdtype(numbers.dtype, np.integer) or bool(np.all(numbers % 1 == 0))
    return whole and numbers.size > 0 and bool(numbers.min() >= 0 and numbers.max() <= most)


def check_split(split: Any) -> None:
    """`split` is one of a data set's two parts."""
    check_choice("split", split, ("train", "test"))


__all__ = ["READINGS", "Images", "Position", "check_split", "image_task"]
