"""Published recurrent cells as their papers write them, step by step in numpy, from a state of zeros.

Each takes a cell's parameters and inputs `[T, n_in]`, and returns outputs `[T, n_out]`.
"""

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def lru(params, inputs):
    """Orvieto et al. (2023), with the parametrisation of their section 3: λ = exp(-exp(ν) + i exp(θ))."""
    size = len(params["nu"])
    lam = np.exp(-np.exp(params["nu"]) + 1j * np.exp(params["theta"]))
    b = params["b"][:size] + 1j * params["b"][size:]
    h, outputs = np.zeros(size, complex), []
    for x in inputs:
        h = lam * h + np.exp(params["log_gamma"]) * (b @ x)
        if "read" in params:
            c, d = params["read"][:, :size] + 1j * params["read"][:, size : 2 * size], params["read"][:, 2 * size :]
            outputs.append((c @ h).real + d @ x)
        else:
            outputs.append(np.concatenate([h.real, h.imag]))
    return np.array(outputs)


def _rtu(params, inputs, inside, outside):
    """Elelimy et al. (2024): real pairs, turned by a matrix [[cos, -sin], [sin, cos]]."""
    size = len(params["nu"])
    r, angle = np.exp(-np.exp(params["nu"])), np.exp(params["theta"])
    g, phi, norm = r * np.cos(angle), r * np.sin(angle), np.sqrt(1 - r**2)
    one, two, outputs = np.zeros(size), np.zeros(size), []
    for x in inputs:
        one, two = (
            inside(g * one - phi * two + norm * (params["w"][:size] @ x)),
            inside(g * two + phi * one + norm * (params["w"][size:] @ x)),
        )
        outputs.append(outside(np.concatenate([one, two])))
    return np.array(outputs)


def linear_rtu(params, inputs):
    return _rtu(params, inputs, lambda x: x, lambda x: np.maximum(x, 0))


def linear_tanh_rtu(params, inputs):
    return _rtu(params, inputs, lambda x: x, np.tanh)


def non_linear_rtu(params, inputs):
    return _rtu(params, inputs, np.tanh, lambda x: x)


def elstm(params, inputs):
    """Irie et al. (2023), with the biases of their code."""
    size, n_in = len(params["w_f"]), inputs.shape[1]
    f_x, z_x = params["w"][:size, :n_in], params["w"][size:, :n_in]
    f_b, z_b = params["w"][:size, -1], params["w"][size:, -1]
    o_c, o_x, o_b = params["o"][:, :size], params["o"][:, size:-1], params["o"][:, -1]
    c, outputs = np.zeros(size), []
    for x in inputs:
        f = sigmoid(f_x @ x + params["w_f"] * c + f_b)
        z = np.tanh(z_x @ x + params["w_z"] * c + z_b)
        c = f * c + (1 - f) * z
        outputs.append(sigmoid(o_x @ x + o_c @ c + o_b) * c)
    return np.array(outputs)


def _mingru(params, inputs, g):
    """Feng et al. (2024), sequential mode."""
    size = len(params["w"]) // 2
    h, outputs = np.zeros(size), []
    for x in inputs:
        z = sigmoid(params["w"][:size, :-1] @ x + params["w"][:size, -1])
        h = (1 - z) * h + z * g(params["w"][size:, :-1] @ x + params["w"][size:, -1])
        outputs.append(h)
    return np.array(outputs)


def mingru(params, inputs):
    return _mingru(params, inputs, lambda a: a)


def positive_mingru(params, inputs):
    return _mingru(params, inputs, lambda a: np.where(a >= 0, a + 0.5, sigmoid(a)))


def lif(params, inputs, alpha, v_th, beta=None, rho=0.0, kappa=0.0):
    """Bellec et al. (2020): leaky integrate-and-fire neurons, the threshold adaptive if `beta` is given.

    Outputs are Σ_k κ^k s_{t-k}, which are the spikes themselves for κ = 0.
    """
    size = len(params["w"])
    recurrent, from_input = params["w"][:, :size], params["w"][:, size:]
    v, s, a, trace, outputs = *np.zeros((4, size)), []
    for x in inputs:
        v, a = alpha * v + recurrent @ s + from_input @ x - s * v_th, rho * a + s
        s = np.where(v > v_th + (0 if beta is None else beta) * a, 1.0, 0.0)
        trace = kappa * trace + s
        outputs.append(trace)
    return np.array(outputs)
