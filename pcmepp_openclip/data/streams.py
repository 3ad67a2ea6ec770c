"""The bytes of a shard, wherever it is. A dropped connection is taken up again where it broke.

No shell sees a name: commands are started as lists of words, except a `pipe:` that the user wrote on the command line.
"""

import base64
import contextlib
import functools
import http.client
import io
import logging
import os
import re
import select
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple

from .sources import kind, label, local_path, split_hf

WORD_S = 10.0  # waited for a source that gives next to nothing, before it is said
SLOW_RATE, LEAST_RATE = 10_000, 1_000  # bytes a second: below the first a word is said, below the second it ends
PATIENCE_S = 30.0  # below the least rate; then the connection is taken up anew
COMMAND_PATIENCE_S = 600.0  # a command may fetch all before it prints anything
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
    pace = _Pace(label(shard), PATIENCE_S if where in ("http", "hf") else COMMAND_PATIENCE_S)
    if where == "http":
        opener = _http_opener(shard, {}, pace)
    elif where == "hf":
        opener = _hf_opener(shard, pace)
    elif where == "s3":
        opener = _command_opener(["aws", "s3", "cp", "--only-show-errors", shard, "-"], shard, pace)
    else:
        assert where == "pipe", where
        opener = _command_opener(shard[len("pipe:") :], shard, pace)
    return io.BufferedReader(_Resumed(opener, label(shard), retries, on_retry, pace), _CHUNK)


def read_file(place: str, limit: int = 1 << 26) -> bytes:
    """A small file as a whole; MissingShard if there is none."""
    with open_shard(place, retries=2) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{label(place)} is larger than {limit >> 20} MB: it cannot be a list of sizes.")
    return data


class _Pace:
    """How fast a source is while it is waited for; the time that its reader takes for itself does not count.

    Every wait, for a connection too, is told to `came`, at the latest after `WORD_S`.
    """

    def __init__(self, name: str, patience_s: float):
        self._name, self._patience_s = name, patience_s
        self._last = time.monotonic()
        self._seconds, self._bytes = 0.0, 0  # since the rate was last looked at
        self._slow_s, self._word_at_s, self._below_s = 0.0, WORD_S, 0.0
        self.failures = 0  # in a row

    def begin(self) -> None:
        self._last = time.monotonic()

    def came(self, count: int) -> None:
        """TimeoutError if too little came for too long."""
        now = time.monotonic()
        self._seconds, self._bytes, self._last = self._seconds + now - self._last, self._bytes + count, now
        if self._seconds < WORD_S:
            return
        seconds, rate = self._seconds, self._bytes / self._seconds
        self._seconds, self._bytes = 0.0, 0
        if rate >= LEAST_RATE:
            self._below_s, self.failures = 0.0, 0
        else:
            self._below_s += seconds
        if rate < SLOW_RATE:
            self._slow_s += seconds
            if self._slow_s >= self._word_at_s:
                self._word_at_s = 2 * self._slow_s
                # The name comes last: a filter that redacts commands takes what follows for their arguments.
                logging.warning("Data: waited %.0f s at %.0f bytes a second for %s", self._slow_s, rate, self._name)
        if self._below_s >= self._patience_s:
            self._below_s = 0.0
            self.failures += 1
            raise TimeoutError


class _Opened(NamedTuple):
    """What an opener gives: a stream that begins at `start`, the length of the whole if known, and whether the opener
    itself would notice that it is not what it opened before."""

    stream: Any
    start: int
    length: int | None
    known: bool


_Opener = Callable[[int], _Opened]


class _Resumed(io.RawIOBase):
    """A stream that reopens itself at its position. What cannot be known to be the same is read again and compared."""

    def __init__(self, opener: _Opener, name: str, retries: int, on_retry: Callable[[], None], pace: _Pace):
        self._opener, self._name, self._retries, self._on_retry = opener, name, retries, on_retry
        self._pace = pace
        self._position = 0
        self._length: int | None = None
        self._checksum: int | None = None  # of all up to the position, where nothing else tells of a change
        self._stream: Any = None
        self._patiently(self._open)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._pace.begin()
        return self._patiently(lambda: self._read(buffer))

    def _open(self) -> int:
        opened = self._opener(0 if self._checksum is not None else self._position)
        self._stream, self._length = opened.stream, opened.length
        if not self._position:
            self._checksum = None if opened.known else 0
        checksum = _discard(self._stream, self._position - opened.start)
        if self._position and self._checksum is not None and checksum != self._checksum:
            raise MissingShard(f"{self._name}: it changed while it was read")
        return 0

    def _read(self, buffer: Any) -> int:
        if self._stream is None:
            self._open()
        count = self._stream.readinto(buffer) or 0
        if count == 0 and self._length is not None and self._position < self._length:
            raise ConnectionError("the connection ended early")
        self._position += count
        if self._checksum is not None:
            self._checksum = zlib.crc32(memoryview(buffer)[:count], self._checksum)
        return count

    def _patiently(self, action: Callable[[], int]) -> int:
        for attempt in range(self._retries + 1):
            try:
                return action()
            except MissingShard:
                self._drop()
                raise
            except Exception as error:  # http.client, ssl, socket and urllib have no common base class
                self._drop()
                failures = max(attempt + 1, self._pace.failures)
                if failures > self._retries:
                    tries = f"{failures} tries" if failures > 1 else "one try"
                    raise LostShard(f"{self._name}: {_why(error)} ({tries})") from None
                self._on_retry()
                time.sleep(min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**attempt))
                with contextlib.suppress(TimeoutError):  # it is another try already
                    self._pace.came(0)
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
    if isinstance(error, TimeoutError):
        return "it gives nothing, or next to nothing"
    return f"{type(error).__name__}"


class _Socket(io.RawIOBase):
    """What comes from a socket, at a pace: its own time-out begins anew with every byte."""

    def __init__(self, sock: Any, raw: Any, pace: _Pace):
        self._socket, self._raw, self._pace = sock, raw, pace

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            try:
                count = self._socket.recv_into(buffer)
            except TimeoutError:
                self._pace.came(0)
            else:
                self._pace.came(count)
                return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: Any, *args: Any, pace: _Pace, **kwargs: Any):
        super().__init__(sock, *args, **kwargs)
        self.fp: Any = io.BufferedReader(_Socket(sock, self.fp.detach(), pace), 1 << 16)


def _connection(kind: Any, pace: _Pace, host: str, **kwargs: Any) -> Any:
    connection = kind(host, **kwargs)
    connection.response_class = functools.partial(_Response, pace=pace)
    return connection


class _Http(urllib.request.HTTPHandler):
    def __init__(self, pace: _Pace):
        super().__init__()
        self._pace = pace

    def http_open(self, request: Any) -> Any:
        return self.do_open(functools.partial(_connection, http.client.HTTPConnection, self._pace), request)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, pace: _Pace):
        super().__init__()
        self._pace = pace

    def https_open(self, request: Any) -> Any:
        return self.do_open(functools.partial(_connection, http.client.HTTPSConnection, self._pace), request)


def _http_opener(url: str, headers: dict[str, str], pace: _Pace) -> _Opener:
    parts = urllib.parse.urlsplit(url)
    if parts.username is not None:
        user = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        headers = {**headers, "Authorization": "Basic " + base64.b64encode(user.encode()).decode()}
        url = urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    first: list[tuple[str | None, str | None, int | None]] = []  # tag, date and length
    opener = urllib.request.build_opener(_Http(pace), _Https(pace))

    def open_at(position: int) -> _Opened:
        request = urllib.request.Request(url, headers={"User-Agent": "pcmepp-openclip", "Accept-Encoding": "identity"})
        for name, value in headers.items():
            request.add_unredirected_header(name, value)  # a redirect may lead to another host
        if position:
            request.add_header("Range", f"bytes={position}-")
        try:
            response = opener.open(request, timeout=WORD_S)
        except urllib.error.HTTPError as error:
            if error.code in (401, 403, 404, 410):
                raise MissingShard(f"{label(url)}: the server answers {error.code}") from None
            raise
        start, length = _extent(response, position)
        if start not in (0, position):
            response.close()
            raise ConnectionError("it is another part than was asked for")
        found = response.headers.get("ETag"), response.headers.get("Last-Modified"), length
        if not first:
            first.append(found)
        (tag, date, before), (new_tag, new_date, now) = first[0], found
        same_length = before is None or now is None or before == now
        if not same_length or tag != new_tag or (tag is None and date != new_date):
            raise MissingShard(f"{label(url)}: it changed while it was read")
        known = tag is not None or (date is not None and before is not None)
        return _Opened(response, start, length, known)

    return open_at


def _extent(response: Any, position: int) -> tuple[int, int | None]:
    """Where an answer to a request from `position` on begins, and the length of the whole file if it is said."""
    said = response.headers.get("Content-Length") or ""
    size = int(said) if re.fullmatch(r"[0-9]{1,18}", said) else None
    if response.status != 206:  # the server knows no ranges
        return 0, size
    part = re.match(r"bytes ([0-9]{1,18})-[0-9]{1,18}/([0-9]{1,18}|\*)$", response.headers.get("Content-Range") or "")
    if part is None:
        return position, None if size is None else position + size
    return int(part[1]), None if part[2] == "*" else int(part[2])


def _hf_opener(shard: str, pace: _Pace) -> _Opener:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    repo, revision, path = split_hf(shard)
    url = hf_hub_url(repo, path, repo_type="dataset", revision=revision)
    return _http_opener(url, {k: v for k, v in build_hf_headers().items() if k.lower() == "authorization"}, pace)


class _CommandFailed(OSError):
    pass


class _CommandOutput:
    """What a command prints. Its end counts as the end only if the command succeeded.

    What it says on stderr is never shown, since it may quote secrets, but the aws program is asked what it meant.
    """

    def __init__(self, command: str | list[str], name: str, pace: _Pace):
        self._name, self._said, self._pace = name, tempfile.TemporaryFile(), pace  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                command,
                shell=isinstance(command, str),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL if isinstance(command, str) else self._said,
                start_new_session=True,
                bufsize=0,
            )
        except FileNotFoundError:
            assert not isinstance(command, str)
            raise MissingShard(f"{name}: the program '{command[0]}' is not installed") from None
        assert self._process.stdout is not None
        self._stdout = self._process.stdout
        self._poll = select.poll()
        self._poll.register(self._stdout, select.POLLIN)

    def readinto(self, buffer: Any) -> int:
        while not self._poll.poll(1000 * WORD_S):
            self._pace.came(0)
        count = self._stdout.readinto(buffer)  # type: ignore[attr-defined]
        self._pace.came(count)
        if count == 0 and (status := self._process.wait()) != 0:
            self._said.seek(0)
            if answer := re.search(rb"\((403|404|AccessDenied|NoSuchBucket|NoSuchKey)\)", self._said.read(1 << 16)):
                raise MissingShard(f"{self._name}: the server answers {answer[1].decode()}")
            raise _CommandFailed(f"the command ends with exit status {status}")
        return count

    def read(self, size: int) -> bytes:
        buffer = bytearray(size)
        return bytes(memoryview(buffer)[: self.readinto(buffer)])

    def close(self) -> None:
        self._stdout.close()
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # the shell and what it started
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._said.close()


def _command_opener(command: str | list[str], shard: str, pace: _Pace) -> _Opener:
    def open_at(position: int) -> _Opened:
        return _Opened(_CommandOutput(command, label(shard), pace), 0, None, known=False)

    return open_at


def _discard(stream: Any, count: int) -> int:
    """Read over so many bytes; their checksum."""
    checksum = 0
    while count > 0:
        data = stream.read(min(_CHUNK, count))
        if not data:
            raise ConnectionError("the shard is shorter than before")
        count -= len(data)
        checksum = zlib.crc32(data, checksum)
    return checksum
