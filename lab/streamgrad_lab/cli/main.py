"""`streamgrad COMMAND …`: finds the command, and answers errors of the user in one sentence.

To add a command: write `cli/<name>.py` with a dataclass `Options`, whose docstring is the help, and a
`main(options) -> int | None`, and add its line here. One that must do without tyro has a `parse(argv)` instead.
"""

import contextlib
import importlib
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from streamgrad_lab import interrupts
from streamgrad_lab.cli.options import UsageError
from streamgrad_lab.files import FULL

# Each is imported when it is called: not every machine has what the others need.
COMMANDS = {
    "train": "train any cell with any estimator on any task",
    "reproduce": "run the paper's experiments and write a report",
    "report": "write the report of a run again",
    "compare": "bias, variance, time and memory of every estimator for a model",
    "estimators": "list the estimators and what they promise",
    "data": "fetch or check data sets",
}


def usage() -> str:
    """The answer to `--help`."""
    lines = ["usage: streamgrad COMMAND [OPTIONS]", "", "Online gradients of recurrent networks.", "", "commands:"]
    lines += [f"  {name:12s} {what}" for name, what in COMMANDS.items()]
    return "\n".join([*lines, "", "`streamgrad COMMAND --help` lists a command's options."])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
      argv: its name and options. None for those of the process, which the command then ends.

    Returns:
      The exit code: 0, or 1 where something failed, 2 where the command line was wrong, 130 after Ctrl-C, 143 after
      SIGTERM.
    """
    if argv is None:
        interrupts.run_process(lambda: answer(sys.argv[1:]))
    with interrupts.handling():
        return answer(argv)


def answer(argv: Sequence[str]) -> int:
    """Find the command, run it, and say what is wrong; returns the exit code."""
    name, *rest = [*argv] or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name in ("-V", "--version"):
        from importlib.metadata import version

        print(f"streamgrad {version('streamgrad')}")
        return 0
    if name not in COMMANDS:
        print(f"streamgrad: there is no command {name!r}; choose from {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    try:
        with warnings_on_screen():
            return run_command(name, rest)
    except (ValueError, OSError, ArithmeticError) as error:  # what a user can mend; the rest keeps its traceback
        if interrupts.asked():  # what Ctrl-C became on its way
            return interrupts.say_stopped()
        said = str(error)
        if isinstance(error, OSError) and error.errno in FULL and error.filename is None:
            said = f"cannot write its output: {error.strerror}."  # an error of ours would name a file
        print(f"streamgrad {name}: {said}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        return interrupts.say_stopped()


@contextlib.contextmanager
def warnings_on_screen() -> Iterator[None]:
    """Print our own warnings as they are: other libraries may have set up the log for themselves."""
    log, handler = logging.getLogger("streamgrad"), logging.StreamHandler()
    log.addHandler(handler)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = True


def run_command(name: str, rest: Sequence[str]) -> int:
    """Run the command of that name with its options; returns the exit code."""
    try:
        command = importlib.import_module(f"streamgrad_lab.cli.{name}")
    except ImportError as error:
        print(f'streamgrad {name} needs {error.name}: pip install "streamgrad[lab]".', file=sys.stderr)
        return 1
    try:
        options = command.parse(rest) if hasattr(command, "parse") else parse(name, command.Options, rest)
    except SystemExit as stop:  # after --help or a wrong option, which the parser has answered
        return int(stop.code or 0)
    return command.main(options) or 0


def parse(name: str, kind: type, rest: Sequence[str]) -> Any:
    """The options of a command by tyro, from their dataclass."""
    import tyro

    return tyro.cli(kind, prog=f"streamgrad {name}", args=rest, config=(tyro.conf.FlagCreatePairsOff,))
