"""The output of a `pipe:` command. Only commands that the user wrote on the command line are given to a shell."""

import contextlib
import os
import select
import signal
import subprocess

from . import pace as pacing
from .pace import Pace
from .resuming import Opened, Opener, SourceError


class CommandOutput:
    """The standard output of a command. Its end counts as the end of the shard only if the command succeeded.

    Its standard error is not shown, since it may quote secrets.
    """

    def __init__(self, command: str, pace: Pace):
        self._pace = pace
        self._process = subprocess.Popen(
            command,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdout is not None
        self._stdout = self._process.stdout
        self._poll = select.poll()
        self._poll.register(self._stdout, select.POLLIN)

    def read(self, size: int) -> bytes:
        while not self._poll.poll(1000 * pacing.SLOW_NOTICE_S):
            self._pace.received(0)
        data = self._stdout.read(size)
        self._pace.received(len(data))
        if not data and (status := self._process.wait()) != 0:
            raise SourceError(f"the command ends with exit status {status}")
        return data

    def close(self) -> None:
        self._stdout.close()
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # this ends the shell and everything that it started
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def command_opener(command: str, pace: Pace) -> Opener:
    def open_at(position: int) -> Opened:
        return Opened(CommandOutput(command, pace), 0, None, has_ranges=False, has_version=False)

    return open_at
