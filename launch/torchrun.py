"""torchrun with an exit code that tells whether another start would help: that of the first rank that failed.

    0      done
    2      a mistake in the flags or the data, which would fail every time
    75     stopped on request and saved: the same command resumes the run
    128+N  ended by signal N

torchrun itself exits with 1 in all of these cases but the first.
"""

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

EXPLAINED = (2, 75)  # by the rank, in one sentence


def run(argv: list[str]) -> int:
    try:
        main(argv)
    except ChildFailedError as failed:
        code = failed.get_first_failure()[1].exitcode
        if code not in EXPLAINED:
            print(failed, file=sys.stderr)
        return code if code >= 0 else 128 - code
    except SignalException as ended:
        return 128 + ended.sigval
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
