"""A character model reads a text as it streams by, learns after every 16 characters, and writes some at the end.

    $ python examples/characters.py
"""

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

import streamgrad as sg

STREAMS, CHUNK = 16, 16


def read(path: Path | None) -> tuple[np.ndarray, jax.Array]:
    """The alphabet of a text, and the text as numbers of its letters in 16 pieces, [streams, length]."""
    try:  # The reference comes with Python, so that nothing is fetched.
        text = "\n".join(topics.values()) if path is None else path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise SystemExit(f"{path} cannot be read: {error.strerror}.") from None
    if len(text) <= STREAMS * CHUNK or len(set(text)) < 2:
        raise SystemExit(f"{path} is too short: more than {STREAMS * CHUNK} characters are needed, not all the same.")
    alphabet, codes = np.unique(np.array(list(text)), return_inverse=True)
    length = len(text) // STREAMS
    return alphabet, jnp.asarray(codes[: STREAMS * length].reshape(STREAMS, length))


def main(arguments: Sequence[str] | None = None) -> None:
    """Read, learn, write."""
    parser = argparse.ArgumentParser(description="A character model of a stream.")
    parser.add_argument("text", type=Path, nargs="?", help="a text file; by default Python's own reference")
    parser.add_argument("--updates", type=int, default=5000)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--write", type=int, default=200, help="how many characters at the end")
    options = parser.parse_args(arguments)
    alphabet, codes = read(options.text)
    one_hot = functools.partial(jax.nn.one_hot, num_classes=len(alphabet))
    # No unit of this cell reads another from step to step, so that exact RTRL costs about what BPTT does.
    model = sg.Model(sg.cells.elstm(len(alphabet), options.hidden), sg.heads.softmax(len(alphabet)))
    est, opt = sg.batched(sg.rtrl(model), STREAMS), optax.adam(5e-3)
    params = model.init(jax.random.key(0))

    def learn(carry, number):
        params, state, opt_state = carry
        places = (number * CHUNK + jnp.arange(CHUNK + 1)) % codes.shape[1]  # after the end comes the beginning
        seen = codes[:, places]
        chunk = sg.Chunk(inputs=one_hot(seen[:, :-1]), targets=seen[:, 1:])
        grads, state, info = est.update(params, state, chunk, None)  # exact: no noise, and no key
        updates, opt_state = opt.update(grads, opt_state)
        return (optax.apply_updates(params, updates), state, opt_state), info.loss.mean()

    def write(carry, key):
        state, code = carry
        output, state = model.run(params, state, one_hot(code)[None])
        p = model.head.predict(params.head, output[0])
        code = jax.random.categorical(key, jnp.log(p) / 0.7)
        return (state, code), code

    carry = params, est.init(params), opt.init(params)
    learn_many = jax.jit(functools.partial(jax.lax.scan, learn))
    for numbers in np.array_split(np.arange(options.updates), 5):
        carry, losses = learn_many(carry, numbers)
        print(f"update {numbers[-1] + 1}: {losses.mean() / np.log(2):.2f} bits per character", flush=True)
    params = carry[0]
    keys = jax.random.split(jax.random.key(1), options.write)
    _, written = jax.lax.scan(write, (model.init_state(params), codes[0, 0]), keys)
    print("".join(alphabet[written]))


if __name__ == "__main__":
    main()
