"""One of two processes of two devices each: `python -m tests.devices.process RANK PORT NAME ...`, started by the tests.

Each passes its own streams alone. Process 0 prints how far the gradients are from those of one device, as JSON.
"""

import json
import os
import sys

from tests.flags import FLAGS

os.environ["XLA_FLAGS"] = FLAGS

import jax

import streamgrad as sg
from tests.devices.cases import STREAMS, difference, make, train

BY_COLUMNS = " by columns"


def spread(name: str) -> sg.GradientEstimator:
    """The estimator over all devices; by columns, over those of each process."""
    if name.endswith(BY_COLUMNS):
        mesh = jax.make_mesh((2, 2), ("streams", "columns"))
        return sg.sharded(make(name.removesuffix(BY_COLUMNS)), STREAMS, mesh, columns="columns")
    return sg.sharded(make(name), STREAMS, jax.make_mesh((4,), ("streams",)))


def main(rank: int, port: int, names: list[str]) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
    own = slice(rank * STREAMS // 2, (rank + 1) * STREAMS // 2)
    found = {name: train(spread(name), streams=own) for name in names}
    if rank == 0:
        alone = {name: train(sg.batched(make(name.removesuffix(BY_COLUMNS)), STREAMS)) for name in names}
        print(json.dumps({name: difference(found[name], alone[name]) for name in names}), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
