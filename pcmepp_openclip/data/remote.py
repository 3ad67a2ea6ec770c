"""Shards over the network, through fsspec: `http(s)://`, `hf://`, `s3://`, `gs://`, `az://`.

A file of a web server, or of a Hugging Face repo, is read by one streamed request that starts at the wanted
position: progress shows while it arrives, servers without range requests work, and a shard costs one request. Objects
in a store are read in ranges; the next range is requested while the last one is used.
"""

import asyncio
import base64
import concurrent.futures
import logging
import os
import re
import string
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from . import pace as pacing
from .pace import Pace
from .resuming import MissingShard, Opened, Opener, SourceError
from .sources import kind, label, split_hf

MIN_RANGE_BYTES, MAX_RANGE_BYTES = 1 << 16, 1 << 23
FIRST_RANGE_BYTES = 1 << 18
QUICK_S = 1.0  # after a range that takes longer, the next range is smaller
HTTP_BUFFER_BYTES = 1 << 18

# With --debug these would write signed URLs and session tokens to the log.
_VERBOSE = ("fsspec", "s3fs", "gcsfs", "adlfs", "botocore", "aiobotocore", "aiohttp", "azure", "google", "urllib3")

_filesystems: dict[tuple[int, str], Any] = {}


def filesystem(protocol: str) -> Any:
    """Return the fsspec filesystem of this process.

    Its event loop and its connections do not survive a fork, and closing those of the parent process would disturb
    them there. So each process creates its own filesystem and leaves an inherited one untouched.
    """
    system = _filesystems.get((os.getpid(), protocol))
    if system is None:
        import fsspec

        for name in _VERBOSE:
            logging.getLogger(name).setLevel(logging.WARNING)
        system = fsspec.filesystem(protocol, skip_instance_cache=True, **(_http() if protocol == "http" else {}))
        _filesystems[os.getpid(), protocol] = system
    return system


def _http() -> dict[str, Any]:
    import aiohttp

    return {
        "encoded": True,  # a signed URL must stay as it is
        "client_kwargs": {
            "trust_env": True,  # proxies
            "auto_decompress": False,  # a .tar.gz arrives as it is stored
            "read_bufsize": HTTP_BUFFER_BYTES,
            "timeout": aiohttp.ClientTimeout(total=None),  # see Pace
        },
    }


def remote_opener(shard: str, pace: Pace) -> Opener:
    """Return an opener for a shard on any kind of server."""
    if kind(shard) == "http":
        return _http_opener(shard, {}, pace)
    if kind(shard) == "hf":
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers

        # HfFileSystem would add requests to the Hub's API, which has a rate limit, to each shard.
        repo, revision, path = split_hf(shard)
        token = {name.lower(): value for name, value in build_hf_headers().items()}.get("authorization")
        headers = {} if token is None else {"Authorization": token}
        return _http_opener(hf_hub_url(repo, path, repo_type="dataset", revision=revision), headers, pace)
    return _object_opener(shard, pace)


def wait(coroutine: Coroutine[Any, Any, Any] | concurrent.futures.Future, loop: Any, pace: Pace) -> Any:
    """Return the result of a coroutine on the event loop of a filesystem, and report the waiting time."""
    if isinstance(coroutine, concurrent.futures.Future):
        future = coroutine
    else:
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        while not concurrent.futures.wait([future], pacing.SLOW_NOTICE_S).done:
            pace.received(0)
        return future.result()
    except BaseException:
        future.cancel()
        raise


class _Response:
    """The body of an HTTP response."""

    def __init__(self, response: Any, loop: Any, pace: Pace):
        self._response, self._loop, self._pace = response, loop, pace

    def read(self, size: int) -> bytes:
        data = wait(self._response.content.read(size), self._loop, self._pace)
        self._pace.received(len(data))
        return data

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._response.close)


class _Version(NamedTuple):
    """The version of a file as a server states it: ETag, Last-Modified and length."""

    tag: str | None
    date: str | None
    length: int | None

    @property
    def is_known(self) -> bool:
        return self.tag is not None or (self.date is not None and self.length is not None)

    def differs_from(self, other: "_Version") -> bool:
        same_length = self.length is None or other.length is None or self.length == other.length
        return not same_length or self.tag != other.tag or (self.tag is None and self.date != other.date)


def _http_opener(url: str, headers: dict[str, str], pace: Pace) -> Opener:
    name = label(url)
    try:
        parts = urlsplit(url)
    except ValueError:
        raise MissingShard(f"{name}: it is not a URL") from None
    if parts.username is not None:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers = {**headers, "Authorization": "Basic " + base64.b64encode(login.encode()).decode()}
        url = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    url = quote(url, safe=string.punctuation)
    first: list[_Version] = []

    def open_at(position: int) -> Opened:
        http = filesystem("http")
        asked = {"User-Agent": "pcmepp-openclip", "Accept-Encoding": "identity", **headers}
        if position:
            asked["Range"] = f"bytes={position}-"

        async def get() -> Any:
            session = await http.set_session()
            return await session.get(http.encode_url(url), headers=asked)

        response = wait(get(), http.loop, pace)
        stream = _Response(response, http.loop, pace)
        try:
            start, length = _extent(response, position, name)
            version = _Version(response.headers.get("ETag"), response.headers.get("Last-Modified"), length)
            if not first:
                first.append(version)
            if first[0].differs_from(version):
                raise MissingShard(f"{name}: it changed while it was read")
            has_ranges = response.status == 206 or response.headers.get("Accept-Ranges") == "bytes"
            return Opened(stream, start, length, has_ranges, first[0].is_known)
        except BaseException:
            stream.close()
            raise

    return open_at


def _extent(response: Any, position: int, name: str) -> tuple[int, int | None]:
    """Return the start of the answer to a request from `position` on, and the length of the whole file if known."""
    if response.status in (401, 403, 404, 410):
        raise MissingShard(f"{name}: the server answers {response.status}")
    if response.status >= 400 and response.status != 416:
        raise SourceError(f"the server answers {response.status}")
    stated = response.headers.get("Content-Length") or ""
    size = int(stated) if re.fullmatch(r"[0-9]{1,18}", stated) else None
    if response.status == 416:  # there is nothing at that position
        return position, None
    if response.status != 206:  # the server has no ranges
        return 0, size
    part = re.match(r"bytes ([0-9]{1,18})-[0-9]{1,18}/([0-9]{1,18}|\*)$", response.headers.get("Content-Range") or "")
    if part is None:
        return position, None if size is None else position + size
    if int(part[1]) not in (0, position):
        raise SourceError("the server sends another part than was asked for")
    return int(part[1]), None if part[2] == "*" else int(part[2])


class _Ranges:
    """An object in a store, read from a position on in ranges.

    The size of a range follows the speed, so that a slow store still shows progress.

    Arguments:
        check: a function that is called at the end of the object, since each range is a request of its own.
    """

    def __init__(self, store: Any, path: str, position: int, length: int, *, pace: Pace, check: Callable[[], object]):
        self._store, self._path, self._length, self._pace, self._check = store, path, length, pace, check
        self._asked_to, self._size = position, FIRST_RANGE_BYTES
        self._block = memoryview(b"")
        self._next: concurrent.futures.Future | None = None
        self._ask()

    def _ask(self) -> None:
        start, stop = self._asked_to, min(self._length, self._asked_to + self._size)
        self._asked_to, self._next = stop, None
        if start < stop:
            request = self._store._cat_file(self._path, start=start, end=stop)
            self._next = asyncio.run_coroutine_threadsafe(request, self._store.loop)

    def read(self, size: int) -> bytes:
        if not self._block and self._next is not None:
            begun = time.monotonic()
            self._block = memoryview(wait(self._next, self._store.loop, self._pace))
            self._pace.received(len(self._block))
            quick = time.monotonic() - begun < QUICK_S
            self._size = min(MAX_RANGE_BYTES, 2 * self._size) if quick else max(MIN_RANGE_BYTES, self._size // 2)
            self._ask()
            if self._next is None:
                self._check()
        data, self._block = bytes(self._block[:size]), self._block[size:]
        return data

    def close(self) -> None:
        if self._next is not None:
            self._next.cancel()


def _object_opener(shard: str, pace: Pace) -> Opener:
    name = label(shard)
    first: list[dict] = []  # the store's description of the object when it was first opened

    def look() -> dict:
        store = filesystem(kind(shard))
        store.invalidate_cache()
        try:
            info = wait(store._info(store._strip_protocol(shard)), store.loop, pace)
        except FileNotFoundError:
            raise MissingShard(f"{name}: there is no such object") from None
        except PermissionError:
            raise MissingShard(f"{name}: the store denies access") from None
        if info.get("type") != "file":
            raise MissingShard(f"{name}: it is a folder")
        if not first:
            first.append(info)
        if info != first[0]:
            raise MissingShard(f"{name}: it changed while it was read")
        return info

    def open_at(position: int) -> Opened:
        length, store = int(look()["size"]), filesystem(kind(shard))
        stream = _Ranges(store, store._strip_protocol(shard), position, length, pace=pace, check=look)
        return Opened(stream, position, length, has_ranges=True, has_version=True)

    return open_at
