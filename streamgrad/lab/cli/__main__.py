"""`python -m streamgrad.lab.cli`; `streamgrad`, or `python -m streamgrad_command`, answers Ctrl-C a second earlier."""

from streamgrad_command import main

main()
