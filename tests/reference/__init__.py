"""The textbook versions of everything: slow and obvious, with the paper's equation numbers.

`unrolled` has the network step by step and the only Jacobians; `estimators` the recursions of the algorithms over
them, `theory` the equations of the variance.
"""
