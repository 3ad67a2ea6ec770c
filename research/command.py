"""Start a study as `pcmepp` starts its commands: a user's mistake is one sentence, and a bug a traceback."""

import os
import signal
import sys
from collections.abc import Callable, Sequence

from pcmepp_openclip.system.errors import RunFailed
from pcmepp_openclip.system.redact import printable


def run(name: str, main: Callable[[Sequence[str] | None], None], argv: Sequence[str] | None = None) -> int:
    """Call the `main` of the module `name` and return its exit code.

    Arguments:
        argv: the arguments; None for those of this process.
    """
    try:
        main(argv)
        sys.stdout.flush()
    except (ValueError, RunFailed) as error:
        print(f"python -m {name}: {printable(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        print(f"\npython -m {name}: interrupted.", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains at exit
        return 128 + signal.SIGPIPE
    return 0
