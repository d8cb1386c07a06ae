"""One training run in several processes: what each of them must know to do the same at the same time.

All processes run the same program. The first writes metrics and `run.json`, and holds the folder's lock; checkpoints
are written by all, each its own part. Whatever depends on a clock is decided by the first; a signal to one stops all.
They see one and the same folder.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from streamgrad._typing import PyTree
from streamgrad.engine.sharded import Sharded
from streamgrad_lab import interrupts
from streamgrad_lab.locks import locked_folder

HEARTBEAT = 10  # seconds after which a process that says nothing is taken for dead


def start(coordinator: str | None = None, processes: int | None = None, process: int | None = None) -> None:
    """Make this process one of several, before JAX is used.

    Args:
      coordinator: address and port of the first process. Where None, this and the rest are found out by JAX: from
        JAX_COORDINATOR_ADDRESS and its like, from SLURM, Open MPI or Kubernetes.
      processes: how many there are.
      process: the number of this one.
    """
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    if coordinator is not None and not re.fullmatch(r".+:\d+", coordinator):
        raise ValueError(f"the coordinator must be an address and a port, such as 10.0.0.1:1234, not {coordinator!r}.")
    processes = _or_from_environment(processes, "JAX_NUM_PROCESSES")
    process = _or_from_environment(process, "JAX_PROCESS_ID")
    try:
        jax.distributed.initialize(coordinator, processes, process, heartbeat_timeout_seconds=HEARTBEAT)
    except (RuntimeError, ValueError, KeyError) as error:
        raise ValueError(
            f"the processes of the run could not be joined ({str(error).splitlines()[0].rstrip('.')}): give "
            "--coordinator, --processes and --process, or start them under SLURM, Open MPI or Kubernetes."
        ) from error
    interrupts.handle_again()


def _or_from_environment(given: int | None, name: str) -> int | None:
    found = os.environ.get(name)
    if given is not None or found is None:
        return given
    if not found.isdecimal():
        raise ValueError(f"{name} must be a whole number, not {found!r}.")
    return int(found)


def several() -> bool:
    """Whether this process is one of several."""
    return jax.process_count() > 1


def first() -> bool:
    """Whether this process writes what is written once."""
    return jax.process_index() == 0


def agreed(value: int) -> int:
    """The first process's value, on all of them."""
    if not several():
        return value
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def largest(value: int) -> int:
    """The largest of all processes' values, on all of them."""
    if not several():
        return value
    from jax.experimental import multihost_utils

    return int(np.max(multihost_utils.process_allgather(np.int32(value))))


@contextlib.contextmanager
def locked_together(folder: Path) -> Iterator[None]:
    """Be the only run that writes this folder: the first process holds its lock, and all know whether it does."""
    with contextlib.ExitStack() as stack:
        refused: ValueError | OSError | None = None
        if first():
            try:
                stack.enter_context(locked_folder(folder))
            except (ValueError, OSError) as error:
                refused = error
        if agreed(refused is not None):
            raise refused or ValueError(f"the first process of the run could not have {folder}: its message says why.")
        yield


def together(where: str) -> None:
    """Wait for all processes."""
    if several():
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(where)


def shardings_of(estimator: Any, template: Any) -> PyTree | None:
    """Where each array of a training state lies, which has a leading axis for seeds; None on one device.

    The streams of the estimator are spread, and those of the task with them, so that each device makes its own chunks
    from its own state; the rest is on every device.
    """
    if not isinstance(estimator, Sharded):
        return None
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), template.estimator)
    specs = estimator.specs(one)

    def each(spec: P, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda _: NamedSharding(estimator.mesh, P(None, *spec)), tree)

    def of_task(leaf: Any) -> NamedSharding:
        # What has as many rows as there are streams is theirs; were it not, it would lie elsewhere and be the same.
        by_stream = leaf.shape[1:2] == streams
        return NamedSharding(estimator.mesh, P(None, *axis) if by_stream else P())

    streams = jax.tree.leaves(one.cell)[0].shape[:1]
    axis = jax.tree.leaves(specs.cell, is_leaf=lambda spec: isinstance(spec, P))[0][:1]
    spread = jax.tree.map(each, specs, one, is_leaf=lambda spec: isinstance(spec, P))
    everywhere = jax.tree.map(lambda _: NamedSharding(estimator.mesh, P()), template)
    return everywhere._replace(estimator=spread, task=jax.tree.map(of_task, template.task))


def place(tree: PyTree, shardings: PyTree | None) -> PyTree:
    """Arrays of the host, whole on every process, where they belong."""
    if shardings is None:
        return jax.tree.map(jnp.asarray, tree)

    def one(leaf: Any, sharding: NamedSharding) -> jax.Array:
        leaf = np.asarray(leaf)
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

    return jax.tree.map(one, tree, shardings)
