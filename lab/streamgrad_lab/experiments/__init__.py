"""The paper's figures, and ours: one file each, its configuration on top.

To add an experiment: write its file with an `EXPERIMENT`, and add its line here.
"""

import importlib

from streamgrad_lab.experiments.base import Claim, Experiment, Section, Table

# In the order of the report. Imported when asked for: each draws in the training loop and matplotlib.
MODULES = {
    "variance": "streamgrad_lab.experiments.variance",
    "ablation": "streamgrad_lab.experiments.ablation",
    "reinforce": "streamgrad_lab.experiments.reinforce",
    "carried": "streamgrad_lab.experiments.carried",
}

# Run when named, but no part of "all".
EXTRA = {
    "streams": "streamgrad_lab.experiments.streams",
    "tune": "streamgrad_lab.experiments.tune",
}


def find_experiment(name: str) -> Experiment:
    """The experiment of that name."""
    known = MODULES | EXTRA
    if name not in known:
        raise ValueError(f"experiment must be one of {', '.join(known)}, not {name!r}.")
    return importlib.import_module(known[name]).EXPERIMENT


__all__ = ["EXTRA", "MODULES", "Claim", "Experiment", "Section", "Table", "find_experiment"]
