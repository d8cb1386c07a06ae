"""`benchmarks.precision` rounds what it says: products, also inside loops and conditions, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.precision import rounded


def test_products_are_rounded_wherever_they_stand():
    a, x = (jnp.asarray(np.random.default_rng(i).normal(size=(3, 3)), jnp.float32) for i in (0, 1))

    def program(a, x):
        again = jax.lax.scan(lambda h, _: (jax.nn.relu(a @ h), None), x, length=2)[0]
        return jax.lax.cond(x[0, 0] > 5, lambda h: h, lambda h: (h @ a) * jnp.float32(1.000001), again)

    def by_hand(a, x):
        half = lambda z: jax.lax.reduce_precision(z, 8, 4)  # noqa: E731
        for _ in range(2):
            x = jax.nn.relu(half(a) @ half(x))
        return (half(x) @ half(a)) * jnp.float32(1.000001)

    closed = jax.make_jaxpr(program)(a, x)
    (got,) = rounded(closed, 4)(a, x)
    np.testing.assert_array_equal(got, by_hand(a, x))
    assert np.abs(np.asarray(got - program(a, x))).max() > 1e-3
    np.testing.assert_array_equal(rounded(closed, 23)(a, x)[0], program(a, x))
