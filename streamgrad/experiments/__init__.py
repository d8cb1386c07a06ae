"""The paper's figures, and ours: one file each, its configuration on top.

To add an experiment: write its file with an `EXPERIMENT`, and add its line here.
"""

import importlib

from streamgrad.experiments.base import Claim, Experiment, Section, Table

# In the order of the report. Imported when asked for: each draws in the training loop and matplotlib.
MODULES = {
    "variance": "streamgrad.experiments.variance",
    "ablation": "streamgrad.experiments.ablation",
    "carried": "streamgrad.experiments.carried",
}


def find_experiment(name: str) -> Experiment:
    """The experiment of that name."""
    if name not in MODULES:
        raise ValueError(f"experiment must be one of {', '.join(MODULES)}, not {name!r}.")
    return importlib.import_module(MODULES[name]).EXPERIMENT


__all__ = ["MODULES", "Claim", "Experiment", "Section", "Table", "find_experiment"]
