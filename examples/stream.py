"""A stream in `jax.lax.scan`, with optax, and checkpoints by orbax: killed and started again, it goes on.

A GRU recalls the bit of ten steps ago and learns after every four, so that the credit must reach beyond the chunk.
It takes 28 seconds of CPU time. With `sg.bptt` for `sg.rtrl`, by the same chunks, it ends at 0.660.

    $ python examples/stream.py --folder runs/stream
    update 1000: loss 0.524, chance 0.693
    update 2000: loss 0.263, chance 0.693
    update 3000: loss 0.077, chance 0.693
"""

import argparse
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import streamgrad as sg

try:
    import orbax.checkpoint as ocp
except ImportError:
    raise SystemExit('this example needs orbax: pip install "streamgrad[lab]"') from None

STREAMS, CHUNK, DELAY = 16, 4, 10
model = sg.Model(sg.cells.gru(n_in=1, n_hidden=32), sg.heads.bernoulli(1))
est, opt = sg.batched(sg.rtrl(model), STREAMS), optax.adam(4e-3)


def begin():
    """All that the stream needs to go on: a checkpoint is this, with the number of updates."""
    params = model.init(jax.random.key(0))
    return params, est.init(params), opt.init(params), jnp.zeros((STREAMS, DELAY, 1))


def learn(carry, number):
    """Four steps of every stream, and an update."""
    params, state, opt_state, recent = carry
    # A key by number, so that a stream that was stopped goes on with what it would have seen.
    bits_key, key = jax.random.split(jax.random.fold_in(jax.random.key(1), number))
    bits = jax.random.bernoulli(bits_key, 0.5, (STREAMS, CHUNK, 1)).astype(float)
    recent = jnp.concatenate([recent, bits], axis=1)
    grads, state, info = est.update(params, state, sg.Chunk(inputs=bits, targets=recent[:, :CHUNK]), key)
    updates, opt_state = opt.update(grads, opt_state)
    return (optax.apply_updates(params, updates), state, opt_state, recent[:, CHUNK:]), info.loss.mean()


learn_many = jax.jit(functools.partial(jax.lax.scan, learn))  # from one checkpoint to the next: one compiled program


def main(arguments=None):
    """Go on from the newest checkpoint, if there is one."""
    parser = argparse.ArgumentParser(description="A stream with checkpoints.")
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoints are")
    parser.add_argument("--updates", type=int, default=3000, help="in all, with those before a stop")
    parser.add_argument("--every", type=int, default=1000, help="updates between two checkpoints")
    options = parser.parse_args(arguments)
    if options.every < 1:
        parser.error("--every must be at least 1.")
    if options.folder.is_file():
        parser.error(f"--folder {options.folder} is a file: name a folder.")
    with ocp.CheckpointManager(options.folder.absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=2)) as saved:
        done, carry = saved.latest_step() or 0, begin()
        if done:
            carry = saved.restore(done, args=ocp.args.StandardRestore(carry))
            print(f"going on from update {done}", flush=True)
        for begun in range(done, options.updates, options.every):
            done = min(begun + options.every, options.updates)
            carry, losses = learn_many(carry, jnp.arange(begun, done))
            saved.save(done, args=ocp.args.StandardSave(carry))
            print(f"update {done}: loss {losses.mean():.3f}, chance {jnp.log(2):.3f}", flush=True)


if __name__ == "__main__":
    main()
