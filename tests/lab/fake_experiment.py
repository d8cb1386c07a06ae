"""A small experiment for the tests of the report and of the command line: it draws, claims, fails and is resumed."""

import csv
import dataclasses
import os
from pathlib import Path

from streamgrad_lab.experiments.base import Claim, Experiment, Section, Table

NASTY = '<script>console.error("not escaped")</script> & "quoted"'


@dataclasses.dataclass(frozen=True)
class Config:
    updates: int = 3
    learning_rates: tuple[float, ...] = (0.1, 0.01)
    note: str = NASTY
    seed: int = 0


def run(config: Config, folder: Path, progress, resume: bool = False, data=None) -> None:
    path = folder / "curve.csv"
    done = []
    if os.environ.get("FAKE_STOPS_AT") == "start":
        raise OSError("it was not to be run")
    if resume and path.exists():
        done = path.read_text().splitlines()[1:]
    for update in range(len(done), config.updates):
        if os.environ.get("FAKE_STOPS_AT") == str(update):
            raise OSError(28, "No space left on device", str(path))
        progress("one", update, config.updates, "loss 1.0")
        done.append(f"{update},{1 / (1 + update)},{config.seed}")
        path.write_text("\n".join(["update,loss,seed", *done, ""]))
    progress("one", config.updates, config.updates, "loss 0.3")


def sections(folder: Path) -> list[Section]:
    from matplotlib.figure import Figure

    with (folder / "curve.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    updates, losses = [int(row["update"]) for row in rows], [float(row["loss"]) for row in rows]
    found = []
    for panels in (1, 3):
        figure = Figure(figsize=(4 * panels, 3))
        for ax in figure.subplots(1, panels, squeeze=False)[0]:
            ax.plot(updates, losses, "o-", label=r"loss $\alpha_s$")
            ax.plot(updates, losses[::-1], "k--", label="black")
            ax.set(xlabel="update", ylabel="loss", title="A figure")
            ax.grid()
            ax.legend()
        claims = [Claim(f"Claim with {NASTY}.", holds, f"{losses[-1]:.2f}") for holds in (True, False, None)]
        table = Table([f"a rather long column {i}" for i in range(8)], [[NASTY[:30]] * 8, ["1.0"] * 8])
        found.append(Section(f"{panels} panels", figure, "Seen.\n\nAlso.", claims, table, ["curve.csv"]))
    return found


EXPERIMENT = Experiment("fake", "Figure 0: a curve", {"smoke": Config(), "laptop": Config(9)}, run, sections)
