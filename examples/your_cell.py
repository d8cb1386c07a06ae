"""Your own Equinox cell, as it is, learns from a stream, and comes back trained, to be called as Equinox calls it.

The stream is one of bits; the cell recalls that of six steps ago, and learns after every three. 14 seconds of CPU time.

    $ python examples/your_cell.py
    update 300: loss 0.208, chance 0.693
    update 600: loss 0.001, chance 0.693
    update 900: loss 0.000, chance 0.693
    shown    110100111010001101110010
    recalled       110100111010001101
"""

import argparse

import jax
import jax.numpy as jnp
import optax

import streamgrad as sg

try:
    import equinox as eqx
except ImportError:
    raise SystemExit('this example needs equinox: pip install "streamgrad[equinox]"') from None

STREAMS, CHUNK, DELAY, HIDDEN = 16, 3, 6, 32


class Normed(eqx.Module):
    """A cell of your own: nothing in it knows of streamgrad."""

    weights: eqx.nn.Linear
    norm: eqx.nn.LayerNorm

    def __call__(self, x, h):
        """h_t from x_t and h_{t-1}."""
        return jnp.tanh(self.norm(self.weights(jnp.concatenate([x, h]))))


cell = Normed(eqx.nn.Linear(1 + HIDDEN, HIDDEN, key=jax.random.key(0)), eqx.nn.LayerNorm(HIDDEN))
adapted = sg.cells.from_equinox(cell, example_input=jnp.zeros(1), init_state=lambda: jnp.zeros(HIDDEN))
model = sg.Model(adapted, sg.heads.bernoulli(1))
est, opt = sg.batched(sg.rtrl(model), STREAMS), optax.chain(optax.clip_by_global_norm(1.0), optax.adam(4e-3))


def learn(carry, key):
    """Three steps of every stream, and an update."""
    params, state, opt_state, recent = carry
    bits = jax.random.bernoulli(key, 0.5, (STREAMS, CHUNK, 1)).astype(float)
    recent = jnp.concatenate([recent, bits], axis=1)
    grads, state, info = est.update(params, state, sg.Chunk(inputs=bits, targets=recent[:, :CHUNK]))
    updates, opt_state = opt.update(grads, opt_state)
    return (optax.apply_updates(params, updates), state, opt_state, recent[:, CHUNK:]), info.loss.mean()


def main(arguments=None):
    """Learn, then use the cell without streamgrad."""
    parser = argparse.ArgumentParser(description="Your own Equinox cell, trained on a stream.")
    parser.add_argument("--updates", type=int, default=900, help="at least 3")
    options = parser.parse_args(arguments)
    if options.updates < 3:
        parser.error("--updates must be at least 3: one in each of three parts.")
    params = model.init(jax.random.key(1))  # params.cell is the module's own
    rest = est.init(params), opt.init(params), jnp.zeros((STREAMS, DELAY, 1))
    learn_many = jax.jit(lambda carry, keys: jax.lax.scan(learn, carry, keys))
    keys = jax.random.split(jax.random.key(2), options.updates)
    for numbers in jnp.array_split(jnp.arange(options.updates), 3):
        (params, *rest), losses = learn_many((params, *rest), keys[numbers])
        print(f"update {numbers[-1] + 1}: loss {losses.mean():.3f}, chance {jnp.log(2):.3f}", flush=True)
    trained, h, recalled = eqx.combine(params.cell, cell), jnp.zeros(HIDDEN), ""
    shown = "110100111010001101110010"
    for bit in shown:
        h = trained(jnp.array([float(bit)]), h)
        recalled += "01"[int(model.predict(params, h)[0] > 0.5)]
    print(f"shown    {shown}\nrecalled {'':{DELAY}}{recalled[DELAY:]}")


if __name__ == "__main__":
    main()
