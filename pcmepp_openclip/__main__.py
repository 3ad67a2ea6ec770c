"""`python -m pcmepp_openclip [-m MODULE | SCRIPT] ARGS...`: run any program with the PCME++ models registered.

Python has imported the package, which registers them, before this module runs the program in the same process.
torchrun starts its ranks as new processes, which need it too:

    torchrun --nproc-per-node 8 -m -- pcmepp_openclip -m open_clip_train.main --model PCMEpp-ViT-B-16 ...
"""

import os
import runpy
import sys

USAGE = "usage: python -m pcmepp_openclip [-m MODULE | SCRIPT] ARGS...   runs it with the PCME++ models registered"


def main(program: list[str]) -> None:
    """Run `program`, the words after `python`, as Python would: its name, `sys.argv` and `sys.path` are the same."""
    if program[:1] == ["-m"] and len(program) > 1:
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    elif program and os.path.exists(program[0]):
        sys.argv = program
        if not sys.flags.safe_path:
            del sys.path[0]  # Python puts the current folder there for `-m` only
            if os.path.isfile(program[0]):
                sys.path.insert(0, os.path.dirname(os.path.realpath(program[0])))
        runpy.run_path(program[0], run_name="__main__")
    elif not program or program[0].startswith("-"):
        print(USAGE)
        sys.exit(0 if program and program[0] in ("-h", "--help") else 2)
    else:
        sys.exit(f"python -m pcmepp_openclip: there is no file {program[0]}; {USAGE}")


if __name__ == "__main__":
    main(sys.argv[1:])
