"""A stream of characters from a text file: predict the next one."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from streamgrad import Chunk, heads
from streamgrad._typing import Array, Int
from streamgrad.checks import check_size
from streamgrad_lab.tasks.base import Task
from streamgrad_lab.tasks.file_end import next_values, split_end


def text(path: str | Path, batch_size: int = 50, length: int = 10, held_out: float = 0.1) -> Task:
    """Characters of a text, one-hot; the target is the next character.

    Args:
      path: a file in UTF-8. Its vocabulary is the set of characters in it, in the order of their code points.
      batch_size: B, streams at once. They begin at equal distances in the text, from a place that is drawn at random.
      length: T, steps of a chunk. Streams go on across chunks; at the end of the text they start over, with a reset.
      held_out: the part at the end of the text that is not trained on, but measured; 0 for none. The vocabulary is that
        of the whole text.

    Returns:
      The task. Of fewer than 20 characters a tenth cannot be predicted, and nothing is held out.

    Example:
      >>> import pathlib, tempfile, jax
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "text.txt"
      >>> _ = path.write_text("to be or not to be")
      >>> task = text(path, batch_size=1, length=5)
      >>> task.n_in  # b, e, n, o, r, t and the space
      7
    """
    check_size(batch_size=batch_size, length=length)
    vocabulary, codes = read_text(Path(str(path)))
    first, last = split_end(codes, held_out, "characters")
    task = text_task(vocabulary, first, batch_size, length)
    if last is None:
        return task

    def one_hot(codes: Array) -> Array:
        return jax.nn.one_hot(codes, len(vocabulary), dtype=float)

    return task._replace(held_out=next_values(jnp.asarray(last, jnp.int32), batch_size, one_hot, lambda codes: codes))


def text_task(vocabulary: str, codes: np.ndarray, batch_size: int, length: int) -> Task:
    """A text whose characters are numbers already, see `text`."""
    size, places = len(vocabulary), len(codes) - 1  # the last character has no next one
    data = jnp.asarray(codes, jnp.int32)

    def init(key: Array) -> Int[Array, " B"]:
        begin = jax.random.randint(key, (), 0, places, jnp.int32)
        apart = np.arange(batch_size, dtype=np.int64) * places // batch_size
        return (begin + jnp.asarray(apart, jnp.int32)) % places

    def sample(data: Array, state: Array, key: Array) -> tuple[Chunk, Array]:
        del key
        at = (state[:, None] + jnp.arange(length, dtype=jnp.int32)[None, :]) % places
        inputs = jax.nn.one_hot(data[at], size, dtype=float)
        return Chunk(inputs, data[at + 1], at == 0), (state + length) % places

    head = heads.softmax(size)
    return Task("text", size, head, batch_size, length, False, data, init, sample, symbols=vocabulary)


def read_text(path: Path) -> tuple[str, np.ndarray]:
    """The vocabulary of a file, and its characters as numbers."""
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"the text {path} cannot be read, {error.strerror}: name a file with text in UTF-8."
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8, at byte {error.start}: convert it first.") from error
    return codes_of(content, f"the text {path}")


def codes_of(content: str, name: str = "the text") -> tuple[str, np.ndarray]:
    """The vocabulary of a text, and its characters as numbers.

    Example:
      >>> vocabulary, codes = codes_of("abba")
      >>> vocabulary, codes.tolist()
      ('ab', [0, 1, 1, 0])
    """
    vocabulary, codes = np.unique(np.array(list(content), dtype=str), return_inverse=True)
    if len(vocabulary) < 2:
        raise ValueError(f"{name} needs at least two different characters, and has {len(vocabulary)}.")
    return "".join(vocabulary), codes
