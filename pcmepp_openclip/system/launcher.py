"""`python -m pcmepp_openclip [-m MODULE | SCRIPT] ARGS...`: any program, with the plugin registered.

The command is run again without `-m pcmepp_openclip`, in the same process, by Python itself: exit code, `sys.argv`
and tracebacks are its own. What registers the plugin is a `sitecustomize` on PYTHONPATH (folder `launcher_hook`): it
waits for the program to import open_clip. Programs that the program starts inherit it: torchrun's workers, the
kernels of a notebook server.
"""

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

HOOK = Path(__file__).parent / "launcher_hook"
OWN_COMMANDS = ("pcmepp_openclip.cli", "pcmepp_openclip.train")
USAGE = "usage: python -m pcmepp_openclip [-m MODULE | SCRIPT] ARGS...   runs it with the PCME++ models registered"


def hand_over() -> None:
    """A process that was started as `python -m pcmepp_openclip PROGRAM` becomes PROGRAM; for others nothing happens.

    Called while the package is imported, before what takes seconds: Python imports a package before its `__main__`.
    """
    if sys.argv[:1] == ["-m"] and _command() is not None:
        main()


def expect_ctrl_c() -> None:
    """While `pcmepp` imports what it needs, for seconds: Ctrl-C ends it without a traceback from within."""
    ours = Path(sys.argv[0]).name == "pcmepp" if sys.argv[:1] != ["-m"] else _module() in OWN_COMMANDS
    if ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)


def _interrupted(_number: int, _frame: Any) -> None:
    os.write(2, b"pcmepp: interrupted.\n")
    os._exit(128 + signal.SIGINT)


def hear_ctrl_c() -> None:
    """From now on it is a KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> None:
    command = _command()
    if command is None or len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(USAGE)
        sys.exit(0 if sys.argv[1:2] in (["-h"], ["--help"]) else 2)
    if sys.flags.ignore_environment or sys.flags.no_site:
        sys.exit("python -m pcmepp_openclip works by PYTHONPATH: drop the options -E, -I and -S.")
    path = os.environ.get("PYTHONPATH", "")  # kept as it is: an empty entry is the current folder
    if str(HOOK) not in path.split(os.pathsep):
        os.environ["PYTHONPATH"] = f"{HOOK}{os.pathsep}{path}" if path else str(HOOK)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *command])


def _module() -> str | None:
    """What Python was told to run by `-m`, or None."""
    arguments = sys.orig_argv[1:]
    return arguments[arguments.index("-m") + 1] if "-m" in arguments[:-1] else None


def _command() -> list[str] | None:
    """Python's command line without `-m pcmepp_openclip`, however it was written; None if it was not there."""
    for i, argument in enumerate(sys.orig_argv[1:], start=1):
        option = re.fullmatch("-([bBdEiIOPqRsSuvx]*)m(.*)", argument)  # -m NAME, -mNAME, or after other flags: -um
        if option:
            module, *rest = [option[2], *sys.orig_argv[i + 1 :]] if option[2] else sys.orig_argv[i + 1 :]
            flags = [f"-{option[1]}"] if option[1] else []
            return [*sys.orig_argv[1:i], *flags, *rest] if module == "pcmepp_openclip" else None
    return None
