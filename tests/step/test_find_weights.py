"""The weight products of a step: which are found, how they are put together, and that nothing is lost on the way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from streamgrad.step.find_weights import find_weights
from tests.tools import few

KEY = jax.random.key(0)


def draw(**shapes):
    """Arrays of these shapes; complex ones where the shape begins with 1j."""
    found = {}
    for (name, shape), key in zip(shapes.items(), jax.random.split(KEY, len(shapes)), strict=True):
        of_complex = shape and shape[0] == 1j
        found[name] = jax.random.normal(key, shape[1:] if of_complex else shape, complex if of_complex else float)
    return found


def gates(p, h, x):
    """Four small layers, whose products are summed after they were split."""
    a, b = jnp.split(x @ p["v"] + p["b"], 2)
    c, d = jnp.split(p["w"] @ h, 2)
    return jax.nn.sigmoid(a + c) * jnp.tanh(b - d) + h


def reset_gate(p, h, x):
    """A product of what another product has made, and one whose result is scaled."""
    r = jax.nn.sigmoid(p["w"] @ jnp.concatenate([h, x]))
    return jnp.tanh(p["g"] * (p["u"] @ (r * h)))


def tied(p, h, x):
    """One matrix in two products, transposed in one of them, and once more by its entries."""
    return jnp.tanh(p["w"].T @ jnp.tanh(p["w"] @ h) + x[0] * p["w"][0])


def normalised(p, h, x):
    w = p["g"][:, None] * p["w"] / jnp.linalg.norm(p["w"], axis=1, keepdims=True)
    z = jax.jit(lambda w, a: jnp.einsum("ij,j->i", w, a))(w, jnp.append(h, x))
    return p["s"] * (z - z.mean()) / jnp.sqrt(z.var() + 1e-3)


def rotated(p, h, x):
    """Complex weights times complex features, read out as real numbers."""
    z = jnp.exp(1j * p["t"]) * (p["w"] @ (h + 1j * x[0])) + p["b"]
    return jnp.real(p["c"] @ z) + jnp.imag(z)


def inside_a_scan(p, h, x):
    return jax.lax.scan(lambda c, _: (jnp.tanh(p["w"] @ c + x), None), h, None, length=2)[0]


CASES = {
    # step, parameters, state, input, shapes of the matrices
    "gates": (gates, draw(v=(2, 6), b=(6,), w=(6, 3)), 3, 2, [(6, 6)]),
    "reset gate": (reset_gate, draw(w=(3, 5), u=(3, 3), g=(3,)), 3, 2, [(3, 5), (3, 3)]),
    "tied": (tied, draw(w=(3, 3)), 3, 1, [(3, 3), (3, 3), (3, 1)]),
    "normalised": (normalised, draw(w=(3, 4), g=(3,), s=(3,)), 3, 1, [(3, 4), (3, 1)]),
    "rotated": (rotated, draw(w=(1j, 3, 3), b=(1j, 3), c=(1j, 3, 3), t=(3,)), 3, 1, [(6, 7), (3, 6)]),
    "inside a scan": (inside_a_scan, draw(w=(3, 3)), 3, 3, [(9, 1)]),
}


@pytest.mark.parametrize("case", few(CASES, "reset gate", "tied", "inside a scan"))
def test_the_step_and_its_gradient(case):
    """Over matrices it is the same step, and gradients of the matrices go back to those of `jax.grad`."""
    step, params, size, width, shapes = CASES[case]
    rng = np.random.default_rng(0)
    h, x, v = (jnp.asarray(rng.normal(size=n)) for n in (size, width, size))
    found = find_weights(step, params, h, x, jnp.float64)
    weights = found.weights(params)
    new, z, a = found.run(weights, h, x, None)
    np.testing.assert_allclose(new, step(params, h, x), atol=1e-13)
    if case != "rotated":  # whose output is both whole and a part of another product
        assert [w.shape for w in weights] == shapes
    for w, one_z, one_a in zip(weights, z, a, strict=True):
        np.testing.assert_allclose(w @ one_a, one_z, atol=1e-13)
    dz = jax.grad(lambda dz: v @ found.run(weights, h, x, dz)[0])([jnp.zeros(len(w)) for w in weights])
    (back,) = jax.vjp(found.weights, params)[1]([jnp.outer(d, one) for d, one in zip(dz, a, strict=True)])
    want = jax.grad(lambda params: v @ step(params, h, x))(params)
    for name, leaf in want.items():
        assert float(jnp.abs(leaf).max()) > 0
        np.testing.assert_allclose(back[name], leaf, atol=1e-12)


def test_dead_ends_are_not_displaced():
    """Parameters that only an unused result depends on, and those that nothing uses, cost nothing."""

    def step(p, h, x):
        _ = p["dead"] * h
        return jnp.tanh(p["w"] @ h)

    params = draw(w=(2, 2), dead=(2,), unused=(4,))
    found = find_weights(step, params, jnp.ones(2), jnp.ones(1), jnp.float64)
    assert [w.shape for w in found.weights(params)] == [(2, 2)]
    assert not found.plan.rest


def test_a_large_value_is_displaced_where_it_is_small():
    """A scale that is broadcast over the state is one number, not as many as the state has."""

    def step(p, h, x):
        return jnp.broadcast_to(jnp.exp(p["a"]), h.shape) * h + x[0]

    params = draw(a=())
    found = find_weights(step, params, jnp.ones(50), jnp.ones(1), jnp.float64)
    assert [w.shape for w in found.weights(params)] == [(1, 1)]
