"""The command `streamgrad`. Ctrl-C is answered from the first moment on, also while jax is being imported."""

import os
import signal
from typing import Any

# LAPACK's own threads and XLA's get in each other's way: an eigendecomposition may take 100 times as long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def stop_at_once(number: int, frame: Any) -> None:
    """End the process before anything has begun that could be lost."""
    del number, frame
    os.write(2, b"stopped.\n")
    os._exit(130)


def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGINT, stop_at_once)
    from streamgrad.lab.cli.main import main

    main()


if __name__ == "__main__":
    main()
