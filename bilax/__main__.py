"""`python -m bilax` is `bilax`."""

from bilax.cli import main

main()
