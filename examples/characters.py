"""A character model reads a text as it streams by, learns after every 16 characters, and writes some at the end.

It takes 31 seconds of CPU time. Give it a file of your own; this is Python's reference, that of Python 3.11:

    $ python examples/characters.py
    update 2000: 2.74 bits per character
    update 4000: 2.03 bits per character
    update 6000: 1.86 bits per character
    AL Python on difter context. When as as a standard be first when the removed to the presentation to
"""

import argparse
import functools
from pathlib import Path
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

import streamgrad as sg

STREAMS, CHUNK = 16, 16
REFERENCE = " ".join(" ".join(topics.values()).split())  # it comes with Python: nothing is fetched


def read(path):
    """The alphabet of a text, and the text itself as numbers, in 16 pieces that are read at once."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace") if path else REFERENCE
    except OSError as error:
        raise SystemExit(f"{path} cannot be read: {error.strerror}.") from None
    if len(text) <= STREAMS * CHUNK or len(set(text)) < 2:
        raise SystemExit(f"{path} is too short: more than {STREAMS * CHUNK} characters are needed, not all the same.")
    alphabet, codes = np.unique(list(text), return_inverse=True)
    return alphabet, jnp.asarray(codes[: len(codes) // STREAMS * STREAMS].reshape(STREAMS, -1))


def main(arguments=None):
    """Read and learn, then write."""
    parser = argparse.ArgumentParser(description="A character model of a stream.")
    parser.add_argument("text", type=Path, nargs="?", help="a text file; by default Python's own reference")
    parser.add_argument("--updates", type=int, default=6000, help="at least 3")
    options = parser.parse_args(arguments)
    if options.updates < 3:
        parser.error("--updates must be at least 3: one in each of three parts.")
    alphabet, codes = read(options.text)
    one_hot = functools.partial(jax.nn.one_hot, num_classes=len(alphabet))
    # No unit of this cell reads another one's past, so that exact RTRL costs about what BPTT does.
    model = sg.Model(sg.cells.elstm(len(alphabet), 128), sg.heads.softmax(len(alphabet)))
    est, opt = sg.batched(sg.rtrl(model), STREAMS), optax.adam(5e-3)
    params = model.init(jax.random.key(0))
    rest = est.init(params), opt.init(params)

    def learn(carry, number):
        params, state, opt_state = carry
        seen = codes[:, (number * CHUNK + jnp.arange(CHUNK + 1)) % codes.shape[1]]  # after the end, the beginning
        chunk = sg.Chunk(inputs=one_hot(seen[:, :-1]), targets=seen[:, 1:])
        grads, state, info = est.update(params, state, chunk)  # rtrl is exact: it needs no key
        updates, opt_state = opt.update(grads, opt_state)
        return (optax.apply_updates(params, updates), state, opt_state), info.loss.mean()

    learn_many = jax.jit(functools.partial(jax.lax.scan, learn))
    for numbers in jnp.array_split(jnp.arange(options.updates), 3):
        (params, *rest), losses = learn_many((params, *rest), numbers)
        print(f"update {numbers[-1] + 1}: {losses.mean() / np.log(2):.2f} bits per character", flush=True)

    def write(now, key):
        output, state = model.run(params, now[0], one_hot(now[1])[None])
        code = jax.random.categorical(key, jnp.log(model.predict(params, output[0])) / 0.7)
        return (state, code), code

    start, keys = (model.init_state(params), codes[0, 0]), jax.random.split(jax.random.key(1), 100)
    print("".join(alphabet[jax.lax.scan(write, start, keys)[1]]))


if __name__ == "__main__":
    main()
