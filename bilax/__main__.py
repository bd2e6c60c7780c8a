"""`python -m bilax` is `bilax`."""

from bilax.app.cli import main

main()
