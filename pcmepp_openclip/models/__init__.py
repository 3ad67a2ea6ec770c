"""The PCME++ model: its towers, its state dicts, and the folders that it is exported to."""
