"""See `launcher.py`."""

from .launcher import main

main()
