"""`python -m pcmepp_openclip [-m MODULE | SCRIPT] ARGS...`: any program, with the plugin registered.

The command is run again without `-m pcmepp_openclip`, in the same process, by Python itself: exit code, `sys.argv`
and tracebacks are its own. What registers the plugin is a `sitecustomize` on PYTHONPATH (folder `inherit`): it waits
for the program to import open_clip. Programs that the program starts inherit it: torchrun's workers, the kernels of
a notebook server.
"""

import os
import sys
from pathlib import Path

HOOK = Path(__file__).parent / "inherit"
USAGE = "usage: python -m pcmepp_openclip [-m MODULE | SCRIPT] ARGS...   runs it with the PCME++ models registered"


def starting() -> bool:
    """Whether this is the start of `python -m pcmepp_openclip`, before Python has found the module to run."""
    return sys.argv[:1] == ["-m"] and _position() is not None


def main() -> None:
    position = _position()
    if position is None or len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(USAGE)
        sys.exit(0 if sys.argv[1:2] in (["-h"], ["--help"]) else 2)
    if sys.flags.ignore_environment or sys.flags.no_site:
        sys.exit("python -m pcmepp_openclip works by PYTHONPATH: drop the options -E, -I and -S.")
    paths = [str(HOOK), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:position], *sys.orig_argv[position + 2 :]])


def _position() -> int | None:
    """Where `-m pcmepp_openclip` stands in the command line, or None."""
    for i, (option, value) in enumerate(zip(sys.orig_argv, sys.orig_argv[1:], strict=False)):
        if (option, value) == ("-m", "pcmepp_openclip"):
            return i
    return None
