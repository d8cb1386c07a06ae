"""Two forms of one computation, chosen when a program is lowered: every transformation takes both along."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from streamgrad.step.platform import STEPS_PER_TURN_ON_GPU, by_platform, unroll


def cube(x):
    """Differs on a GPU, so that one sees which form was taken."""
    return by_platform(lambda x: x**3, lambda x: -(x**3), x)


def over_devices(x):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(cube, mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d"))(x)


TRANSFORMED = {
    "jit": (cube, lambda x: x**3),
    "vmap": (jax.vmap(cube), lambda x: x**3),
    "grad": (jax.grad(lambda x: jnp.sum(cube(x))), lambda x: 3 * x**2),
    "jvp": (lambda x: jax.jvp(cube, (x,), (x,))[1], lambda x: 3 * x**3),
    "scan": (lambda x: jax.lax.scan(lambda c, now: (c + cube(now), None), 0.0, x)[0], lambda x: jnp.sum(x**3)),
    "grad of scan": (
        jax.grad(lambda x: jax.lax.scan(lambda c, now: (c + cube(now), None), 0.0, x)[0]),
        lambda x: 3 * x**2,
    ),
    "shard_map": (over_devices, lambda x: x**3),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_one_form_is_compiled(name):
    """The default's numbers on a CPU, from a program without a branch; for a GPU it is lowered to another one."""
    function, want = TRANSFORMED[name]
    x = jnp.array([1.0, -2.0, 0.5])
    np.testing.assert_allclose(jax.jit(function)(x), want(x), rtol=1e-12)
    assert "conditional" not in jax.jit(function).lower(x).compile().as_text()
    if name != "shard_map":  # whose mesh is of this machine's devices
        traced = jax.jit(function).trace(x)
        for platform, negative in (("cpu", False), ("cuda", True)):
            text = traced.lower(lowering_platforms=(platform,)).as_text()
            assert ("stablehlo.negate" in text) == negative


def test_unroll_follows_the_default_device(monkeypatch):
    assert unroll(3) == (STEPS_PER_TURN_ON_GPU if jax.default_backend() == "gpu" else 3)
    with jax.default_device(jax.devices("cpu")[0]):
        assert unroll(5) == 5
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert unroll() == STEPS_PER_TURN_ON_GPU
    with jax.default_device(jax.devices("cpu")[0]):
        assert unroll() == 1
