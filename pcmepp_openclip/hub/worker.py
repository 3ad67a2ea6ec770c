"""The process that pushes for a training run. Started by the run's `Pusher`, which it talks to in lines of JSON.

In:  first {"target", "run", "license", "tag"}, then {"checkpoint", "step"} for each one, {"finish": true} at the end.
Out: {"pushed": step, "url"} and {"said": a sentence}.

Only the newest checkpoint is kept waiting. If the training process dies, so does this one.
"""

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from . import queue

_parent = os.fdopen(os.dup(1), "w")


class Superseded(Exception):
    """There is a newer checkpoint: no use in trying this one again."""


class Inbox:
    """The newest checkpoint that is waiting, filled by a thread that reads stdin."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.newest: dict | None = None
        self.closed = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            message = json.loads(line)
            with self._changed:
                if "finish" in message:
                    self.closed = True
                else:
                    if self.newest is not None:
                        queue.drop(Path(self.newest["checkpoint"]))
                    self.newest = message
                self._changed.notify()
        if not self.closed:
            os._exit(1)  # the run was killed, and may already be running again

    def take(self) -> dict | None:
        """The next one, waited for; None when there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self.newest is not None or self.closed)
            message, self.newest = self.newest, None
            return message


def main() -> None:
    os.dup2(2, 1)  # what a library prints is not for the parent
    settings = json.loads(sys.stdin.readline())
    inbox = Inbox()
    os.nice(19)
    import torch

    torch.set_num_threads(1)
    while (message := inbox.take()) is not None:
        try:
            tell(pushed=message["step"], url=push(message, settings, inbox))
        except Superseded:
            pass
        except ValueError as error:
            tell(said=f"step {message['step']} was not pushed. {error}")
        except Exception as error:  # not one of the Hub's: said in short, and the next checkpoint tries again
            from .errors import clean

            tell(said=f"step {message['step']} was not pushed: {type(error).__name__}: {clean(str(error))}.")
        finally:
            queue.drop(Path(message["checkpoint"]))


def push(message: dict, settings: dict, inbox: Inbox) -> str:
    import tempfile

    from . import staging, upload

    def say(line: str) -> None:
        tell(said=line)
        if inbox.newest is not None:
            raise Superseded

    run = Path(settings["run"])
    target = upload.HubTarget(**settings["target"])
    with tempfile.TemporaryDirectory(dir=run, prefix=queue.STAGING) as place:
        request = staging.PushRequest(Path(message["checkpoint"]), target.repo_id, settings["license"], run=run)
        text = staging.stage(request, Path(place))
        tag = f"step-{message['step']}" if settings["tag"] else None
        return upload.push(Path(place), target, text, tag, say).url


def tell(**word: Any) -> None:
    print(json.dumps(word), file=_parent, flush=True)


if __name__ == "__main__":
    main()
