"""What is in the wheels: each holds one package and its licence, and no file is in two of them.

python -m tests.base.wheels FOLDER
"""

import sys
from pathlib import Path
from zipfile import ZipFile


def problems(folder: Path) -> list[str]:
    """A sentence for each mistake in the wheels of a folder; none where all is well.

    Args:
      folder: of the wheels of streamgrad and streamgrad-lab.

    Returns:
      The sentences.
    """
    held = {path.name.split("-")[0]: set(ZipFile(path).namelist()) for path in sorted(folder.glob("*.whl"))}
    if list(held) != ["streamgrad", "streamgrad_lab"]:
        return [f"{folder} has wheels of {', '.join(held) or 'no package'}, not of streamgrad and streamgrad_lab."]
    found = [f"{name} is in both wheels." for name in sorted(set.intersection(*held.values()))]
    for package, names in held.items():
        others = {name.split("/")[0] for name in names} - {package}
        metadata = [other for other in others if other.startswith(f"{package}-") and other.endswith(".dist-info")]
        found += [f"the wheel of {package} has {other}." for other in sorted(others - set(metadata))]
        wanted = [f"{package}/__init__.py", f"{package}/py.typed", *(f"{one}/licenses/LICENSE" for one in metadata)]
        found += [f"the wheel of {package} lacks {name}." for name in wanted if name not in names]
    return found


if __name__ == "__main__":
    sys.exit("\n".join(problems(Path(sys.argv[1]))) or None)
