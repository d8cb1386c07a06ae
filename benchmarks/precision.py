"""How far rounding moves a gradient: every matrix product with operands in TF32, as a GPU has them by default.

    python -m benchmarks.precision                  # a few minutes on two cores
    python -m benchmarks.precision --bits 7         # bfloat16

The stack of `benchmarks.pixels`, 4 layers of 32, on random images of 98 steps, untrained, on any device: the operands
of each product in the program, also inside loops, are rounded to so many bits before it is taken in float32.
Prints the error of `bptt` and of `rtrl` by chunks of 49 against the gradient in float64, and how far they are from one
another; writes `precision.csv`.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.flatten_util import ravel_pytree

import streamgrad as sg
from benchmarks.pixels import whole_gradient
from benchmarks.pixels_model import CLASSES, make_model
from streamgrad_lab.tables import write_rows

STEPS, LAYERS, WIDTH = 98, 4, 32


def rounded(closed: core.ClosedJaxpr, bits: int) -> Callable[..., list[jax.Array]]:
    """The program with the operands of its matrix products rounded to `bits` of mantissa."""

    def run(*arguments: jax.Array) -> list[jax.Array]:
        jaxpr = closed.jaxpr
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *arguments], strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else values[atom]

        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            if eqn.primitive is core.primitives.dot_general_p:
                operands = [jax.lax.reduce_precision(x, 8, bits) if x.dtype == jnp.float32 else x for x in operands]
            params = {name: _rewritten(value, bits) for name, value in eqn.params.items()}
            if "call_jaxpr" in params:  # a custom derivative, which is not taken any more
                found = core.jaxpr_as_fun(params["call_jaxpr"])(*operands)
            else:
                found = eqn.primitive.bind(*operands, **params)
            values.update(zip(eqn.outvars, found if eqn.primitive.multiple_results else [found], strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    return run


def _rewritten(value: Any, bits: int) -> Any:
    """Programs among an operation's parameters, such as the body of a loop, likewise."""
    if isinstance(value, tuple) and value and all(isinstance(each, core.ClosedJaxpr) for each in value):
        return tuple(_rewritten(each, bits) for each in value)
    if not isinstance(value, core.ClosedJaxpr):
        return value
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in value.in_avals]
    return jax.make_jaxpr(rounded(value, bits))(*shapes)


def random_images(batch: int, seed: int, dtype: Any) -> sg.Chunk:
    """Pixels between 0 and 1, a class for each image, a loss at every step."""
    rng = np.random.default_rng(seed)
    inputs = np.clip(rng.normal(0.3, 0.4, size=(batch, STEPS, 1)), 0, 1)
    targets = np.repeat(rng.integers(0, CLASSES, size=(batch, 1)), STEPS, axis=1)
    reset = np.repeat((np.arange(STEPS) == 0)[None], batch, axis=0)
    weight = jnp.full((batch, STEPS), 1 / STEPS, dtype)
    return sg.Chunk(jnp.asarray(inputs, dtype), jnp.asarray(targets), jnp.asarray(reset), weight)


def gradient(model: sg.Model, name: str, size: int, params: sg.Params, many: sg.Chunk, bits: int | None) -> np.ndarray:
    """The gradient of a batch by chunks of `size`, as one vector; nothing is rounded if `bits` is None."""
    est = sg.batched(getattr(sg, name)(model), len(many.targets))
    arguments, tree = jax.tree.flatten((params, est.init(params), many))

    def whole(*leaves: jax.Array) -> jax.Array:
        params, state, many = jax.tree.unflatten(tree, leaves)
        return ravel_pytree(whole_gradient(est, params, state, many, size, jax.random.key(0))[0])[0]

    if bits is None:
        return np.asarray(jax.jit(whole)(*arguments))
    return np.asarray(jax.jit(rounded(jax.make_jaxpr(whole)(*arguments), bits))(*arguments)[0])


def main(argv: Sequence[str] | None = None) -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, default=10, help="of mantissa: 10 for TF32, 7 for bfloat16")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--chunk", type=int, default=49, help="of rtrl")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(argv)
    jax.config.update("jax_enable_x64", True)
    model, rows = make_model(LAYERS, WIDTH, r_min=0.9), []
    for seed in range(options.seeds):
        single = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), model.init(jax.random.key(seed)))
        double = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), single)
        images = {dtype: random_images(options.batch, seed, dtype) for dtype in (jnp.float32, jnp.float64)}
        exact = gradient(model, "bptt", STEPS, double, images[jnp.float64], None)
        for bits in (None, options.bits):
            found = {
                name: gradient(model, name, size, single, images[jnp.float32], bits)
                for name, size in (("bptt", STEPS), ("rtrl", options.chunk))
            }
            off = {
                f"{name}_error": float(np.linalg.norm(x - exact) / np.linalg.norm(exact)) for name, x in found.items()
            }
            apart = float(np.linalg.norm(found["rtrl"] - found["bptt"]) / np.linalg.norm(exact))
            row = {"seed": seed, "bits": bits or 23, **off, "rtrl_from_bptt": apart}
            rows.append(row)
            print("  ".join(f"{k} {x:.3g}" for k, x in row.items()), flush=True)
    write_rows(options.out / "precision.csv", rows, digits=3)


if __name__ == "__main__":
    main()
