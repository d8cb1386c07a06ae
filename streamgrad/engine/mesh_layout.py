"""How the state of an estimator and the chunks that it is given lie on a mesh."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from streamgrad._typing import PyTree
from streamgrad.base import Chunk, EstimatorState, GradientEstimator, Params, Trace, given, widened
from streamgrad.checks import check_batch, check_fits
from streamgrad.engine.collectives import Devices, PerDevice
from streamgrad.engine.columns import ColumnCut
from streamgrad.engine.estimator import Engine
from streamgrad.engine.input_checks import checks_of
from streamgrad.trees import check_like


class Layout:
    """How the state of an estimator lies on a mesh.

    Args:
      est: for one stream.
      batch_size: of all devices.
      memories: how many of the streams have a memory.
      mesh: the devices.
      devices: which of its axes are used for what.
    """

    def __init__(self, est: GradientEstimator, batch_size: int, memories: int, mesh: Mesh, devices: Devices):
        self.est, self.batch_size, self.memories, self.mesh, self.devices = est, batch_size, memories, mesh, devices

    def _repeated(self, params: Params) -> EstimatorState:
        """The state at the beginning of all streams."""
        one = self._one(params)

        def repeat(tree: PyTree, count: int) -> PyTree:
            return jax.tree.map(lambda leaf: jnp.repeat(leaf[None], count, axis=0), tree)

        def each(leaf: Any) -> Any:
            if not isinstance(leaf, PerDevice):
                return leaf
            return jax.tree.map(lambda part: jnp.concatenate([part] * self.devices.count), leaf)

        memory = repeat(one.memory, self.memories)
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

    @property
    def _cut(self) -> ColumnCut | None:
        """How the memory is cut by columns, or None."""
        if self.devices.columns is None:
            return None
        assert isinstance(self.est, Engine) and self.est.method.columns is not None
        return self.est.method.columns(self.devices.columns)

    def _one(self, params: Params) -> EstimatorState:
        """The state at the beginning of one stream."""
        if self._cut is None or not isinstance(self.est, Engine):
            return self.est.init(params)
        checks_of(self.est.method).init(params)
        return self._cut.init(widened(given(self.est.method.model).enter(params)))

    def specs(self, state: EstimatorState) -> EstimatorState:
        """How the arrays of a state are cut."""
        over = P(self.devices.axis)

        def of_memory(axis: int) -> P:
            if axis < 0 or self.devices.columns is None:
                return over
            return P(self.devices.axis, *[None] * axis, self.devices.columns.axis)

        one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), state.memory)
        axes = jax.tree.map(lambda leaf: -1, one) if self._cut is None else self._cut.axes(one)
        memory = jax.tree.map(of_memory, axes)
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

    def reshard(self, specs: PyTree, trees: PyTree) -> PyTree:
        """What is being traced, as explicit axes of the mesh, whose types say how arrays lie, want it."""
        types = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        if AxisType.Explicit not in types.values():
            return trees

        def one(spec: P, tree: PyTree) -> PyTree:
            named = P(*(axis if types.get(axis) == AxisType.Explicit else None for axis in spec))
            return jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, NamedSharding(self.mesh, named)), tree)

        return jax.tree.map(one, specs, trees, is_leaf=lambda spec: isinstance(spec, P))

    def check(self, params: Params, state: EstimatorState, chunk: Chunk) -> None:
        """The chunk and the state are those of so many streams on this mesh."""
        check_batch(state, chunk, self.batch_size, self.memories)
        expected = jax.eval_shape(self._repeated, params)
        check_like("state.memory", expected.memory, state.memory, "what this estimator's own init returned")
        check_like("state.shared", expected.shared, state.shared, "what this estimator's own init returned")
