"""`pcmepp COMMAND ...`. Each command is a module with a `main(argv)`, imported only when it is called."""

import importlib
import os
import signal
import sys

from .system import launcher
from .system.errors import RunFailed

COMMANDS = {  # name: (module, what it does)
    "train": ("pcmepp_openclip.training.command", "open_clip's training, for PCME++ models too"),
    "convert": ("pcmepp_openclip.models.convert", "turn a PCME++ checkpoint into a plain open_clip CLIP one"),
    "push": ("pcmepp_openclip.hub.command", "put a run or a checkpoint on the Hugging Face Hub"),
    "data": ("pcmepp_openclip.data.command", "count and check the shards to train on"),
    "eval": ("pcmepp_openclip.evaluation.command", "retrieval, zero-shot, and what the uncertainty means"),
    "demo": ("pcmepp_openclip.demo.command", "train a small model on drawn scenes, see what its uncertainty means"),
}


def main(argv: list[str] | None = None) -> int:
    """The exit code of a command; without arguments, those of this process, which then ends."""
    if argv is not None:
        return run(argv)
    code = 1
    try:
        try:
            code = run(sys.argv[1:])
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"\n{' '.join(['pcmepp', *sys.argv[1:2]])}: interrupted.", file=sys.stderr)
        code = 128 + signal.SIGINT
    except BrokenPipeError:  # `pcmepp ... | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python says so when it ends
        code = 128 + signal.SIGPIPE
    finally:
        if "pcmepp_openclip.training.command" in sys.modules:
            from .system.processes import leave_soon

            leave_soon(code)
    return code


def run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: pcmepp COMMAND ...   (pcmepp COMMAND --help for its options)\n")
        for name, (_, summary) in COMMANDS.items():
            print(f"  {name:10} {summary}")
        return 0 if argv else 2
    if argv[0] == "--version":
        from . import __version__

        print(f"pcmepp-openclip {__version__}")
        return 0
    if argv[0] not in COMMANDS:
        print(f"pcmepp: there is no command '{argv[0]}'; there are: {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    command = importlib.import_module(COMMANDS[argv[0]][0])
    launcher.hear_ctrl_c()
    try:
        return command.main(argv[1:]) or 0
    except (ValueError, RunFailed) as error:  # said in one sentence; anything else is a bug, and a traceback
        from .system.redact import printable

        print(f"pcmepp {argv[0]}: {printable(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1


if __name__ == "__main__":
    sys.exit(main())
