"""How the state of an estimator and the chunks that it is given lie on a mesh."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, auto_axes
from jax.sharding import PartitionSpec as P

from streamgrad._typing import Array, PyTree
from streamgrad.base import Chunk, EstimatorState, GradientEstimator, Params, Trace
from streamgrad.checks import check_batch, check_fits
from streamgrad.engine.collectives import Devices, PerDevice
from streamgrad.engine.estimator import Engine, Program
from streamgrad.engine.input_checks import checks_of
from streamgrad.trees import check_like


class MeshLayout:
    """How the state of an estimator lies on a mesh.

    Args:
      est: for one stream.
      batch_size: of all devices.
      memories: how many of the streams have a memory.
      mesh: the devices.
      devices: those that streams are spread over.
      columns: the axis of the mesh that memories are spread over, or None.
    """

    def __init__(
        self, est: GradientEstimator, batch_size: int, memories: int, mesh: Mesh, devices: Devices, columns: str | None
    ):
        self.est, self.batch_size, self.memories, self.mesh, self.devices = est, batch_size, memories, mesh, devices
        self.columns = columns
        self._types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))

    def _repeated(self, params: Params) -> EstimatorState:
        """The state at the beginning of all streams."""
        one = self._one(params)

        def repeat(tree: PyTree, count: int) -> PyTree:
            return jax.tree.map(lambda leaf: jnp.repeat(leaf[None], count, axis=0), tree)

        def each(leaf: Any) -> Any:
            if not isinstance(leaf, PerDevice):
                return leaf
            return jax.tree.map(lambda part: jnp.concatenate([part] * self.devices.count), leaf)

        memory = self._filled(repeat(one.memory, self.memories))
        shared = jax.tree.map(each, one.shared, is_leaf=lambda leaf: isinstance(leaf, PerDevice))
        return EstimatorState(repeat(one.cell, self.batch_size), memory, shared)

    def init(self, params: Params) -> EstimatorState:
        """The state at the beginning of all streams, where it belongs."""
        shapes = jax.eval_shape(self._repeated, params)
        specs = self.specs(shapes)
        check_fits(self._of_one_device(specs, shapes))
        # Each device makes its own part: the whole may be too large for any of them.
        made = jax.jit(lambda params: self.reshard(specs, self._repeated(params)), out_shardings=self._shardings(specs))
        return made(*self.place((P(),), (params,)))

    def _one(self, params: Params) -> EstimatorState:
        """The state at the beginning of one stream; by columns it may be more than fits into a device."""
        if self.columns is None or not isinstance(self.est, Engine):
            return self.est.init(params)
        checks_of(self.est.method).init(params)
        return Program(self.est.method).init(params)

    def _axes(self, memory: PyTree) -> PyTree:
        """For each array of the memory of many streams the axis that columns lie on, or 0 for none."""
        if self.columns is None:
            return jax.tree.map(lambda leaf: 0, memory)
        assert isinstance(self.est, Engine) and self.est.method.sharded_axes is not None
        one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), memory)
        return jax.tree.map(lambda axis: axis + 1, self.est.method.sharded_axes(one))

    def _filled(self, memory: PyTree) -> PyTree:
        """Arrays with zeros at their end, so that they can be cut evenly."""

        def one(leaf: Array, axis: int) -> Array:
            if not axis or self.columns is None:
                return leaf
            widths = [(0, 0)] * leaf.ndim
            widths[axis] = (0, -leaf.shape[axis] % self.mesh.shape[self.columns])
            return jnp.pad(leaf, widths)

        return jax.tree.map(one, memory, self._axes(memory))

    def over_streams(self, function: Callable, arguments: PyTree, results: PyTree) -> Callable:
        """A function of the streams of one device as one of all streams.

        Args:
          function: whose first argument are the parameters.
          arguments: how its arguments are cut, with columns.
          results: likewise.

        Returns:
          The function, to be compiled.
        """
        explicit = self.columns is not None and self._types[self.columns] == AxisType.Explicit

        def run(*given: Any) -> Any:
            own = jax.shard_map(
                function if self.columns is None else self._by_columns(function, arguments, results),
                mesh=jax.sharding.get_abstract_mesh() if explicit else self.mesh,
                in_specs=_along(self.devices.axis, arguments),
                out_specs=_along(self.devices.axis, results),
                axis_names={*self.mesh.axis_names} - {self.columns},
                check_vma=False,
            )
            return own(*given)

        if explicit:  # around shard_map: what enters one with an explicit axis is made whole along it
            whole: Any = auto_axes(run, axes=self.columns, out_sharding=self._explicit(results))
            return lambda *given: whole(*self.reshard(arguments, given))
        return lambda *given: run(*self.reshard(arguments, given))

    def _by_columns(self, function: Callable, arguments: PyTree, results: PyTree) -> Callable:
        """The same function, of memories that are spread by columns, which it knows nothing of.

        It is given whole memories in their own shapes, and the compiler finds what each device has to do. Everything
        else enters and leaves whole, or the compiler would cut the passes through the chunk as well, and its devices
        would wait for each other at every step; for what is inside of it there is `collectives.everywhere`.
        """
        arguments, results = _along(self.columns, arguments), _along(self.columns, results)

        def inside(*given: Any) -> Any:
            given = _constrained(arguments, given)
            shapes = jax.eval_shape(self._one, given[0]).memory

            def own_shape(memory: PyTree) -> PyTree:
                return jax.tree.map(lambda leaf, one: leaf[:, *map(slice, one.shape)], memory, shapes)

            found = function(*_each_memory(own_shape, given))
            return _constrained(results, _each_memory(self._filled, found))

        return inside

    def specs(self, state: EstimatorState) -> EstimatorState:
        """How the arrays of a state are cut."""
        over = P(self.devices.axis)

        def of_memory(axis: int) -> P:
            return P(self.devices.axis, *[None] * (axis - 1), self.columns) if axis else over

        memory = jax.tree.map(of_memory, self._axes(state.memory))
        shared = jax.tree.map(
            lambda leaf: over if isinstance(leaf, PerDevice) else P(),
            state.shared,
            is_leaf=lambda leaf: isinstance(leaf, PerDevice),
        )
        return EstimatorState(over, memory, shared)

    def trace_specs(self, before: EstimatorState) -> Trace:
        """How the arrays of a trace are cut, from those of the state before its chunk."""
        over: Any = P(self.devices.axis)
        return Trace(before, over, over, over)

    def _shardings(self, specs: PyTree) -> PyTree:
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=lambda s: isinstance(s, P))

    def _of_one_device(self, specs: EstimatorState, state: EstimatorState) -> EstimatorState:
        """The shapes of a state, of what one device has of it."""

        def one(spec: P, tree: PyTree) -> PyTree:
            part = NamedSharding(self.mesh, spec).shard_shape
            return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(part(leaf.shape), leaf.dtype), tree)

        return jax.tree.map(one, specs, state, is_leaf=lambda spec: isinstance(spec, P))

    def place(self, specs: PyTree, trees: PyTree) -> PyTree:
        """Arrays where they belong, if they are not there; what is being traced stays as it is."""

        def one(spec: P, tree: PyTree) -> PyTree:
            return jax.tree.map(functools.partial(self._put, NamedSharding(self.mesh, spec)), tree)

        return jax.tree.map(one, specs, trees, is_leaf=lambda spec: isinstance(spec, P))

    def _put(self, sharding: NamedSharding, leaf: Any) -> Any:
        if isinstance(leaf, Tracer):
            return leaf
        if isinstance(leaf, jax.Array):
            if leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
                return leaf
            if not leaf.is_fully_addressable:  # between processes a program alone can move it
                return jax.jit(lambda leaf: leaf, out_shardings=sharding)(leaf)
        if sharding.is_fully_addressable:
            return jax.device_put(leaf, sharding)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = self._put(sharding, jax.random.key_data(leaf))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        shape = self.of_all(leaf).shape if sharding.spec else leaf.shape
        return jax.make_array_from_process_local_data(sharding, np.asarray(leaf), shape)

    def of_all(self, tree: PyTree) -> PyTree:
        """What one of several processes passes of its own streams, with the shape of all of them."""
        processes = len({device.process_index for device in self.mesh.devices.flat})

        def one(leaf: Any) -> Any:
            own = processes > 1 and not isinstance(leaf, Tracer) and getattr(leaf, "is_fully_addressable", True)
            if not own or not np.ndim(leaf) or leaf.shape[0] * processes != self.batch_size:
                return leaf
            return jax.ShapeDtypeStruct((self.batch_size, *leaf.shape[1:]), leaf.dtype)

        return jax.tree.map(one, tree)

    def _explicit(self, specs: PyTree) -> PyTree:
        """Shardings along the explicit axes of the mesh alone, whose types say how arrays lie."""

        def one(spec: P) -> NamedSharding:
            named = P(*(axis if self._types.get(axis) == AxisType.Explicit else None for axis in spec))
            return NamedSharding(self.mesh, named)

        return jax.tree.map(one, specs, is_leaf=lambda spec: isinstance(spec, P))

    def reshard(self, specs: PyTree, trees: PyTree) -> PyTree:
        """Reshard traced arrays along the explicit axes of the mesh."""
        if AxisType.Explicit not in self._types.values():
            return trees

        def one(sharding: NamedSharding, tree: PyTree) -> PyTree:
            return jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, sharding), tree)

        return jax.tree.map(one, self._explicit(specs), trees)

    def check(self, params: Params, state: EstimatorState, chunk: Chunk) -> None:
        """The chunk and the state are those of so many streams on this mesh."""
        check_batch(state, chunk, self.batch_size, self.memories)
        expected = jax.eval_shape(self._repeated, params)
        check_like("state.memory", expected.memory, state.memory, "what this estimator's own init returned")
        check_like("state.shared", expected.shared, state.shared, "what this estimator's own init returned")


def _along(axis: str | None, specs: PyTree) -> PyTree:
    """Specs restricted to one axis of the mesh."""

    def one(spec: P) -> P:
        return P(*(name if name == axis else None for name in spec))

    return jax.tree.map(one, specs, is_leaf=lambda spec: isinstance(spec, P))


def _constrained(specs: PyTree, trees: PyTree) -> PyTree:
    """What is being traced inside of `jax.shard_map`, for the compiler to lay so."""
    mesh = jax.sharding.get_abstract_mesh()

    def one(spec: P, tree: PyTree) -> PyTree:
        return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, spec))

    return jax.tree.map(one, specs, trees, is_leaf=lambda spec: isinstance(spec, P))


def _each_memory(change: Callable[[PyTree], PyTree], tree: PyTree) -> PyTree:
    """Arguments or results with the memory of each state among them changed."""

    def one(leaf: Any) -> Any:
        return leaf._replace(memory=change(leaf.memory)) if isinstance(leaf, EstimatorState) else leaf

    return jax.tree.map(one, tree, is_leaf=lambda leaf: isinstance(leaf, EstimatorState))
