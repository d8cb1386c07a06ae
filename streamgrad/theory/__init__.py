"""How noisy a gradient estimate is, and what would make it less so (Sections 6 to 8, appendices A to F and H).

ep = sg.variance.collect(model, params, chunk)
sol = sg.variance.optimal_alpha(sg.variance.c_matrix(ep))
sg.variance.total_variance(ep, sol.alpha, kurtosis=-2.0)
"""

from streamgrad.noise.shaping import diagonal_q0
from streamgrad.theory import blockwise
from streamgrad.theory.empirical import Empirical, empirical
from streamgrad.theory.episode import Episode, collect
from streamgrad.theory.equilibrate import Solution, optimal_alpha
from streamgrad.theory.greedy import Expectations, Greedy, greedy, greedy_coefficients
from streamgrad.theory.jacobian import JacobianTerms, jacobian_alpha, jacobian_terms, jacobian_variance
from streamgrad.theory.joint import Joint, optimise, partition
from streamgrad.theory.matrices import b_matrix, c_matrix
from streamgrad.theory.objective import (
    covariance,
    preuoro_covariance,
    preuoro_total_variance,
    preuoro_v,
    spatial_total_variance,
    total_variance,
    v,
)
from streamgrad.theory.online_b import BEstimate, BNoise, draw_b_noise, estimate_b
from streamgrad.theory.optimal_q import (
    Gain,
    TraceProduct,
    minimise_trace_product,
    optimal_q0,
    predicted_gain,
)
from streamgrad.theory.state_noise import score_variance, state_q0

__all__ = [
    "BEstimate",
    "BNoise",
    "Empirical",
    "Episode",
    "Expectations",
    "Gain",
    "Greedy",
    "JacobianTerms",
    "Joint",
    "Solution",
    "TraceProduct",
    "b_matrix",
    "blockwise",
    "c_matrix",
    "collect",
    "covariance",
    "diagonal_q0",
    "draw_b_noise",
    "empirical",
    "estimate_b",
    "greedy",
    "greedy_coefficients",
    "jacobian_alpha",
    "jacobian_terms",
    "jacobian_variance",
    "minimise_trace_product",
    "optimal_alpha",
    "optimal_q0",
    "optimise",
    "partition",
    "predicted_gain",
    "preuoro_covariance",
    "preuoro_total_variance",
    "preuoro_v",
    "score_variance",
    "spatial_total_variance",
    "state_q0",
    "total_variance",
    "v",
]
