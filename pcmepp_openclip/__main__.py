"""See `launcher.py`."""

from .system.launcher import main

main()
