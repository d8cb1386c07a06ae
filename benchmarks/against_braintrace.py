"""UORO here and in the package `braintrace`: time per step and error of the gradient, in the same run.

    python -m benchmarks.against_braintrace

Both train the same vanilla tanh network (32 inputs, 10 classes, a softmax) with the same float32 parameters on the same
random data. Prints a table and writes `benchmarks/results/against_braintrace.csv`. On the CPU.

Times are those of one chunk of 64 steps in one compiled loop, over 64, medians over rounds in which all take turns.
The error is E‖ĝ - g‖² / ‖g‖² over the cell's weights, with g from BPTT over a whole episode of 16 steps that begins at
a zero state, and E a mean over keys. The table also prints, as `along`, the mean of ĝ·g / ‖g‖² with its standard error,
which is 1 for an unbiased estimator, and, as `head`, ‖ĝ - g‖ / ‖g‖ of the head's weights, exact if all is well
(under "single-step" braintrace 0.2.6 returns zero for them).

How `braintrace` is driven: `braintrace.compile(model, "uoro", ...)` and then `etrace_grad`, its driver of a sequence.
It injects noise at the state and not at the preactivations. With "single-step" it computes what `uoro, cut state` does
here; its default, "multi-step", backpropagates the current step and estimates the past, as `immediate exact` does.
It takes a batch in two ways, and both are shown:

- "vmap": `compile(..., vmap=True)`, a rank-one estimate for each stream. As it comes, all streams draw the same noise;
  "own keys" gives each its own, by writing the learner's state. `mappable` below is what it takes to run this at all
  with brainstate 0.5.4.
- "batched": `compile(..., batch_size=B)`, the batch inside the model, one rank-one estimate for all streams together.
  "windows of 8" is its window mode, which backpropagates through each window and estimates only what came before it;
  that is for a batched model alone.
"""

import argparse
import importlib.metadata
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import streamgrad as sg
from benchmarks.problems import LEAST_SECONDS, make_problem
from streamgrad_lab.tables import write_rows
from streamgrad_lab.timing import prepare, take_turns

LENGTH, EPISODE = 64, 16
OURS: dict[str, dict[str, Any]] = {
    "uoro": {},
    "uoro, cut state": {"cut": "state"},
    "uoro, cut state, immediate exact": {"cut": "state", "immediate": "exact"},
}


class Drive(NamedTuple):
    """How `braintrace` is driven.

    Attributes:
      vmap: whether streams are mapped over, or are a batch inside the model.
      vjp_method: its option of that name.
      window: its `chunk_size`, None for step by step.
      own_keys: whether each stream draws its own noise.
      algorithm: the name of its class.
      options: of that class.
    """

    vmap: bool
    vjp_method: str = "multi-step"
    window: int | None = None
    own_keys: bool = False
    algorithm: str = "UORO"
    options: Mapping[str, Any] = MappingProxyType({})


THEIRS = {
    "uoro, vmap": Drive(vmap=True),
    "uoro, vmap, own keys": Drive(vmap=True, own_keys=True),
    "uoro, vmap, own keys, single-step": Drive(vmap=True, vjp_method="single-step", own_keys=True),
    "uoro, batched": Drive(vmap=False),
    "uoro, batched, windows of 8": Drive(vmap=False, window=8),
}


class Peer(NamedTuple):
    """A learner of `braintrace` as a pure function.

    Attributes:
      update: `update(values) -> (values, (grads, losses))`, one compiled pass over a chunk; donates `values`.
      values: `values(key) -> values`, those of all its states at the beginning of an episode.
    """

    update: Callable[[list], tuple[list, tuple[Any, Any]]]
    values: Callable[[Any], list]


def load_peer() -> tuple[Any, Any]:
    """The modules `brainstate` and `braintrace`."""
    try:
        import brainstate
        import braintrace
    except ImportError as error:
        raise SystemExit("This needs the package braintrace: pip install 'streamgrad[peers]'.") from error
    return brainstate, braintrace


def mappable(braintrace: Any) -> Any:
    """Its UORO with the noise's key kept as numbers, since `vmap=True` cannot map over a state that is a typed key."""

    class Mappable(braintrace.UORO):
        """The same estimator."""

        def _initial_projection_key(self) -> Any:
            return jax.random.key_data(super()._initial_projection_key())

        def _get_etrace_data(self) -> dict[str, Any]:
            data = super()._get_etrace_data()
            return data | {"key": jax.random.wrap_key_data(data["key"])}

        def _assign_etrace_data(self, values: dict[str, Any]) -> None:
            super()._assign_etrace_data(values | {"key": jax.random.key_data(values["key"])})

    return Mappable


def make_peer(params: sg.Params, chunk: sg.Chunk, drive: Drive) -> Peer:
    """Its vanilla cell and a linear read-out, with the values of `params`, under one of its algorithms."""
    brainstate, braintrace = load_peer()
    w, head = params.cell["w"], params.head
    streams, _, n_in = chunk.inputs.shape
    hidden, n_classes = len(w), len(head["b"])

    class Net(brainstate.nn.Module):
        """The same network: h_t = tanh(W (x_t, h_{t-1}) + b), logits = V h_t + c."""

        def __init__(self) -> None:
            super().__init__()
            self.cell = braintrace.nn.ValinaRNNCell(n_in, hidden, activation="tanh")
            self.out = brainstate.nn.Linear(hidden, n_classes)

        def update(self, x: Any) -> Any:
            """Logits."""
            return self.out(self.cell(x))

    net = Net()
    net.cell.W.weight.value = {
        "weight": jnp.concatenate([w[:, hidden : hidden + n_in].T, w[:, :hidden].T]),
        "bias": w[:, -1],
    }
    net.out.weight.value = {"weight": head["w"].T, "bias": head["b"]}
    inputs, targets = jnp.swapaxes(chunk.inputs, 0, 1), jnp.swapaxes(chunk.targets, 0, 1)
    noisy = drive.algorithm == "UORO"
    algorithm = mappable(braintrace) if noisy and drive.vmap else getattr(braintrace, drive.algorithm)
    options = {"batch_size": streams, "vmap": drive.vmap, "vjp_method": drive.vjp_method, **drive.options}
    learner = braintrace.compile(net, algorithm, inputs[0], **options)
    rng = (learner.module if drive.vmap else learner).projection_rng if noisy else None
    weights = {"cell": net.cell.W.weight, "head": net.out.weight}

    def loss(x: Any, target: Any) -> Any:
        logits = learner(x if drive.window is None else braintrace.MultiStepData(x))
        log_p = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(log_p, target[..., None], axis=-1)[..., 0], axis=-1)

    def run(inputs: Any, targets: Any) -> Any:
        return learner.etrace_grad(
            inputs, targets, step_fn=loss, chunk_size=drive.window, weights=weights, reduction="sum", return_value=True
        )

    function = brainstate.transform.StatefulFunction(run)
    states = function.get_states(inputs, targets)

    def update(values: list, inputs: Any, targets: Any) -> tuple[list, Any]:
        changed, out = function.jaxpr_call(values, inputs, targets)  # None for a state that is only read
        return [old if new is None else new for old, new in zip(values, changed, strict=True)], out

    compiled = jax.jit(update, donate_argnums=0)

    def values(key: Any) -> list:
        noise = key
        if drive.vmap:
            keys = jax.random.split(key, streams) if drive.own_keys else jnp.broadcast_to(key, (streams,))
            noise = jax.random.key_data(keys)
        own = [noise if state is rng else state.value for state in states]
        return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), own)

    return Peer(lambda values: compiled(values, inputs, targets), values)


def theirs_as_ours(grads: dict[str, Any], hidden: int) -> sg.Params:
    """Its gradient in the layout of `sg.cells.vanilla` and `sg.heads.softmax`."""
    w, b = np.asarray(grads["cell"]["weight"]), np.asarray(grads["cell"]["bias"])
    cell = np.concatenate([w[-hidden:].T, w[:-hidden].T, b[:, None]], axis=1)
    head = {"w": np.asarray(grads["head"]["weight"]).T, "b": np.asarray(grads["head"]["bias"])}
    return sg.Params({"w": cell}, head)


def as_call(peer: Peer) -> Callable[[], Any]:
    """What `take_turns` takes."""
    state = peer.values(jax.random.key(1))

    def call() -> Any:
        nonlocal state
        state, out = peer.update(state)
        return out, state

    return call


def quality_of(samples: list[sg.Params], exact: sg.Params) -> tuple[float, float, float, float]:
    """E‖ĝ - g‖² / ‖g‖², E[ĝ·g] / ‖g‖², the standard error of the latter, and ‖ĝ - g‖ / ‖g‖ of the head."""
    g = np.asarray(exact.cell["w"], np.float64)
    g_hat = np.stack([np.asarray(sample.cell["w"], np.float64) for sample in samples])
    error = np.sum((g_hat - g) ** 2) / len(samples) / np.sum(g**2)
    along = np.sum(g_hat * g, axis=(1, 2)) / np.sum(g**2)
    spread = np.std(along, ddof=1) / np.sqrt(len(samples))
    head = np.linalg.norm(samples[0].head["w"] - exact.head["w"]) / np.linalg.norm(exact.head["w"])
    return float(error), float(np.mean(along)), float(spread), float(head)


def measure(hidden: int, streams: int, keys: int, repeats: int) -> list[dict[str, Any]]:
    """One size: errors first, then the times of all in turns."""
    model, params, chunk = make_problem("vanilla", hidden, streams, LENGTH)
    episode = sg.Chunk(chunk.inputs[:, :EPISODE], chunk.targets[:, :EPISODE])
    bptt = sg.batched(sg.bptt(model), streams)
    exact = bptt.update(params, bptt.init(params), episode, None)[0]
    each = jax.random.split(jax.random.key(2), keys)
    programs, quality = {}, {}
    for name, options in OURS.items():
        est = sg.batched(sg.uoro(model, **options), streams)
        samples = [est.update(params, est.init(params), episode, key)[0] for key in each]
        quality["streamgrad", name] = quality_of(samples, exact)
        programs["streamgrad", name] = prepare(est.update, params, est.init(params), chunk, jax.random.key(1)).call
    for name, drive in THEIRS.items():
        peer = make_peer(params, episode, drive)
        samples = [theirs_as_ours(peer.update(peer.values(key))[1][0], hidden) for key in each]
        quality["braintrace", name] = quality_of(samples, exact)
        programs["braintrace", name] = as_call(make_peer(params, chunk, drive))
    seconds = take_turns(programs, repeats, LEAST_SECONDS)
    rows = []
    for (library, name), value in seconds.items():
        error, along, spread, head = quality[library, name]
        row = {"library": library, "estimator": name, "hidden": hidden, "streams": streams}
        row |= {"us_per_step": round(value / LENGTH * 1e6, 2)}
        row |= {"times_streamgrad": round(value / seconds["streamgrad", "uoro"], 2), "gradient_error": f"{error:.4g}"}
        rows.append(row)
        print(
            f"{library:10s}  {name:33s}  H {hidden:4d}  streams {streams:3d}  us_per_step {row['us_per_step']:10.2f}  "
            f"times_streamgrad {row['times_streamgrad']:8.2f}  gradient_error {error:10.4g}  "
            f"along {along:5.2f} ± {spread:.2f}  head {head:.0e}",
            flush=True,
        )
    return rows


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--keys", type=int, default=64, help="how many estimates the error is a mean of")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    load_peer()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "brainstate", "braintrace"))
    print(f"{jax.devices()[0].device_kind}, {versions}, float32")
    rows = []
    for streams in arguments.streams:
        rows += measure(arguments.hidden, streams, arguments.keys, arguments.repeats)
        write_rows(arguments.out / "against_braintrace.csv", rows)
    print(f"written: {arguments.out / 'against_braintrace.csv'}")


if __name__ == "__main__":
    main()
