"""The bytes of a shard, wherever it is. A dropped connection is taken up again where it broke.

No shell sees a name: commands are started as lists of words, except a `pipe:` that the user wrote on the command line.
"""

import base64
import contextlib
import io
import os
import re
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any, BinaryIO

from .sources import kind, label, local_path, split_hf

TIMEOUT_S = 30
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 30.0
_CHUNK = 1 << 20


class MissingShard(OSError):
    """There is nothing at that place, or no permission to read it: another try would not help."""


class LostShard(OSError):
    """The connection or the command failed again and again."""


def open_shard(shard: str, retries: int = 5, on_retry: Callable[[], None] = lambda: None) -> BinaryIO:
    """The shard as a file to read; a local one can seek. MissingShard, LostShard on opening or reading."""
    where = kind(shard)
    if where == "local":
        try:
            return open(local_path(shard), "rb", buffering=1 << 17)
        except OSError as error:
            raise MissingShard(f"{label(shard)}: {error.strerror}") from None
    if where == "http":
        opener = _http_opener(shard, {})
    elif where == "hf":
        opener = _hf_opener(shard)
    elif where == "s3":
        opener = _command_opener(["aws", "s3", "cp", "--only-show-errors", shard, "-"], shard)
    else:
        assert where == "pipe", where
        opener = _command_opener(shard[len("pipe:") :], shard)
    return io.BufferedReader(_Resumed(opener, label(shard), retries, on_retry), _CHUNK)


def read_file(place: str, limit: int = 1 << 26) -> bytes:
    """A small file as a whole; MissingShard if there is none."""
    with open_shard(place, retries=2) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{label(place)} is larger than {limit >> 20} MB: it cannot be a list of sizes.")
    return data


class _Resumed(io.RawIOBase):
    """A stream that reopens itself at its position. An opener gives (reader, whole length or None)."""

    def __init__(
        self, opener: "Callable[[int], tuple[Any, int | None]]", name: str, retries: int, on_retry: Callable[[], None]
    ):
        self._opener, self._name, self._retries, self._on_retry = opener, name, retries, on_retry
        self._position = 0
        self._length: int | None = None
        self._stream: Any = None
        self._patiently(self._open)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._patiently(lambda: self._read(buffer))

    def _open(self) -> int:
        self._stream, self._length = self._opener(self._position)
        return 0

    def _read(self, buffer: Any) -> int:
        if self._stream is None:
            self._open()
        count = self._stream.readinto(buffer) or 0
        if count == 0 and self._length is not None and self._position < self._length:
            raise ConnectionError("the connection ended early")
        self._position += count
        return count

    def _patiently(self, action: Callable[[], int]) -> int:
        for attempt in range(self._retries + 1):
            try:
                return action()
            except MissingShard:
                raise
            except Exception as error:  # http.client, ssl, socket and urllib have no common base class
                self._drop()
                if attempt == self._retries:
                    tries = f"{attempt + 1} tries" if attempt else "one try"
                    raise LostShard(f"{self._name}: {_why(error)} ({tries})") from None
                self._on_retry()
                time.sleep(min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**attempt))
        raise AssertionError("unreachable")

    def _drop(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            with contextlib.suppress(Exception):
                stream.close()

    def close(self) -> None:
        self._drop()
        super().close()


def _why(error: Exception) -> str:
    """The kind of an error, not its text: that may quote the URL."""
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answers {error.code}"
    if isinstance(error, _CommandFailed):
        return str(error)
    return f"{type(error).__name__}"


def _http_opener(url: str, headers: dict[str, str]) -> Callable[[int], tuple[Any, int | None]]:
    parts = urllib.parse.urlsplit(url)
    if parts.username is not None:
        user = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        headers = {**headers, "Authorization": "Basic " + base64.b64encode(user.encode()).decode()}
        url = urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    first_etag: list[str | None] = []

    def open_at(position: int) -> tuple[Any, int | None]:
        request = urllib.request.Request(url, headers={"User-Agent": "pcmepp-openclip", "Accept-Encoding": "identity"})
        for name, value in headers.items():
            request.add_unredirected_header(name, value)  # a redirect may lead to another host
        if position:
            request.add_header("Range", f"bytes={position}-")
        try:
            response = urllib.request.urlopen(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            if error.code in (401, 403, 404, 410):
                raise MissingShard(f"{label(url)}: the server answers {error.code}") from None
            raise
        if not first_etag:
            first_etag.append(response.headers.get("ETag"))
        elif response.headers.get("ETag") != first_etag[0]:
            raise MissingShard(f"{label(url)}: it changed while it was read")
        length = response.headers.get("Content-Length")
        left = int(length) if length and length.isdigit() else None
        if position and response.status != 206:  # the server knows no ranges
            _discard(response, position)
            return response, left
        return response, None if left is None else position + left

    return open_at


def _hf_opener(shard: str) -> Callable[[int], tuple[Any, int | None]]:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    repo, revision, path = split_hf(shard)
    url = hf_hub_url(repo, path, repo_type="dataset", revision=revision)
    return _http_opener(url, {k: v for k, v in build_hf_headers().items() if k.lower() == "authorization"})


class _CommandFailed(OSError):
    pass


class _CommandOutput:
    """What a command prints. Its end counts as the end only if the command succeeded.

    What it says on stderr is never shown, since it may quote secrets, but the aws program is asked what it meant.
    """

    def __init__(self, command: str | list[str], name: str):
        self._name, self._said = name, tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                command,
                shell=isinstance(command, str),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL if isinstance(command, str) else self._said,
                start_new_session=True,
            )
        except FileNotFoundError:
            assert not isinstance(command, str)
            raise MissingShard(f"{name}: the program '{command[0]}' is not installed") from None
        assert self._process.stdout is not None
        self._stdout = self._process.stdout

    def readinto(self, buffer: Any) -> int:
        count = self._stdout.readinto(buffer)  # type: ignore[attr-defined]
        if count == 0 and (status := self._process.wait()) != 0:
            self._said.seek(0)
            if answer := re.search(rb"\((403|404|AccessDenied|NoSuchBucket|NoSuchKey)\)", self._said.read(1 << 16)):
                raise MissingShard(f"{self._name}: the server answers {answer[1].decode()}")
            raise _CommandFailed(f"the command ends with exit status {status}")
        return count

    def read(self, size: int) -> bytes:
        return self._stdout.read(size)

    def close(self) -> None:
        self._stdout.close()
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # the shell and what it started
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._said.close()


def _command_opener(command: str | list[str], shard: str) -> Callable[[int], tuple[Any, int | None]]:
    name = label(shard)

    def open_at(position: int) -> tuple[Any, int | None]:
        output = _CommandOutput(command, name)
        _discard(output, position)
        return output, None

    return open_at


def _discard(stream: Any, count: int) -> None:
    while count > 0:
        got = len(stream.read(min(_CHUNK, count)))
        if not got:
            raise ConnectionError("the shard is shorter than before")
        count -= got
