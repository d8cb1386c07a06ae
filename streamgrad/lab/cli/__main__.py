"""`python -m streamgrad.lab.cli`."""

import sys

from streamgrad.lab.cli.main import main

sys.exit(main())
