"""e-prop, D-RTRL and SnAp of the package `braintrace` beside this library's estimators, in the same run.

    python -m benchmarks.against_braintrace_field          # minutes on 2 cores; needs the extra `peers`

The same vanilla tanh network (64 units, 32 inputs, 10 classes, a softmax), the same float32 parameters and the same
random data for both, 32 streams, on the CPU. Prints a table and writes `against_braintrace_field.csv`.

- us_per_step is that of a stretch of 64 steps in one compiled loop, over 64: medians of rounds in which all take turns.
- squared_error is E‖ĝ - g‖² / ‖g‖² over the cell's weights, with g from BPTT over these 64 steps from a zero
  state, and cosine that of ĝ and g; means over keys where there is noise. head is ‖ĝ - g‖ / ‖g‖ of the read-out's.
- from_textbook is ‖ĝ - t‖ / ‖t‖ with t what the method is by definition, computed here step by step in float64:
  "immediate" (M_t = J_t, which is what e-prop and D-RTRL are where a unit has no memory but its recurrent weights),
  "snap-1" (M_t = D_t M_{t-1} + J_t, of which each weight keeps its own unit alone), and "rtrl" (all of it).

Both libraries go step by step. Ours are shown in chunks of one step, as theirs are, and in chunks of 8, which an update
takes at once: backpropagation is then exact inside a chunk. Whatever of `OURS` the registry has is shown, with its
variants.

How `braintrace` is driven: `braintrace.compile(model, CLASS, ...)` and `etrace_grad`, as in `against_braintrace`, with
the batch inside the model or mapped over ("vmap"), and with "single-step", the default of these algorithms, or
"multi-step", which goes back one step further and so has no definition here but for SnAp of order 2. That is saturated
on a dense network, and should be RTRL. Its e-prop is given no filter (κ = 0). Where it refuses, `refused` says why.
"""

import argparse
import functools
import importlib.metadata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import streamgrad as sg
from benchmarks.against_braintrace import LENGTH, Drive, as_call, load_peer, make_peer, theirs_as_ours
from benchmarks.problems import LEAST_SECONDS, make_problem
from streamgrad.estimators.registry import REGISTRY
from streamgrad_lab.programs import walk
from streamgrad_lab.tables import write_rows
from streamgrad_lab.timing import take_turns

OURS = ("bptt", "rtrl", "ok", "snap", "eprop", "rflo", "immediate")
TEXTBOOK = {"rtrl": "rtrl", "immediate": "immediate"}  # by name of an estimator, in chunks of one step
CHUNKS = (1, 8)


class Theirs(NamedTuple):
    """One of their algorithms, and what it is by definition."""

    name: str
    textbook: str
    drive: Drive


def theirs() -> Iterator[Theirs]:
    """What is driven of `braintrace`."""
    algorithms = (
        ("e-prop", "immediate", "EProp", {}),
        ("D-RTRL", "immediate", "D_RTRL", {}),
        ("SnAp-1", "snap-1", "SnAp", {"n": 1}),
        ("SnAp-2, saturated", "rtrl", "SnAp", {"n": 2}),
    )
    for name, textbook, algorithm, options in algorithms:
        for vmap in (False, True):
            for method in ("single-step", "multi-step"):
                words = f"{name}{', vmap' if vmap else ''}{', multi-step' if method == 'multi-step' else ''}"
                yield Theirs(words, textbook, Drive(vmap, method, algorithm=algorithm, options=options))


def ours(model: sg.Model) -> Iterator[tuple[str, str, sg.GradientEstimator]]:
    """Registered estimators of those names, with their variants: words, name, estimator."""
    for name in (name for name in OURS if name in REGISTRY):
        row = REGISTRY[name]
        for changed in ({}, *row.variants):
            words = ", ".join([name, *(f"{option} {value}" for option, value in changed.items())])
            yield words, name, row.make(model, **{**row.options, **changed})


def textbook(params: sg.Params, chunk: sg.Chunk) -> dict[str, np.ndarray]:
    """What the methods are by definition, a mean over streams: Σ_t (dL_t/dh_t) M_t with M_t in full, and in parts."""
    w, head = np.asarray(params.cell["w"], np.float64), jax.tree.map(lambda leaf: np.asarray(leaf, float), params.head)
    hidden, features = w.shape
    total = {name: np.zeros_like(w) for name in ("immediate", "snap-1", "rtrl")}
    units = np.arange(hidden)
    for inputs, targets in zip(np.asarray(chunk.inputs, np.float64), np.asarray(chunk.targets), strict=True):
        h, full = np.zeros(hidden), np.zeros((hidden, hidden, features))
        own = np.zeros((hidden, features))
        for x, target in zip(inputs, targets, strict=True):
            a = np.concatenate([h, x, [1.0]])
            h = np.tanh(w @ a)
            slope = 1 - h**2
            jacobian = slope[:, None] * w[:, :hidden]  # D_t = dh_t/dh_{t-1}
            full = np.tensordot(jacobian, full, axes=1)
            full[units, units] += np.outer(slope, a)
            own = np.diag(jacobian)[:, None] * own + np.outer(slope, a)
            logits = head["w"] @ h + head["b"]
            p = np.exp(logits - logits.max())
            dl_dh = head["w"].T @ (p / p.sum() - np.eye(len(p))[target])
            total["immediate"] += np.outer(dl_dh * slope, a)
            total["snap-1"] += dl_dh[:, None] * own
            total["rtrl"] += np.tensordot(dl_dh, full, axes=1)
    return {name: value / len(chunk.inputs) for name, value in total.items()}


def quality_of(samples: list[sg.Params], exact: sg.Params, definition: np.ndarray | None) -> dict[str, str]:
    """Error, cosine, the head's error, and how far from the definition."""
    g = np.asarray(exact.cell["w"], np.float64)
    found = np.stack([np.asarray(sample.cell["w"], np.float64) for sample in samples])
    lengths = np.linalg.norm(found.reshape(len(found), -1), axis=1) * np.linalg.norm(g)
    cosine = np.mean(np.sum(found * g, axis=(1, 2)) / lengths)
    away = "" if definition is None else np.linalg.norm(found[0] - definition) / np.linalg.norm(definition)
    head = np.linalg.norm(samples[0].head["w"] - exact.head["w"]) / np.linalg.norm(exact.head["w"])
    return {
        "squared_error": f"{np.mean(np.sum((found - g) ** 2, axis=(1, 2))) / np.sum(g**2):.3g}",
        "cosine": f"{cosine:.4f}",
        "from_textbook": away if isinstance(away, str) else f"{away:.1e}",
        "head": f"{head:.0e}",
    }


def measure(hidden: int, streams: int, keys: int, repeats: int) -> list[dict[str, Any]]:
    """Errors first, then the times of all in turns."""
    model, params, chunk = make_problem("vanilla", hidden, streams, LENGTH)
    bptt = sg.batched(sg.bptt(model), streams)
    exact = bptt.update(params, bptt.init(params), chunk, None)[0]
    by_definition = textbook(params, chunk)
    each = jax.random.split(jax.random.key(2), keys)
    rows: dict[tuple[str, str], dict[str, str]] = {}
    programs: dict[tuple[str, str], Callable[[], Any]] = {}
    for words, name, one in ours(model):
        est, noisy = sg.batched(one, streams), REGISTRY[name].promise.startswith("unbiased")
        for size in CHUNKS:
            run = jax.jit(functools.partial(walk, est, chunk_length=size), donate_argnames="state")
            label = "streamgrad", f"{words}, chunks of {size}"
            samples = [run(params, est.init(params), chunk, key=key)[0] for key in (each if noisy else each[:1])]
            definition = by_definition.get(TEXTBOOK.get(name, "")) if size == 1 else None
            rows[label] = quality_of(samples, exact, definition)
            programs[label] = going_on(functools.partial(run, params, many=chunk, key=each[0]), est.init(params))
            say(label, rows[label])
    for name, definition, drive in theirs():
        label = "braintrace", name
        try:
            peer = make_peer(params, chunk, drive)
        except Exception as error:  # whatever it raises where it cannot
            rows[label] = {"refused": str(error).partition(". ")[0].replace("\n", " ")}
        else:
            grads = theirs_as_ours(peer.update(peer.values(each[0]))[1][0], hidden)
            defined = drive.vjp_method == "single-step" or definition == "rtrl"
            rows[label] = quality_of([grads], exact, by_definition[definition] if defined else None)
            programs[label] = as_call(peer)
        say(label, rows[label])
    seconds = take_turns(programs, repeats, LEAST_SECONDS)
    unit = seconds["streamgrad", "bptt, chunks of 8"]
    table = []
    for (library, name), found in rows.items():
        row: dict[str, Any] = {"library": library, "estimator": name, "hidden": hidden, "streams": streams}
        if (library, name) in seconds:
            value = seconds[library, name]
            row |= {"us_per_step": round(value / LENGTH * 1e6, 2), "times_bptt_by_8": f"{value / unit:.3g}"}
            say((library, name), {key: row[key] for key in ("us_per_step", "times_bptt_by_8")})
        table.append(row | found)
    return table


def going_on(run: Callable[..., tuple], state: Any) -> Callable[[], Any]:
    """A call that goes on from the state that the last one left."""

    def call() -> Any:
        nonlocal state
        grads, state, _ = run(state=state)
        return grads, state

    return call


def say(label: tuple[str, str], values: dict[str, Any]) -> None:
    """A line while it runs."""
    print(f"{label[0]:10s}  {label[1]:36s}  " + "  ".join(f"{k} {v}" for k, v in values.items()), flush=True)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--keys", type=int, default=16, help="how many estimates the error of a noisy one is a mean of")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    load_peer()
    versions = {name: importlib.metadata.version(name) for name in ("jax", "brainstate", "braintrace")}
    print(f"{jax.devices()[0].device_kind}, {versions}, float32")
    rows = measure(arguments.hidden, arguments.streams, arguments.keys, arguments.repeats)
    names = ["library", "estimator", "hidden", "streams", "us_per_step", "times_bptt_by_8", "squared_error", "cosine"]
    names += ["from_textbook", "head", "refused"]
    whole = [{name: row.get(name, "") for name in names} | versions for row in rows]
    write_rows(arguments.out / "against_braintrace_field.csv", whole)
    print(f"written: {arguments.out / 'against_braintrace_field.csv'}")


if __name__ == "__main__":
    main()
