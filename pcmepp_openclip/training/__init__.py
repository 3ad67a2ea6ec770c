"""Training by open_clip's loop: the command, and what hooks into that loop."""
