"""Writing files: their folder is checked before the work begins, and a file is written as a whole or not at all."""

import contextlib
import functools
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def check_folder(folder: Path, flag: str) -> None:
    """Make the folder if it is missing. Raise ValueError if no file can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        raise ValueError(
            f"{flag} {folder} cannot be written to ({error.strerror}): name another folder, or make room."
        ) from None


def warn_once_of_a_full_disk() -> None:
    """Print one warning for each log file that cannot be written, where logging prints a traceback for every line."""
    for handler in logging.root.handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handleError = functools.partial(_warn_once, handler, [])  # type: ignore[method-assign]


def _warn_once(handler: logging.FileHandler, warned: list[bool], record: logging.LogRecord) -> None:
    error = sys.exc_info()[1]
    if not isinstance(error, OSError):
        logging.FileHandler.handleError(handler, record)
    elif not warned:
        warned.append(True)
        why = f"{handler.baseFilename} cannot be written ({error.strerror}): lines of the log are missing in it."
        print(f"pcmepp train: {why}", file=sys.stderr, flush=True)


def save_tensors(tensors: "Mapping[str, Tensor]", path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a .safetensors or a .pt file in one step. Raise ValueError if it cannot be written."""

    def save(temporary: Path) -> None:
        if path.suffix == ".pt":
            import torch

            return torch.save(dict(tensors), temporary)
        from safetensors.torch import save_file

        mode = temporary.stat().st_mode & 0o777
        save_file(dict(tensors), temporary, metadata=metadata)
        temporary.chmod(mode)  # safetensors makes its file private whatever the umask is

    write_whole(path, save)


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Call `write` with a temporary file next to `path`, then rename that to `path`. Raise ValueError if that fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.open("wb").close()
        write(temporary)
        temporary.replace(path)
    except Exception as error:  # torch and safetensors have errors of their own for a full disk
        with contextlib.suppress(OSError):
            temporary.unlink()
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
        raise ValueError(f"{path} cannot be written: {reason}.") from error
