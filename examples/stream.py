"""A stream without an end, in `jax.lax.scan`, with checkpoints: killed and started again, it goes on as if never stopped.

A GRU recalls the bit of ten steps ago and learns after every four, so that the credit must reach beyond the chunk.

    $ python examples/stream.py --folder /tmp/stream
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import streamgrad as sg

try:
    import orbax.checkpoint as ocp
except ImportError:
    raise SystemExit('this example needs orbax: pip install "streamgrad[cli]"') from None

STREAMS, CHUNK, DELAY = 16, 4, 10

model = sg.Model(sg.cells.gru(n_in=1, n_hidden=32), sg.heads.bernoulli(1))
est, opt = sg.batched(sg.rtrl(model), STREAMS), optax.adam(4e-3)


def begin():
    """All that the stream needs to go on: a checkpoint is this tree, and nothing else."""
    params = model.init(jax.random.key(0))
    return params, est.init(params), opt.init(params), jnp.zeros((STREAMS, DELAY, 1))


def learn(carry, number):
    """One update: four steps of every stream."""
    params, state, opt_state, recent = carry
    # The key comes from the number of the update, so that a stream that goes on sees what it would have seen.
    bits_key, key = jax.random.split(jax.random.fold_in(jax.random.key(1), number))
    bits = jax.random.bernoulli(bits_key, 0.5, (STREAMS, CHUNK, 1)).astype(float)
    recent = jnp.concatenate([recent, bits], axis=1)
    grads, state, info = est.update(params, state, sg.Chunk(inputs=bits, targets=recent[:, :CHUNK]), key)
    updates, opt_state = opt.update(grads, opt_state)
    return (optax.apply_updates(params, updates), state, opt_state, recent[:, CHUNK:]), info.loss.mean()


@jax.jit
def learn_many(carry, numbers):
    """Updates by number, in one program: Python is back only for the checkpoint."""
    carry, losses = jax.lax.scan(learn, carry, numbers)
    return carry, losses.mean()


def main(arguments: Sequence[str] | None = None) -> None:
    """Learn, save, print."""
    parser = argparse.ArgumentParser(description="A stream with checkpoints.")
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoints are")
    parser.add_argument("--updates", type=int, default=3000, help="in all, with those before it was stopped")
    parser.add_argument("--every", type=int, default=500, help="updates between checkpoints")
    options = parser.parse_args(arguments)
    with ocp.CheckpointManager(options.folder.absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=2)) as saved:
        done, carry = saved.latest_step() or 0, begin()
        if done:
            carry = saved.restore(done, args=ocp.args.StandardRestore(carry))
            print(f"going on from update {done}")
        for number in range(done, options.updates, options.every):
            carry, loss = learn_many(carry, jnp.arange(number, number + options.every))
            saved.save(number + options.every, args=ocp.args.StandardSave(carry))
            print(f"update {number + options.every}: loss {loss:.3f}, chance {jnp.log(2):.3f}")


if __name__ == "__main__":
    main()
