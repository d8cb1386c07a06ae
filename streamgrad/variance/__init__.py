"""How noisy a gradient estimate is, and what would make it less so (Sections 6 to 8, appendices A to F and H)."""

from streamgrad.variance.episode import Episode, collect
from streamgrad.variance.equilibrate import Solution, optimal_alpha
from streamgrad.variance.matrices import b_matrix, c_matrix
from streamgrad.variance.objective import (
    covariance,
    preuoro_covariance,
    preuoro_total_variance,
    preuoro_v,
    total_variance,
    v,
)
from streamgrad.variance.optimal_q import (
    Gain,
    TraceProduct,
    diagonal_q0,
    minimise_trace_product,
    optimal_q0,
    predicted_gain,
)

__all__ = [
    "Episode",
    "Gain",
    "Solution",
    "TraceProduct",
    "b_matrix",
    "c_matrix",
    "collect",
    "covariance",
    "diagonal_q0",
    "minimise_trace_product",
    "optimal_alpha",
    "optimal_q0",
    "predicted_gain",
    "preuoro_covariance",
    "preuoro_total_variance",
    "preuoro_v",
    "total_variance",
    "v",
]
