"""Where saturated SnAp of the package `braintrace` is RTRL, and where not: its gradients beside its own network's BPTT.

    python -m benchmarks.braintrace_exact          # a minute; needs the extra `peers`

SnAp of an order that spans the whole state keeps all of the influence, and so should be RTRL, which is exact. For its
vanilla, GRU and LSTM cells and for two vanilla layers, of 8 units with 3 inputs, one stream of 16 steps from a zero
state, the gradient of every parameter is compared with `brainstate.transform.grad` through the same steps of the same
network: ‖ĝ - g‖ / ‖g‖, and ĝ·g / ‖g‖², which is 1 for what is exact. Beside it stands `rtrl` of this library on its own
cells of the same kind, in chunks of one step, against its BPTT. Prints a table and writes `braintrace_exact.csv`.

Its documentation says that influence from one group of hidden states to another is not represented, which is what fails
with two layers. Under "single-step", the default of its SnAp, parameters that reach the loss past no hidden state, such
as the read-out's, have a gradient of zero.
"""

import argparse
import functools
import importlib.metadata
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import streamgrad as sg
from benchmarks.against_braintrace import load_peer
from streamgrad_lab.programs import walk
from streamgrad_lab.tables import write_rows

HIDDEN, INPUTS, OUTPUTS, LENGTH = 8, 3, 2, 16
NETWORKS = ("vanilla", "vanilla, two layers", "gru", "lstm")


def their_layers(braintrace: Any, network: str) -> list[Any]:
    """Its cells."""
    nn = braintrace.nn
    if network.startswith("vanilla"):
        sizes = (INPUTS, HIDDEN) if network.endswith("two layers") else (INPUTS,)
        return [nn.ValinaRNNCell(size, HIDDEN, activation="tanh") for size in sizes]
    return [{"gru": nn.GRUCell, "lstm": nn.LSTMCell}[network](INPUTS, HIDDEN)]


def our_cell(network: str) -> sg.Cell:
    """Ours of the same kind."""
    if network.startswith("vanilla"):
        first, second = sg.cells.vanilla(INPUTS, HIDDEN), sg.cells.vanilla(HIDDEN, HIDDEN)
        return sg.cells.stack(first, second) if network.endswith("two layers") else first
    return {"gru": sg.cells.gru, "lstm": sg.cells.lstm}[network](INPUTS, HIDDEN)


def data() -> tuple[jax.Array, jax.Array]:
    """Inputs and targets of one stream."""
    keys = jax.random.split(jax.random.key(0))
    return jax.random.normal(keys[0], (LENGTH, INPUTS)), jax.random.normal(keys[1], (LENGTH, OUTPUTS))


def theirs(network: str, method: str) -> Iterator[dict[str, Any]]:
    """A row for each of its parameters."""
    brainstate, braintrace = load_peer()
    inputs, targets = (leaf[:, None] for leaf in data())

    class Net(brainstate.nn.Module):
        """Layers and a linear read-out."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = their_layers(braintrace, network)
            self.out = brainstate.nn.Linear(HIDDEN, OUTPUTS)

        def update(self, x: Any) -> Any:
            """The output."""
            for layer in self.layers:
                x = layer(x)
            return self.out(x)

    brainstate.random.seed(0)
    net = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it keeps all of the influence, which is what is asked for
        learner = braintrace.compile(net, braintrace.SnAp, inputs[0], batch_size=1, n=HIDDEN, vjp_method=method)
        weights = net.states(brainstate.ParamState)
        found = learner.etrace_grad(
            inputs,
            targets,
            step_fn=lambda x, target: 0.5 * jnp.sum((learner(x) - target) ** 2),
            weights=weights,
            reduction="sum",
        )

    def total() -> Any:
        brainstate.nn.init_all_states(net, batch_size=1)
        return sum(0.5 * jnp.sum((net(x) - target) ** 2) for x, target in zip(inputs, targets, strict=True))

    exact = brainstate.transform.grad(total, weights)()
    for path in exact:
        name = ".".join(map(str, path if isinstance(path, tuple) else (path,)))
        for leaf in exact[path]:
            yield compared(
                "braintrace", network, f"SnAp, {method}", f"{name}.{leaf}", found[path][leaf], exact[path][leaf]
            )


def ours(network: str) -> Iterator[dict[str, Any]]:
    """A row for each of our parameters."""
    model = sg.Model(our_cell(network), sg.heads.squared_error(OUTPUTS))
    params = model.init(jax.random.key(1))
    many = sg.Chunk(*(leaf[None] for leaf in data()))
    rtrl, bptt = (sg.batched(make(model), 1) for make in (sg.rtrl, sg.bptt))
    exact = bptt.update(params, bptt.init(params), many, None)[0]
    run = jax.jit(functools.partial(walk, rtrl, chunk_length=1))
    found = run(params, rtrl.init(params), many, key=jax.random.key(2))[0]
    for (path, want), got in zip(jax.tree_util.tree_leaves_with_path(exact), jax.tree.leaves(found), strict=True):
        yield compared("streamgrad", network, "rtrl", jax.tree_util.keystr(path).strip("."), got, want)


def compared(library: str, network: str, method: str, parameter: str, got: Any, want: Any) -> dict[str, Any]:
    """A row."""
    found, exact = np.asarray(got, np.float64), np.asarray(want, np.float64)
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    along = np.sum(found * exact) / np.sum(exact**2)
    row = {"library": library, "network": network, "method": method, "parameter": parameter}
    return row | {"relative_error": f"{error:.1e}", "along": f"{along:.4f}"}


def main() -> None:
    """Compare and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    load_peer()
    versions = {name: importlib.metadata.version(name) for name in ("jax", "brainstate", "braintrace")}
    rows = []
    for network in NETWORKS:
        rows += ours(network)
        for method in ("single-step", "multi-step"):
            rows += theirs(network, method)
    for row in rows:
        print(f"{row['library']:10s}  {row['network']:19s}  {row['method']:17s}  {row['parameter']:24s}", end="  ")
        print(f"{row['relative_error']}  {row['along']}")
    write_rows(arguments.out / "braintrace_exact.csv", [row | versions for row in rows])
    print(f"written: {arguments.out / 'braintrace_exact.csv'}")


if __name__ == "__main__":
    main()
