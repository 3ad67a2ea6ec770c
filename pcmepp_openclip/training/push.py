"""`pcmepp train --push-to-hub ORG/NAME`: each finished checkpoint is pushed to the Hub while training continues.

A push is `pcmepp push` in a child process of low priority: a thread starts one after the other and logs what they
print. huggingface_hub's own background commits (`run_as_future`) and a commit in a daemon thread were measured instead:
Python waits at its exit for the threads that send files, until the Hub has taken all. A process can be killed.
"""

import contextlib
import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..hub import background, upload
from ..hub.upload import PermanentHubError, TransientHubError, clean
from ..system.processes import STOP_SIGNALS

END_TIMEOUT_S = 3600.0  # seconds that the last push may take when a run is through
STOP_TIMEOUT_S = 45.0  # seconds that it may take where the run was asked to stop, and may be killed soon
KILL_TIMEOUT_S = 5.0  # seconds that the end of a killed process may take
CHECK_TIMEOUT_S = 15.0  # seconds that the Hub may take to answer the check before the first step


def target_of(config: Any) -> upload.HubTarget | None:
    """Return the repo that --push-to-hub names, or None."""
    if config.push_to_hub is None:
        return None
    return upload.HubTarget(config.push_to_hub, private=config.hub_private, branch=config.hub_branch)


def check_access(target: upload.HubTarget | None) -> None:
    """Check before the first step that the token may write there, else ValueError; a Hub out of reach is a warning."""
    if target is None:
        return
    try:
        upload.check_access(target, silence=CHECK_TIMEOUT_S)
    except PermanentHubError as error:
        raise ValueError(f"--push-to-hub: {error}") from None
    except TransientHubError as passing:
        print(
            f"pcmepp train: --push-to-hub {target.repo_id}: {passing}. Training starts anyway; every checkpoint "
            "tries again.",
            file=sys.stderr,
        )


class Pusher:
    """Pushes the newest checkpoint of a run, one at a time. Does nothing without a target, as on ranks other than 0.

    Arguments:
        run: the run folder.
        license: the licence on the model card.
        tag: whether every pushed checkpoint is tagged.
    """

    def __init__(self, target: upload.HubTarget | None, run: Path, license: str = "mit", tag: bool = False):
        self.target, self.run, self.license, self.tag = target, run, license, tag
        self.queue = run / background.QUEUE
        self.held: tuple[Path, int] | None = None
        self.offered: int | None = None  # step of the last checkpoint that was handed over
        self.pushed: int | None = None  # step of the last one that is on the Hub
        self.process: subprocess.Popen | None = None
        self._waiting: tuple[Path, int] | None = None
        self._changed = threading.Condition()
        self._numbers = itertools.count()  # names of links
        self._finishing = False  # no further checkpoint will be handed over
        self._ended = False  # no push may go on
        self._warned = ""
        self._thread: threading.Thread | None = None

    @property
    def by_hand(self) -> str:
        assert self.target is not None
        return f"`pcmepp push {self.run} {' '.join(self.target.words)}`"

    def start(self) -> None:
        """Start the thread, which lets a process import what a push needs."""
        if self.target is not None and self._thread is None:
            shutil.rmtree(self.queue, ignore_errors=True)  # left by a run that was killed
            with contextlib.suppress(OSError):
                self.queue.mkdir()
            self._thread = threading.Thread(target=self._push_all, name="hub", daemon=True)
            self._thread.start()

    def offer(self, checkpoint: Path, step: int, hold: bool = False) -> None:
        """Hand over a finished checkpoint, at once or, with `hold`, when its validation is done."""
        if self.target is None:
            return
        self.start()
        self.held = self._link(checkpoint), step
        self.offered = step
        if not hold:
            self.release()

    def release(self) -> None:
        """Hand over the checkpoint that was held back."""
        if self.held is None:
            return
        logging.info("Hub: step %d is ready to be pushed.", self.held[1])
        with self._changed:
            if self._waiting is not None:
                self._unlink(self._waiting[0])
            self._waiting, self.held = self.held, None
            self._changed.notify()

    def finish(self, seconds: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """Let the last push end, for so long at most, less once `hurry` is true; then log whether it is there."""
        if self.target is None or self._thread is None:
            return
        self.release()
        with self._changed:
            self._finishing = True
            self._changed.notify()
        if self.pushed != self.offered:
            logging.info("Hub: pushing the last checkpoint to %s, for %d s at most.", self.target.repo_id, seconds)
        end, hurried = time.monotonic() + seconds, False
        while self._thread.is_alive() and time.monotonic() < end:
            self._thread.join(0.05)
            if not hurried and hurry():
                end, hurried = min(end, time.monotonic() + STOP_TIMEOUT_S), True
        with self._changed:
            self._ended = True
            if self.process is not None:
                self.process.kill()
        self._thread.join(KILL_TIMEOUT_S)
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(KILL_TIMEOUT_S)
        if self.offered is None:
            logging.info("Hub: there was no new checkpoint to push to %s.", self.target.repo_id)
        elif self.pushed == self.offered:
            logging.info("Hub: %s holds the last checkpoint, step %d.", self.target.repo_id, self.offered)
        else:
            logging.warning("Hub: the last checkpoint is not on the Hub yet: run %s.", self.by_hand)
        shutil.rmtree(self.queue, ignore_errors=True)

    def _link(self, checkpoint: Path) -> Path:
        """Link a checkpoint, which the run may delete. Where the file system has no links it is pushed if it is still
        there in its turn."""
        link = self.queue / f"{next(self._numbers)}.pt"
        try:
            os.link(checkpoint, link)
        except OSError:
            return checkpoint
        return link

    def _unlink(self, path: Path) -> None:
        if path.parent == self.queue:
            path.unlink(missing_ok=True)

    def _push_all(self) -> None:
        """Push what is handed over until the end of the run: the work of the thread."""
        # The processes that are started here never see these signals, which ask the run to save and push once more.
        signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGINT})
        while True:
            if not self._finishing:
                with contextlib.suppress(OSError):  # it is tried again when there is a checkpoint
                    self._ready_process()
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._finishing)
                if self._waiting is None or self._ended:
                    return
                (checkpoint, step), self._waiting = self._waiting, None
            try:
                self._push(checkpoint, step)
            except OSError as error:
                self._warn(f"step {step} was not pushed: {error}.")
            finally:
                self._unlink(checkpoint)

    def _ready_process(self) -> subprocess.Popen | None:
        """Return a process that can push, None when the run has ended."""
        with self._changed:
            if self._ended:
                return None
            if self.process is None or self.process.poll() is not None:
                self.process = background.start(self.queue)
            return self.process

    def _push(self, checkpoint: Path, step: int) -> None:
        assert self.target is not None
        arguments = [str(checkpoint), *self.target.words, "--license", self.license]
        arguments += ["--tag", f"step-{step}"] * self.tag
        process = self._ready_process()
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):  # it has just died, which its exit code tells
            process.stdin.write(json.dumps(arguments) + "\n")
            process.stdin.flush()
        superseded, line = False, ""
        for text in process.stdout:
            line = clean(text) or line
            if "trying again in" in text:
                self._warn(line)
                if self._waiting is not None:  # a newer one is not worth less, and may get through
                    superseded = True
                    process.kill()
        code = process.wait()
        if code == 0:
            self.pushed, self._warned = step, ""
            logging.info("Hub: pushed step %d: %s", step, line.rpartition(" ")[2])
        elif code < 0 and not (superseded or self._ended):
            self._warn(f"step {step} was not pushed: the process that pushes was killed (signal {-code}).")
        elif code > 0:
            self._warn(f"step {step} was not pushed. {line.removeprefix('pcmepp push: ')}")

    def _warn(self, sentence: str) -> None:
        if sentence != self._warned:  # once is enough
            self._warned = sentence
            logging.warning("Hub: %s Training continues.", sentence)
