"""`pcmepp eval` for `ranks.py`: without figures, in chunks so small that a small dataset has work for several ranks."""

from pcmepp_openclip.cli import run
from pcmepp_openclip.encode import encode
from pcmepp_openclip.reports import report

encode.CHUNK = 16
report.write_report = lambda folder, *args: folder / "index.html"


def main(argv):
    return run(["eval", *argv])
