"""`python -m streamgrad_lab.cli`; `streamgrad`, or `python -m streamgrad_lab.command`, answers Ctrl-C a second earlier."""

from streamgrad_lab.command import main

main()
