"""`pcmepp COMMAND ...`. Each command is a module with a `main(argv)`, imported only when it is called."""

import importlib
import sys

COMMANDS = {  # name: (module, what it does)
    "train": ("pcmepp_openclip.train", "open_clip's training, for PCME++ models too"),
    "convert": ("pcmepp_openclip.convert", "turn a PCME++ checkpoint into a plain open_clip CLIP one"),
    "push": ("pcmepp_openclip.hub.command", "put a run or a checkpoint on the Hugging Face Hub"),
    "data": ("pcmepp_openclip.data.command", "count and check the shards to train on"),
    "eval": ("pcmepp_openclip.evaluation.command", "retrieval, zero-shot, and what the uncertainty means"),
    "demo": ("pcmepp_openclip.demo.command", "train a small model on drawn scenes, see what its uncertainty means"),
}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
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
    try:
        return command.main(argv[1:]) or 0
    except ValueError as error:  # a mistake of the user's, said in one sentence; anything else is a traceback
        from .data.redact import printable

        print(f"pcmepp {argv[0]}: {printable(str(error))}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
