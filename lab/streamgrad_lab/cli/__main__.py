"""`python -m streamgrad_lab.cli`: the command `streamgrad`."""

from streamgrad_lab.command import main

main()
