"""Many streams on many devices: `batched` over a mesh, with one all-reduce of the gradient for each update."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from streamgrad._typing import Array, PyTree
from streamgrad.base import Chunk, EstimatorState, GradientEstimator, Params, Trace
from streamgrad.checks import check_estimator, check_size, check_values
from streamgrad.engine.collectives import Devices
from streamgrad.engine.estimator import Engine, Result, check_watched, mapped, streams_of
from streamgrad.engine.mesh_layout import MeshLayout
from streamgrad.keys import one_key_per_stream
from streamgrad.trees import kind_of, once_per_shape


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Sharded(GradientEstimator):
    """An estimator over a mesh.

    Attributes:
      mesh: the devices.
      specs: `specs(state) -> specs`, how its states are cut: a tree of `PartitionSpec`, of which one may stand for
        several arrays.
    """

    mesh: Mesh
    specs: Callable[[EstimatorState], EstimatorState]


def sharded(
    est: GradientEstimator,
    batch_size: int,
    mesh: Mesh,
    *,
    streams: str | None = None,
    columns: str | None = None,
    watched: int | None = None,
) -> Sharded:
    """Run an estimator on many streams, spread over the devices of a mesh: `batched`, and the same numbers.

    Every device goes through its own streams, with their keys and their memory. Parameters and what streams share are
    on all of them; what travels is the gradient, in one all-reduce for each update, whatever the number of streams.

    Args:
      est: an estimator for one stream.
      batch_size: B, the number of streams on all devices.
      mesh: of devices, such as `jax.make_mesh((4,), ("streams",))`; of one process or of many.
      streams: the axis of the mesh over which streams are spread; its first by default.
      columns: an axis over which each stream's influence is spread, by columns of θ: for `rtrl`, `local_rtrl` and
        `ok`, whose memory is large. Its devices go through the same streams, and each keeps its part of M, which moves
        on without traffic.
      watched: as in `batched`; so many in all, and as many on each device.

    Returns:
      The record that `batched` returns. Its states lie on the mesh. Chunks and keys may come from anywhere; of several
      processes each may pass its own streams alone. Works inside `jax.jit`, under meshes with Auto and Explicit axes.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.vanilla(2, 3), sg.heads.softmax(2))
      >>> params = model.init(jax.random.key(0))
      >>> est = sg.sharded(sg.rtrl(model), 4, jax.make_mesh((1,), ("streams",)))
      >>> chunk = sg.Chunk(jnp.ones((4, 5, 2)), jnp.zeros((4, 5), int))
      >>> grads, state, info = est.update(params, est.init(params), chunk)
      >>> state.cell.shape, len(state.cell.sharding.device_set)
      ((4, 3), 1)
    """
    check_estimator(est)
    check_size(batch_size=batch_size)
    devices = find_devices(mesh, streams, columns)
    if watched is not None:
        check_watched(est, batch_size, watched)
    memories = watched or batch_size
    for count, what in ((batch_size, "streams"), (memories, "watched streams")):
        if count % devices.count:
            raise ValueError(
                f"{count} {what} cannot be spread evenly over the {devices.count} devices of the mesh's axis "
                f"{devices.axis!r}: take a multiple of {devices.count}."
            )
    if columns is not None and (not isinstance(est, Engine) or est.method.sharded_axes is None):
        raise ValueError(
            "columns is for an influence with a column for each weight, such as that of rtrl on a cell with "
            f"preactivations, not for {est!r}: leave it out."
        )
    layout = MeshLayout(est, batch_size, memories, mesh, devices, columns)
    own = streams_of(est.method, devices) if isinstance(est, Engine) else mapped(est, devices)
    over = P(devices.axis)

    def over_mesh(function: Callable, arguments: Callable, results: Callable) -> Callable:
        """Compiled for all devices; how arrays are cut follows from the second argument, a state or a trace."""

        def specs_of(second: EstimatorState | Trace) -> EstimatorState:
            return layout.specs(second.before if isinstance(second, Trace) else second)

        @jax.jit
        def compiled(*given: Any) -> Any:
            specs = specs_of(given[1])
            return layout.over_streams(function, arguments(specs), results(specs))(*given)

        return lambda *given: compiled(*layout.place(arguments(specs_of(given[1])), given))

    traces = layout.trace_specs
    update_all = over_mesh(own.update, lambda s: (P(), s, over, over), lambda s: (P(), s, over))
    advance_all = over_mesh(own.advance, lambda s: (P(), s, over, over, over), lambda s: (over, s, traces(s)))
    credit_all = over_mesh(own.credit, lambda s: (P(), traces(s), over), lambda s: P())
    credit_each = over_mesh(own.credit_each, lambda s: (P(), traces(s), over), lambda s: over)
    check = once_per_shape(layout.check)

    def checked(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> tuple[Chunk, Any]:
        check(params, state, layout.of_all(chunk))
        if isinstance(est, Engine):
            check_values(est.method.model, chunk)
        return layout.place((over, over), (chunk, one_key_per_stream(key, batch_size)))

    def update(params: Params, state: EstimatorState, chunk: Chunk, key: Any = None) -> Result:
        return update_all(params, state, *checked(params, state, chunk, key))

    def advance(
        params: Params, state: EstimatorState, inputs: PyTree, key: Any = None, reset: Array | None = None
    ) -> tuple[Array, EstimatorState, Trace]:
        chunk, keys = checked(params, state, Chunk(inputs, None, reset), key)
        return advance_all(params, state, chunk.inputs, keys, chunk.reset)

    def credit(params: Params, trace: Trace, dl_doutput: Array, per_stream: bool = False) -> PyTree:
        if not isinstance(trace, Trace):
            raise ValueError(f"trace must be the third value that advance returned, not {kind_of(trace)}.")
        if per_stream and memories < batch_size:
            raise ValueError("only streams that are watched have credit of their own: leave watched out of sharded.")
        return (credit_each if per_stream else credit_all)(params, trace, dl_doutput)

    label = f"sharded({est!r}, {batch_size}, mesh{tuple(mesh.shape.values())})"
    return Sharded(layout.init, update, advance, credit, mesh=mesh, specs=layout.specs, label=label)


def find_devices(mesh: Mesh, streams: str | None, columns: str | None) -> Devices:
    """The axes of a mesh that streams and columns lie on; raises ValueError where it has no such axes."""
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh must be what jax.make_mesh returns, not {kind_of(mesh)}.")
    if AxisType.Manual in mesh.axis_types:
        raise ValueError("the axes of mesh must be Auto or Explicit, not Manual: make it outside of jax.shard_map.")
    first = mesh.axis_names[0] if streams is None and mesh.axis_names else streams
    for name, axis in (("streams", first), ("columns", columns)):
        if axis not in mesh.axis_names and (name, axis) != ("columns", None):
            raise ValueError(f"{name} must be an axis of the mesh, one of {mesh.axis_names}, not {axis!r}.")
    if first == columns:
        raise ValueError(f"streams and columns must be two axes of the mesh, not {columns!r} for both.")
    return Devices(first, mesh.shape[first])
