"""A reader that survives lost connections: it reopens its source at the position where the last connection broke."""

import contextlib
import io
import time
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from .pace import Pace

FIRST_WAIT_S, MAX_WAIT_S = 0.2, 30.0  # the wait between two attempts, which doubles each time
MAX_READ_OVER_BYTES = 1 << 22  # a gap up to this size is read; a larger one is skipped by a new request
_CHUNK_BYTES = 1 << 20


class MissingShard(OSError):
    """Raised if a place holds nothing, or may not be read: another attempt would not help."""


class LostShard(OSError):
    """Raised if the connection or the command failed again and again."""


class Stream(Protocol):
    """One connection, or one run of a command."""

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes, as soon as there are any, or none at the end."""
        ...

    def close(self) -> None: ...


class Opened(NamedTuple):
    """The answer of an opener.

    Arguments:
        start: the position of the stream's first byte, which is 0 if the source cannot start elsewhere.
        length: the length of the whole source, if known.
        has_ranges: whether the source can be opened at any position.
        has_version: whether the opener itself notices that the source changed since it was first opened.
    """

    stream: Stream
    start: int
    length: int | None
    has_ranges: bool
    has_version: bool


Opener = Callable[[int], Opened]
"""A function that opens a source at a position."""


class ResumingReader(io.RawIOBase):
    """A source as a raw file that seeks forward, by a new request where the source has ranges.

    A source that changes while it is read must not be spliced together from two versions. Where the opener cannot tell
    versions apart, everything before the position is read again and its checksum compared.

    Arguments:
        name: the source as messages may show it.
        retries: the number of attempts after the first one, in a row.
        on_retry: a function that is called before each of them.
        position: the position at which reading starts.
    """

    def __init__(
        self, opener: Opener, name: str, pace: Pace, retries: int, on_retry: Callable[[], None], position: int = 0
    ):
        self._opener, self._name, self._pace = opener, name, pace
        self._retries, self._on_retry = retries, on_retry
        self._position = position  # the position of the next byte to return
        self._stream: Stream | None = None
        self._stream_position = 0  # the position of the next byte of the stream
        self._seen = 0  # the end of the bytes that were ever received
        self._length: int | None = None
        self._has_ranges, self._has_version = False, True
        self._origin = position  # the checksum covers [origin, checked)
        self._checked, self._checksum = position, 0
        self._patiently(self._connect)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._has_ranges

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = offset + (self._position if whence == io.SEEK_CUR else 0)
        if whence == io.SEEK_END or position < self._position:
            raise io.UnsupportedOperation("only forward")
        self._position = position
        return position

    def readinto(self, buffer: Any) -> int:
        self._pace.start_waiting()
        return self._patiently(lambda: self._read(buffer))

    def _connect(self) -> int:
        opened = self._opener(self._position if self._has_version else self._origin)
        self._stream, self._stream_position = opened.stream, opened.start
        self._length, self._has_ranges, self._has_version = opened.length, opened.has_ranges, opened.has_version
        if not self._has_version:
            self._read_over(self._origin)
            before, self._checksum = self._checksum, 0
            try:
                self._read_over(self._checked)
                changed = self._checksum != before
            finally:
                self._checksum = before
            if changed:
                raise MissingShard(f"{self._name}: it changed while it was read")
        return 0

    def _read(self, buffer: Any) -> int:
        if self._length is not None and self._position >= self._length:
            return 0
        gap = self._position - self._stream_position
        if self._stream is not None and gap > MAX_READ_OVER_BYTES and self._has_ranges and self._has_version:
            self._drop()
        if self._stream is None:
            self._connect()
        self._read_over(self._position)
        if self._stream_position < self._position:
            return 0
        data = self._receive(len(buffer))
        buffer[: len(data)] = data
        self._position = self._stream_position
        return len(data)

    def _read_over(self, position: int) -> None:
        """Read up to a position, or to the end if that comes first."""
        while self._stream_position < position:
            if not self._receive(min(_CHUNK_BYTES, position - self._stream_position)):
                return

    def _receive(self, size: int) -> bytes:
        assert self._stream is not None
        data = self._stream.read(size)
        if not data and self._stream_position < (self._seen if self._length is None else self._length):
            raise ConnectionError("the connection ended early")
        if not self._has_version and self._stream_position >= self._origin:
            self._checksum = zlib.crc32(data, self._checksum)
        self._stream_position += len(data)
        self._seen = max(self._seen, self._stream_position)
        self._checked = max(self._checked, self._stream_position)
        return data

    def _patiently(self, action: Callable[[], int]) -> int:
        for attempt in range(self._retries + 1):
            try:
                return action()
            except (MissingShard, RecursionError, MemoryError):  # the last two come from the caller, deep in a tar
                self._drop()
                raise
            except Exception as error:  # the libraries behind the openers have no common base class
                self._drop()
                failures = max(attempt + 1, self._pace.failures)
                if failures > self._retries:
                    attempts = f"{failures} tries" if failures > 1 else "one try"
                    raise LostShard(f"{self._name}: {_reason(error)} ({attempts})") from None
                self._on_retry()
                time.sleep(min(MAX_WAIT_S, FIRST_WAIT_S * 2**attempt))
                with contextlib.suppress(TimeoutError):  # this is a new attempt already
                    self._pace.received(0)
        raise AssertionError("unreachable")

    def _drop(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            with contextlib.suppress(Exception):
                stream.close()

    def close(self) -> None:
        self._drop()
        super().close()


class SourceError(OSError):
    """An error of an opener or a stream whose text holds no secret."""


def _reason(error: Exception) -> str:
    """Return the kind of an error, not its text, which may quote a URL."""
    if isinstance(error, SourceError):
        return str(error)
    if isinstance(error, TimeoutError):
        return "it delivers nothing, or next to nothing"
    return type(error).__name__
