"""How noisy a gradient estimate is, and what would make it less so (Sections 6 to 8, appendices A to F and H).

ep = sg.theory.collect(model, params, chunk)
sol = sg.theory.optimal_alpha(sg.theory.c_matrix(ep))
sg.theory.total_variance(ep, sol.alpha, kurtosis=-2.0)

`collect(..., keep=False)` is for long streams, whose T² N gradients do not fit in memory; all else stays the same.
Arguments come in one order: episode, alpha, q0, groups, kurtosis. `groups` is the number asked for, as in `uoro`; which
entry is in which group is a `partition`.
"""

from streamgrad.noise.shaping import diagonal_q0
from streamgrad.theory.chunk_variance import across_variance, collect_chunks
from streamgrad.theory.covariance import covariance
from streamgrad.theory.empirical import Empirical, empirical
from streamgrad.theory.episode import Episode, collect
from streamgrad.theory.equilibrate import Solution, optimal_alpha
from streamgrad.theory.greedy import Greedy, greedy_alpha, greedy_coefficients
from streamgrad.theory.jacobian import JacobianTerms, jacobian_alpha, jacobian_terms, jacobian_variance
from streamgrad.theory.joint import Joint, optimise
from streamgrad.theory.matrices import b_matrix, c_matrix
from streamgrad.theory.objective import spatial_total_variance, total_variance, v
from streamgrad.theory.online_b import BEstimate, BNoise, draw_b_noise, estimate_b_online
from streamgrad.theory.optimal_q import Gain, TraceProduct, minimise_trace_product, optimal_q0, predicted_gain
from streamgrad.theory.spatial import partition
from streamgrad.theory.state_noise import score_variance, state_q0

__all__ = [
    "BEstimate",
    "BNoise",
    "Empirical",
    "Episode",
    "Gain",
    "Greedy",
    "JacobianTerms",
    "Joint",
    "Solution",
    "TraceProduct",
    "across_variance",
    "b_matrix",
    "c_matrix",
    "collect",
    "collect_chunks",
    "covariance",
    "diagonal_q0",
    "draw_b_noise",
    "empirical",
    "estimate_b_online",
    "greedy_alpha",
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
    "score_variance",
    "spatial_total_variance",
    "state_q0",
    "total_variance",
    "v",
]
