"""The 8x8 digits that ship inside scikit-learn: a data set that needs no file."""

from typing import Any

from streamgrad_lab.tasks.base import Task
from streamgrad_lab.tasks.images import check_split, image_task

N_TRAIN = 1500  # of 1,797, in their order


def digits(read: str = "rows", batch_size: int = 50, length: int | None = None, split: str = "train") -> Task:
    """Handwritten digits of 8x8 pixels, classified at every step.

    Args:
      read: "rows" (8 steps of 8 pixels) or "pixels" (64 steps of one).
      batch_size: B, digits at once.
      length: T, steps of a chunk; a whole digit by default, else a number that divides its steps.
      split: "train" (1,500 digits, with the others held out) or "test" (the other 297).

    Returns:
      The task; pixels lie between 0 and 1.

    Example:
      >>> import jax
      >>> task = digits(batch_size=3)
      >>> chunk, state = task.sample(task.data, task.init(jax.random.key(0)), jax.random.key(1))
      >>> chunk.inputs.shape, chunk.targets.shape
      ((3, 8, 8), (3, 8))
    """
    check_split(split)
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ValueError('the task digits needs scikit-learn: pip install "streamgrad[lab]".') from error
    found: Any = load_digits()
    first, rest = ((found.images[part], found.target[part]) for part in (slice(None, N_TRAIN), slice(N_TRAIN, None)))
    own, kept = (first, rest) if split == "train" else (rest, None)
    return image_task("digits", *own, 16, 10, read, batch_size, length, kept)
