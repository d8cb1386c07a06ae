"""98-step MNIST with four layers of linear recurrent units: test accuracy beside published numbers, on one GPU.

    python -m benchmarks.pixels --data FOLDER                                   # BPTT, as published
    python -m benchmarks.pixels --data FOLDER --estimator rtrl --chunk 14       # exact, with 14 steps in memory
    python -m benchmarks.pixels --data FOLDER --estimator bptt --chunk 1        # credit through the layers alone
    python -m benchmarks.pixels --preset smoke                                  # toy sizes, made-up images, any machine

Published (Zucchet, Pourcel and Ernoult, Forward propagation of errors through time, 2026), 4 layers of 32 units: BPTT
98.30 %, errors propagated forwards 98.19 %, spatial backpropagation 96.55 %. RTRL is missing there.

Their protocol, which is the default here, as far as text and code tell it. The mean of every 8 pixels, of 0 to 255, is
one input: 98 steps. A layer is a linear recurrent unit (complex diagonal, moduli drawn from [r_min, 1], any phase), its
real read-out, a layer norm, and a perceptron with 4 times as many rectified units; there are no skip connections. The
last perceptron gives logits. The prediction at a step is the mean of all logits so far, and its gradient goes through
the logits of that step alone. The loss is the cross entropy averaged over all steps, and accuracy is that of the last.
AdamW with decay 0.01 but on the recurrence, batches of 64, rates of 1e-4 to 1e-2 that fall to 0 as a cosine, gradients
clipped at norm 1, 1e6 images (17 epochs), the best of r_min in {0.9, 0.99} and of the rate, 3 seeds. There "spatial"
also leaves the recurrence's own λ as it began: `--estimator bptt --chunk 1 --freeze nu theta`.

Estimators see a sequence in chunks of `--chunk` steps (all 98 by default), and one update is made with the sum of their
gradients at its end, or with `--update chunk` one after each chunk. All rates and seeds train at once, in one program
(`vmap`); an epoch is one call. Prints a line for each epoch, and adds a row for each rate and seed to `pixels.csv`.
With `--state FILE` a run that was stopped goes on after the last epoch that it ended.
Needs jax, numpy, optax and this repository alone.
"""

import argparse
import ast
import functools
import io
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import streamgrad as sg
from benchmarks.pixels_model import RECURRENT, make_model
from streamgrad.estimators.registry import REGISTRY, find_estimator
from streamgrad_lab.files import replace_bytes
from streamgrad_lab.tables import read_columns, write_rows
from streamgrad_lab.tasks.mnist import FILES, data_folder, find_file, read_idx

SAID = ("preset", "estimator", "options", "chunk", "update", "loss", "block", "layers", "width", "r_min", "batch")
SAID += ("epochs", "recurrent_rate", "decay", "watched", "freeze")  # options that are written down
SMOKE = {"layers": 2, "width": 4, "epochs": 2, "batch": 16, "pool": 56, "rates": [3e-3], "seeds": 2}


class Digits(NamedTuple):
    """Sequences and their labels."""

    inputs: jax.Array
    labels: jax.Array


def read_digits(folder: Path | None, split: str, pool: int) -> Digits:
    """MNIST with every `pool` pixels averaged, `[digits, steps, 1]`."""
    where = data_folder(folder)
    images, labels = (read_idx(find_file(where, FILES[split, p]), FILES[split, p]) for p in ("images", "labels"))
    return averaged(images, labels, pool)


def make_digits(count: int, seed: int, pool: int) -> Digits:
    """Images in which a bright row says which digit it is."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, count)
    images = rng.integers(0, 60, (count, 28, 28))
    images[np.arange(count), 4 + 2 * labels] += 190
    return averaged(images, labels, pool)


def averaged(images: np.ndarray, labels: np.ndarray, pool: int) -> Digits:
    """Sequences of means over `pool` pixels, between 0 and 255."""
    if 784 % pool:
        raise SystemExit(f"--pool {pool} must divide the 784 pixels of an image.")
    means = images.reshape(len(images), 784 // pool, pool).mean(axis=2, dtype=np.float32)
    return Digits(jnp.asarray(means[..., None]), jnp.asarray(labels, jnp.int32))


def whole_gradient(
    est: sg.GradientEstimator, params: sg.Params, state: Any, many: sg.Chunk, size: int, key: jax.Array
) -> tuple[sg.Params, Any]:
    """The sum of the gradients of a batch's chunks, and the state at the end."""
    parts, keys = chunks_of(many, size), jax.random.split(key, many.targets.shape[1] // size)
    if len(keys) == 1:
        grads, state, _ = est.update(params, state, many, keys[0])
        return grads, state

    def step(carry: tuple, now: tuple) -> tuple[tuple, None]:
        total, state = carry
        grads, state, _ = est.update(params, state, *now)
        return (jax.tree.map(jnp.add, total, grads), state), None

    return jax.lax.scan(step, (jax.tree.map(jnp.zeros_like, params), state), (parts, keys))[0]


def chunks_of(many: sg.Chunk, size: int) -> sg.Chunk:
    """`[streams, time, …]` to `[chunks, streams, size, …]`."""

    def cut(leaf: jax.Array) -> jax.Array:
        return jnp.swapaxes(leaf.reshape(len(leaf), -1, size, *leaf.shape[2:]), 0, 1)

    return jax.tree.map(cut, many)


class Trainer(NamedTuple):
    """How one rate and seed is trained; all its functions can be mapped over.

    Attributes:
      begin: `begin(key) -> carry`.
      epoch: `epoch(carry, rate, key, digits) -> carry`, one pass through all digits.
      test: `test(params, digits) -> (loss, accuracy)`.
    """

    begin: Callable[[jax.Array], tuple]
    epoch: Callable[[tuple, jax.Array, jax.Array, Digits], tuple]
    test: Callable[[sg.Params, Digits], tuple[jax.Array, jax.Array]]


def make_trainer(model: sg.Model, est: sg.GradientEstimator, options: argparse.Namespace, updates: int) -> Trainer:
    """The parts of training; `updates` is how many there will be, for the rate to end at zero."""
    batch, size = options.batch, options.chunk

    def optimizer(rate: Any) -> optax.GradientTransformation:
        def schedule(count: Any) -> Any:
            return rate * 0.5 * (1 + jnp.cos(jnp.pi * jnp.minimum(count / updates, 1.0)))

        adam = optax.adamw(schedule, weight_decay=options.decay, mask=lambda tree: named(tree, not_recurrent))
        return optax.chain(optax.clip_by_global_norm(1.0), adam)

    def factor(name: str) -> float:
        return 0.0 if name in options.freeze else options.recurrent_rate if name in RECURRENT else 1.0

    def move(rate: Any, grads: sg.Params, opt_state: Any, params: sg.Params) -> tuple[Any, Any]:
        change, opt_state = optimizer(rate).update(grads, opt_state, params)
        change = jax.tree.map(lambda c, f: c * f, change, named(params, factor))
        return optax.apply_updates(params, change), opt_state

    def batch_of(digits: Digits, chosen: jax.Array) -> sg.Chunk:
        inputs, length = digits.inputs[chosen], digits.inputs.shape[1]
        targets = jnp.broadcast_to(digits.labels[chosen][:, None], (batch, length))
        first, last = jnp.arange(length) == 0, jnp.arange(length) == length - 1
        weight = jnp.where(last, 1.0, 0.0) if options.loss == "last" else jnp.full(length, 1.0 / length)
        reset, weight = (jnp.broadcast_to(leaf[None], (batch, length)) for leaf in (first, weight))
        return sg.Chunk(inputs, targets, reset, weight)

    def begin(key: jax.Array) -> tuple:
        params = model.init(key)
        return params, est.init(params), optimizer(0.0).init(params)

    def by_sequence(carry: tuple, rate: Any, many: sg.Chunk, key: jax.Array) -> tuple:
        params, state, opt_state = carry
        grads, state = whole_gradient(est, params, state, many, size, key)
        params, opt_state = move(rate, grads, opt_state, params)
        return params, state, opt_state

    def by_chunk(carry: tuple, rate: Any, many: sg.Chunk, key: jax.Array) -> tuple:
        def step(carry: tuple, now: tuple) -> tuple[tuple, None]:
            return by_sequence(carry, rate, *now), None

        parts = chunks_of(many, size)
        return jax.lax.scan(step, carry, (parts, jax.random.split(key, len(parts.targets))))[0]

    def epoch(carry: tuple, rate: Any, key: jax.Array, digits: Digits) -> tuple:
        count = len(digits.labels) // batch
        order = jax.random.permutation(key, len(digits.labels))[: count * batch].reshape(count, batch)
        learn = by_chunk if options.update == "chunk" else by_sequence

        def step(carry: tuple, now: tuple) -> tuple[tuple, None]:
            chosen, key = now
            return learn(carry, rate, batch_of(digits, chosen), key), None

        return jax.lax.scan(step, carry, (order, jax.random.split(jax.random.fold_in(key, 1), count)))[0]

    def test(params: sg.Params, digits: Digits) -> tuple[jax.Array, jax.Array]:
        def one(now: tuple) -> tuple[jax.Array, jax.Array]:
            xs, label = now
            logits, _ = model.run(params, model.init_state(params), xs)
            losses = -jax.nn.log_softmax(logits)[:, label]
            return jnp.mean(losses), jnp.argmax(logits[-1]) == label

        losses, right = jax.lax.map(one, tuple(digits), batch_size=min(2000, len(digits.labels)))
        return jnp.mean(losses), jnp.mean(right)

    return Trainer(begin, epoch, test)


def named(tree: Any, of: Callable[[str], Any]) -> Any:
    """A tree of what a function says of each parameter's name."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: of(str(getattr(path[-1], "key", path[-1]))), tree)


def not_recurrent(name: str) -> bool:
    """Whether a parameter decays."""
    return name not in RECURRENT


def train(options: argparse.Namespace, digits: Digits, held_out: Digits) -> Iterator[list[dict[str, Any]]]:
    """Train all rates and seeds at once; after each epoch, a row for each of them."""
    length = digits.inputs.shape[1]
    options.chunk = options.chunk or length
    if length % options.chunk:
        raise SystemExit(f"--chunk {options.chunk} must divide the {length} steps of a sequence.")
    model = make_model(options.layers, options.width, options.r_min, options.block)
    row = find_estimator(options.estimator)
    one = row.make(model, **{**row.options, **dict(map(as_option, options.options))})
    est = sg.batched(one, options.batch, **({} if options.watched is None else {"watched": options.watched}))
    each = length // options.chunk if options.update == "chunk" else 1
    updates = options.epochs * each * (len(digits.labels) // options.batch)
    trainer = make_trainer(model, est, options, updates)
    pairs = list(itertools.product(options.rates, range(options.seeds)))
    rates = jnp.array([rate for rate, _ in pairs])
    keys = jnp.stack([jax.random.key(seed) for _, seed in pairs])
    carry = jax.jit(jax.vmap(trainer.begin))(keys)
    epoch = jax.jit(jax.vmap(trainer.epoch, in_axes=(0, 0, 0, None)), donate_argnums=0)
    test = jax.jit(jax.vmap(trainer.test, in_axes=(0, None)))
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(tree)) // len(pairs) for tree in carry[:2]]
    print(f"{row.name}: {sizes[0]} parameters, {sizes[1]} numbers of state in {options.batch} streams", flush=True)
    said = {name: getattr(options, name) for name in SAID}
    said |= {"options": " ".join(options.options), "freeze": " ".join(options.freeze), "watched": options.watched or ""}
    said |= {"digits": len(digits.labels), "device": jax.devices()[0].device_kind, "jax": jax.__version__}
    carry, done, spent = go_on(options.state, carry)
    start = time.perf_counter() - spent
    for number in range(done + 1, options.epochs + 1):
        carry = epoch(carry, rates, jax.vmap(functools.partial(jax.random.fold_in, data=number))(keys), digits)
        losses, right = (np.asarray(values) for values in test(carry[0], held_out))
        seconds = time.perf_counter() - start
        told = "  ".join(f"{rate:g}/{seed} {100 * r:.2f} %" for (rate, seed), r in zip(pairs, right, strict=True))
        print(f"epoch {number:3d}  {seconds:7.1f} s  {told}", flush=True)
        if options.state is not None:
            keep(options.state, carry, number, seconds)
        so_far = {"done": number, "seconds": round(seconds, 1), "together": len(pairs)}
        yield [
            {**said, "rate": rate, "seed": seed, "test_loss": f"{loss:.4f}", "test_accuracy": f"{r:.4f}", **so_far}
            for (rate, seed), loss, r in zip(pairs, losses, right, strict=True)
        ]


def lasting(carry: tuple) -> tuple:
    """What outlives a sequence, at whose beginning everything that belongs to a stream begins anew."""
    params, state, opt_state = carry
    return params, state.shared, opt_state


def keep(path: Path, carry: tuple, done: int, seconds: float) -> None:
    """Write what a run needs to go on; a file that is there is complete."""
    file = io.BytesIO()
    np.savez(file, *jax.device_get(jax.tree.leaves(lasting(carry))), done=done, seconds=seconds)
    replace_bytes(path, file.getvalue())


def go_on(path: Path | None, carry: tuple) -> tuple[tuple, int, float]:
    """What `keep` has written, if anything: the state, the epochs that are done, and the seconds they took."""
    if path is None or not path.exists():
        return carry, 0, 0.0
    leaves, structure = jax.tree.flatten(lasting(carry))
    with np.load(path) as found:
        kept = [jnp.asarray(found[f"arr_{i}"], leaf.dtype) for i, leaf in enumerate(leaves)]
        done, seconds = int(found["done"]), float(found["seconds"])
    if [leaf.shape for leaf in kept] != [leaf.shape for leaf in leaves]:
        raise SystemExit(f"{path} is the state of another run.")
    params, shared, opt_state = jax.tree.unflatten(structure, kept)
    return (params, carry[1]._replace(shared=shared), opt_state), done, seconds


def as_option(text: str) -> tuple[str, Any]:
    """An option and its value: a number, None, or else a word.

    Example:
      >>> as_option("rank=4"), as_option("inside=backprop")
      (('rank', 4), ('inside', 'backprop'))
    """
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def read(path: Path) -> list[dict[str, Any]]:
    """The rows that are there."""
    if not path.exists():
        return []
    columns = read_columns(path)
    return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows, of which some may have been written when there were fewer columns."""
    names = dict.fromkeys(name for row in rows for name in row)
    write_rows(path, [{name: row.get(name, "") for name in names} for row in rows])


def read_options() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=("published", "smoke"), default="published")
    parser.add_argument("--data", type=Path, help="the folder of MNIST's four files; STREAMGRAD_DATA by default")
    parser.add_argument("--digits", type=int, help="train on so many digits, for a short run; all by default")
    parser.add_argument("--estimator", default="bptt", choices=sorted(REGISTRY), metavar="NAME")
    parser.add_argument("--options", nargs="*", default=[], metavar="NAME=VALUE", help="of the estimator")
    parser.add_argument("--chunk", type=int, help="steps of a chunk, a divisor of the sequence; all by default")
    parser.add_argument("--update", choices=("sequence", "chunk"), default="sequence", help="when parameters change")
    parser.add_argument("--loss", choices=("every", "last"), default="every", help="the steps that have a loss")
    parser.add_argument("--block", choices=("mlp", "glu"), default="mlp", help="glu: gated, with a skip connection")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--pool", type=int, default=8, help="pixels that are averaged to one input")
    parser.add_argument("--r-min", type=float, default=0.9)
    parser.add_argument("--epochs", type=int, default=17)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--watched", type=int, help="how many streams of a batch the older credit is taken from")
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-3])
    parser.add_argument("--recurrent-rate", type=float, default=1.0, help="the recurrence's, in multiples of the rate")
    parser.add_argument("--decay", type=float, default=0.01)
    parser.add_argument("--freeze", nargs="*", default=[], help="names of parameters that stay, such as nu theta")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--state", type=Path, help="where a run that may be stopped keeps what it needs to go on")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    if parser.parse_known_args()[0].preset == "smoke":
        parser.set_defaults(**SMOKE)
    return parser.parse_args()


def main() -> None:
    """Train and write."""
    options = read_options()
    if options.preset == "smoke" and options.data is None:
        digits, held_out = make_digits(512, 0, options.pool), make_digits(128, 1, options.pool)
    else:
        digits, held_out = (read_digits(options.data, split, options.pool) for split in ("train", "test"))
    digits = jax.tree.map(lambda leaf: leaf[: options.digits], digits)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {len(digits.labels)} digits", flush=True)
    path = options.out / "pixels.csv"
    old = read(path)
    for rows in train(options, digits, held_out):
        write(path, [*old, *rows])  # after each epoch: a run that is stopped has not run for nothing
    print(f"written: {path}")


if __name__ == "__main__":
    main()
