"""Start a study as `pcmepp` starts its commands: a user's mistake is one sentence, and a bug a traceback."""

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
    except (ValueError, RunFailed) as error:
        print(f"python -m {name}: {printable(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        print(f"\npython -m {name}: interrupted.", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0
