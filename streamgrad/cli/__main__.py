"""`python -m streamgrad.cli`."""

import sys

from streamgrad.cli.main import main

sys.exit(main())
