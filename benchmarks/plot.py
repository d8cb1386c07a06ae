"""Draw `results/cost_<preset>.csv` as `results/cost_<preset>.png`: time in multiples of BPTT, and memory over T.

    python -m benchmarks.plot

Needs matplotlib (the extra `cli`).
"""

from pathlib import Path

from streamgrad_lab.tables import read_rows

RESULTS = Path(__file__).parent / "results"
SHOWN = ("bptt", "hand-written scan", "uoro, no rescaling", "uoro", "uoro, plain form")
COLOURS = ("#555555", "#aaaaaa", "#8fbcdb", "#1f6fb2", "#d9822b")


def draw(source: Path) -> Path:
    """One figure of two panels for one CSV."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = read_rows(source)
    sizes = [row for row in rows if row["section"] == "size" and row["length"] == 64]
    labels = list(dict.fromkeys((row["cell"], int(row["hidden"]), int(row["streams"])) for row in sizes))
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.2), width_ratios=(3, 1.2), layout="constrained")
    width = 0.16
    for i, (name, colour) in enumerate(zip(SHOWN, COLOURS, strict=True)):
        here = [row for row in sizes if row["estimator"] == name]
        found = {(r["cell"], int(r["hidden"]), int(r["streams"])): float(r["times_bptt"]) for r in here}
        x = [j + (i - 2) * width for j, label in enumerate(labels) if label in found]
        y = [found[label] for label in labels if label in found]
        left.bar(x, y, width, color=colour, label=name)
        for a, b in zip(x, y, strict=True):
            left.text(a, b * 1.04, f"{b:.1f}", ha="center", fontsize=6.5)
    left.set_yscale("log")
    left.axhline(1, color="black", linewidth=0.8)
    left.set_xticks(range(len(labels)), [f"{cell}\nH {h}\n{b} streams" for cell, h, b in labels], fontsize=8)
    left.set_ylabel("time per step / BPTT")
    left.set_title(f"{rows[0]['device']}, chunks of 64 steps: time in multiples of BPTT", fontsize=10)
    left.legend(fontsize=8, frameon=False, ncols=5, loc="upper left")
    left.set_ylim(top=left.get_ylim()[1] * 2)
    memory = [row for row in rows if row["section"] == "memory"]
    for name, colour in (("bptt", COLOURS[0]), ("uoro", COLOURS[3])):
        here = [r for r in memory if r["estimator"] == name]
        total = [float(r["temp_mib"]) + float(r["state_mib"]) for r in here]
        right.plot([int(r["length"]) for r in here], total, "o-", color=colour, label=name)
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.set_xlabel("T, steps of the sequence")
    right.set_ylabel("MiB")
    first = memory[0]
    right.set_title(f"memory: {first['cell']}, H {first['hidden']:g}, {first['streams']:g} streams", fontsize=10)
    right.legend(frameon=False, fontsize=9)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    target = source.with_suffix(".png")
    figure.savefig(target, dpi=130)
    plt.close(figure)
    return target


if __name__ == "__main__":
    for csv_file in (RESULTS / "cost_cpu.csv", RESULTS / "cost_gpu.csv"):
        print(draw(csv_file))
