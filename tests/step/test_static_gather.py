"""Entries by known numbers: slices, repetitions and gathers are the same, and so are their derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from streamgrad.step.static_gather import static_gather

INDICES = {
    "all": [0, 1, 2, 3, 4],
    "some": [1, 2, 3],
    "repeated": [0, 1, 2, 3, 4] * 3,
    "runs": [0, 1, 2, 0, 1, 2, 4],
    "scattered": [4, 2, 0, 3, 1, 4, 2, 0, 3, 1],
    "none": [],
    "table": [[0, 1, 2], [2, 3, 4]],
    "tall table": [[4, 2], [0, 3], [1, 1], [2, 2], [0, 0]],
}


@pytest.mark.parametrize("name", INDICES)
@pytest.mark.parametrize("axis", [0, 1])
def test_take(name, axis):
    index = np.array(INDICES[name], int)
    array = jnp.asarray(np.random.default_rng(0).normal(size=(5, 5, 2)))
    want, pull_want = jax.vjp(lambda a: jnp.take(a, index, axis=axis), array)
    got, pull = jax.vjp(lambda a: static_gather(a, index, axis), array)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(pull(jnp.cos(got))[0], pull_want(jnp.cos(got))[0], atol=1e-15)


def test_what_lies_beyond_the_end_is_any_number():
    assert static_gather(jnp.arange(3.0), np.array([1, 2, 3]), 0)[:2].tolist() == [1, 2]
