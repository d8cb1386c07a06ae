"""`streamgrad estimators`: the registry as a table."""

import dataclasses
import json

from streamgrad_lab.cli.show import print_table


@dataclasses.dataclass(frozen=True)
class Options:
    """List the estimators and what they promise.

    S state units, N preactivations, P recurrent parameters, G groups, T steps in a chunk; time and memory for one
    stream, up to a constant.
    """

    json: bool = False
    """Print JSON, for a program to read."""


def main(options: Options) -> None:
    """Print them."""
    from streamgrad.estimators import REGISTRY

    rows = REGISTRY.values()
    fields = ("name", "promise", "time", "memory", "cuts", "summary")
    if options.json:
        print(json.dumps([{field: getattr(row, field) for field in fields} for row in rows], indent=2))
        return
    print_table(["estimator", "what it is"], [[row.name, row.summary] for row in rows])
    print()
    costs = [[row.name, row.promise, row.time, row.memory, ", ".join(row.cuts) or "none"] for row in rows]
    print_table(["estimator", "gradient", "time/step", "memory", "cuts"], costs)
