"""`pcmepp eval` with chunks so small that a small dataset has work for several ranks; run by `ranks.py`."""

from pcmepp_openclip.evaluation import encode
from pcmepp_openclip.evaluation.command import main

encode.CHUNK = 16
__all__ = ["main"]
