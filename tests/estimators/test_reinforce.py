"""REINFORCE as approximate RTRL (Section 9): equal to the textbook, unbiased for the noisy network, UORO in the limit.

Means over Gaussian noise are taken by quadrature where the network is small enough, so that they are exact. Where they
are sampled the seed is fixed, and each test says how often another seed would raise a false alarm.
"""
