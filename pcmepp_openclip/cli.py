"""`pcmepp COMMAND ...`: the module that runs a command imports torch, so it is imported after the flags are read."""

import importlib
import os
import pkgutil
import signal
import sys
from typing import Any

from .system.errors import RunFailed
from .system.redact import printable
from .system.version import __version__

COMMANDS = {  # name: (the function that makes its parser without torch, the module that runs it, a summary)
    "train": (None, "training.command", "train a PCME++ model, or any other, with open_clip's training loop"),
    "convert": ("models.convert:parser", "models.convert", "convert a PCME++ checkpoint to a plain open_clip CLIP"),
    "push": ("hub.command:parser", "hub.command", "push a run or a checkpoint to the Hugging Face Hub"),
    "data": ("data.command:parser", "data.command", "count and check training shards"),
    "eval": (
        "commands.evaluation:eval_parser",
        "evaluation.command",
        "evaluate retrieval, zero-shot classification and uncertainty",
    ),
    "bank": (
        "commands.bank:bank_parser",
        "ambiguity.commands:make_bank",
        "make the bank of reference pairs that tells what the model confuses",
    ),
    "calibrate": (
        "commands.bank:calibrate_parser",
        "ambiguity.commands:calibrate",
        "fit the probability that an image and a text match",
    ),
    "demo": (
        "demo.command:parser",
        "demo.command",
        "train a small model on drawn scenes and measure its uncertainty",
    ),
}
MOVED = {"paper": "python -m research.paper", "toy": "python -m research.toy"}  # studies are no part of the package


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code. Without `argv`, the arguments are those of this process."""
    if argv is not None:
        return run(argv)
    code = 1
    try:
        try:
            code = run(sys.argv[1:])
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        command = sys.argv[1:2]
        hint = " Start again with --resume latest and the --name of the run." if command == ["train"] else ""
        print(f"\n{' '.join(['pcmepp', *command])}: interrupted.{hint}", file=sys.stderr)
        code = 128 + signal.SIGINT
    except BrokenPipeError:  # `pcmepp ... | head`: the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains at exit
        code = 128 + signal.SIGPIPE
    finally:
        if "pcmepp_openclip.training.command" in sys.modules:
            from .system.processes import leave_soon

            leave_soon(code)
    return code


def run(argv: list[str]) -> int:
    """Run a command and return its exit code; a mistake of the user is a message, other errors are bugs."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: pcmepp COMMAND ...   (pcmepp COMMAND --help lists its options, pcmepp --version the version)\n")
        for name, (_, _, summary) in COMMANDS.items():
            print(f"  {name:10} {summary}")
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"pcmepp-openclip {__version__}")
        return 0
    if argv[0] in MOVED:
        print(f"pcmepp {argv[0]}: run `{MOVED[argv[0]]}` in a clone of the repository instead.", file=sys.stderr)
        return 2
    if argv[0] not in COMMANDS:
        print(f"pcmepp: unknown command '{argv[0]}'; commands: {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    parser, module, _ = COMMANDS[argv[0]]
    try:
        args: Any = argv[1:]  # a command without a parser reads its flags itself
        if parser is not None:
            args = pkgutil.resolve_name(f"{__package__}.{parser}")().parse_args(args)
        if argv[0] != "data":
            from . import plugin  # noqa: F401  registers the models
        name, _, function = module.partition(":")
        return getattr(importlib.import_module(f"{__package__}.{name}"), function or "main")(args) or 0
    except (ValueError, RunFailed) as error:
        print(f"pcmepp {argv[0]}: {printable(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1


if __name__ == "__main__":
    sys.exit(main())
