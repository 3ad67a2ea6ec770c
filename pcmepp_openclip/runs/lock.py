"""One run in a folder at a time, on one machine and over nodes.

The file `lock` of a run folder is locked by the operating system, which forgets the lock when the process dies. Not
every file system of a cluster tells other nodes of such locks, so the file also holds a sign of life, renewed every
few seconds: a run on another node that finds one watches whether it is renewed (then the folder is in use) or not any
more (then its writer is dead).

`filelock.SoftFileLease` does the latter by an exchange of two files, which NFS refuses: with version 4.2.10 the lock of
a killed run was never taken over there. It also cannot know that a run on another node has long been dead.
"""

import contextlib
import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from ..system.errors import RunFailed

NAME = "lock"
RENEW_EVERY_S = 10.0  # seconds between two signs of life
DEAD_AFTER_S = 45.0  # seconds without a sign of life
LEAVE_TIMEOUT_S = 5.0  # seconds that a run which was just killed may take to be gone, its data workers included
SIGN_BYTES = 512  # length of a sign of life, always the same, so that one is overwritten at once


class FolderInUse(RunFailed):
    """Another run works in the folder."""


def take_folder(folder: Path) -> "FolderLock":
    """Lock a run folder, and remove the marks of how an earlier start ended; FolderInUse if another run holds it."""
    lock = FolderLock(folder)
    lock.take()
    for name in ("done", "stopped"):
        (folder / name).unlink(missing_ok=True)
    return lock


class FolderLock:
    """The lock of a run folder, held from `take` to `release` or the end of the process, however it ends.

    `lost` names who has taken it over meanwhile, which can only be after this process stood still for long.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.lost: str | None = None
        self._sign = {"host": socket.gethostname(), "pid": os.getpid(), "machine": _machine(), "run": uuid.uuid4().hex}
        self._file = -1
        self._released = threading.Event()

    def take(self) -> None:
        """Lock the folder; FolderInUse if another run holds it."""
        self._file = os.open(self.folder / NAME, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._wait_for_this_machine()
            self._wait_for_another_machine()
            self._renew()
            self._check()
            if self.lost:  # without locks, the last to write of two that came at once has it
                raise self._in_use()
        except BaseException:
            os.close(self._file)
            raise
        threading.Thread(target=self._keep, daemon=True).start()

    def release(self) -> None:
        self._released.set()
        with contextlib.suppress(OSError):
            self._check()
            if not self.lost:
                os.ftruncate(self._file, 0)
        os.close(self._file)

    def _wait_for_this_machine(self) -> None:
        end = time.monotonic() + LEAVE_TIMEOUT_S
        while True:
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    raise self._in_use() from None
                time.sleep(0.1)
            except OSError:  # the file system has no locks: the signs of life must do
                return

    def _wait_for_another_machine(self) -> None:
        """Wait until the run that left a sign of life has ended or is known to be dead."""
        first = self._read()
        if not first or first.get("machine") == self._sign["machine"]:
            return  # on this machine the lock itself has decided
        age = self._age()
        if age < DEAD_AFTER_S:
            logging.info("%s was in use %.0f s ago by %s: waiting for a sign of life.", self.folder, age, _name(first))
        end = time.monotonic() + DEAD_AFTER_S - age
        while time.monotonic() < end:
            time.sleep(1)
            now = self._read()
            if not now:
                return
            if now != first:
                raise self._in_use()

    def _age(self) -> float:
        """Return the seconds since the last sign of life, by the clock of the file system alone."""
        probe = self.folder / f".{NAME}.{self._sign['run']}"
        try:
            probe.touch()
            return max(0.0, probe.stat().st_mtime - os.fstat(self._file).st_mtime)
        except OSError:
            return 0.0
        finally:
            with contextlib.suppress(OSError):
                probe.unlink()

    def _renew(self) -> None:
        sign = json.dumps({**self._sign, "sign": time.time_ns()}) + "\n"
        with contextlib.suppress(OSError):  # a full disk: the lock itself still holds
            os.pwrite(self._file, sign.encode().ljust(SIGN_BYTES), 0)

    def _read(self) -> dict[str, Any]:
        """Return the sign of life, {} where there is none."""
        try:
            # It is opened anew, since the buffers of an open file may lack what other nodes have written.
            sign = json.loads((self.folder / NAME).read_bytes()[: 2 * SIGN_BYTES])
        except (OSError, ValueError):
            return {}
        return sign if isinstance(sign, dict) else {}

    def _check(self) -> None:
        now = self._read()
        if now and now.get("run") != self._sign["run"]:
            self.lost = _name(now)

    def _keep(self) -> None:
        while not self._released.wait(RENEW_EVERY_S) and not self.lost:
            self._check()
            if not self.lost and not self._released.is_set():
                self._renew()

    def _in_use(self) -> FolderInUse:
        return FolderInUse(
            f"{self.folder} is in use by another run ({_name(self._read())}): wait for its end, stop it by "
            f"`touch {self.folder}/stop`, or give another --name."
        )


def _machine() -> str:
    """Return a name that all processes of this machine share, containers included, and no other machine has."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{socket.gethostname()} {uuid.getnode()}"


def _name(other: dict[str, Any]) -> str:
    return f"process {other['pid']} on {other['host']}" if {"pid", "host"} <= other.keys() else "of an unknown process"
