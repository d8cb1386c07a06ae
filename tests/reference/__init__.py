"""The textbook versions of everything: slow and obvious, with the paper's equation numbers.

`unrolled` has the network step by step and the only Jacobians; `estimators` the recursions of the algorithms over
them, with those of `local` and `truncated`; `theory` the equations of the variance.
"""
