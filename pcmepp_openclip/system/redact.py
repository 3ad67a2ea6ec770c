"""Text for logs and pages, with harmful characters escaped, and with URLs and pipes without credentials.

A login, all that follows `?`, `;` or `#` in a URL, and all of a pipe but its program and its shard are hidden. A place
that stands alone, such as an argument, is a URL to its end, since a password may hold any character; within a sentence
a URL ends at a space. Credentials of the arguments (`redact_args`) are hidden wherever they appear.
"""

import argparse
import base64
import logging
import re
import shlex
import sys
import traceback
from collections.abc import Iterator
from types import TracebackType
from urllib.parse import quote, unquote

from .text import flag_of

_URL = r"[a-zA-Z][a-zA-Z0-9+.-]*://"
_PLACE = re.compile(rf"(\s*(?:[A-Za-z][\w.-]*=)?)(?:(pipe:)|({_URL}))(.*)", re.S)
_LOGIN = re.compile(rf"({_URL})(?:(?!{_URL})[^\n])*@")
_QUERY = re.compile(rf"({_URL}[^\s?;#]*[?;#](?:[\w-]{{1,40}}=)?)\S*")  # keeps the name of its first value
_PIPE = re.compile(r"pipe:([^\n]*)")
_HF = re.compile(r"hf://datasets/[^/@?#]+/[^/@?#]+(?:@[^/@?#]+)?/[^@?#]*")  # only here an @ belongs to no login
_SHARD = re.compile(r"[\w.-]*(?:\{[\w.,-]*\}[\w.-]*)*\.(?:tar|tgz)(?:\.\w+)?")
_NEXT_SOURCE = r"::|,(?=\s*[A-Za-z][\w.-]*=)"


def printable(text: str) -> str:
    """Escape characters that move the cursor or hide text, for a terminal, a log or a page."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def redact(text: str) -> str:
    """Return `text` without credentials."""
    if "://" in text or "pipe:" in text:
        text = "::".join(map(_redact_part, text.split("::")))
    return text if _known is None else _known.sub("***", text)


def _redact_part(text: str) -> str:
    if place := _PLACE.fullmatch(text):
        name, pipe, scheme, rest = place.groups()
        return name + (_show_pipe(rest) if pipe else _show_url(scheme, rest))
    text = _PIPE.sub(lambda match: _show_pipe(match[1]), text)
    text = _LOGIN.sub(lambda match: match[0] if _HF.match(text, match.start()) else f"{match[1]}***@", text)
    return _QUERY.sub(r"\1***", text)


def _show_url(scheme: str, rest: str) -> str:
    """Return a URL, which ends where the text does, without credentials."""
    if _HF.fullmatch(scheme + rest):
        return scheme + rest
    at, address = re.fullmatch(r"(?:[^/?#]*(@))?(.*)", rest, re.S).groups()  # type: ignore[union-attr]
    if "@" in address:  # a login may hold / ? or #, and a signature @, so that their ends are unknown
        shard = _shard_of(rest)
        return f"{scheme}***" + (f"/{shard}" if shard else "")
    path, mark, query = re.fullmatch(r"([^?;#]*)([?;#]?)(.*)", address, re.S).groups()  # type: ignore[union-attr]
    name = re.match(r"[\w-]{1,40}=", query)
    return f"{scheme}{'***@' if at else ''}{path}" + (f"{mark}{name[0] if name else ''}***" if query else "")


def _show_pipe(command: str) -> str:
    try:
        words = shlex.split(command)
    except ValueError:  # a quote lacks its other half
        words = []
    program = next((word for word in words if "=" not in word), "")
    plain = re.fullmatch(r"[\w./+-]+", program) and program in command.split()  # a program in quotes is not plain
    program = program.rsplit("/", 1)[-1] if plain else "***"
    return " ".join([f"pipe:{program}", "***", *filter(None, map(_shard_of, words[1:][::-1]))][:3])


def _shard_of(word: str) -> str:
    """Return the name of the shard that a word ends with, or nothing."""
    end = word.partition("?")[0].rpartition("@")[2].rpartition("/")[2]
    return end if _SHARD.fullmatch(end) else ""


# open_clip writes every argument to params.txt, to the log and to its trackers. So its namespace holds only text that
# may be shown, and the caller gets the original text.

_SIZES = "train_data_sizes"
_PLACES = ("train_data", "val_data", _SIZES)  # these arguments may hold credentials
_FREE_TEXT = ("wandb_notes",)  # this argument is only displayed
_secrets: set[str] = set()
_known: re.Pattern | None = None  # matches all secrets


def redact_args(args: argparse.Namespace) -> dict[str, str]:
    """Replace the arguments that may hold credentials by redacted text, and return their original values by name.

    From then on `redact` also hides these credentials wherever they appear in a text. Raise ValueError for
    credentials in any other argument, since open_clip itself reads it, and writes it to its files.
    """
    original = {name: value for name in _PLACES if (value := getattr(args, name, None))}
    for name, value in original.items():
        # In NAME=FILE,... a comma may be a part of a URL, so that nothing after the first one is shown.
        safe = re.sub(rf"({_URL}|pipe:).*", r"\1***", value, flags=re.S) if name == _SIZES else redact(value)
        if safe != value:
            setattr(args, name, safe)
            sys.argv = [word.replace(value, safe) for word in sys.argv]
            _learn(value)
    sys.argv = list(map(redact, sys.argv))  # W&B stores the command line
    for name, value in vars(args).items():
        if name in _FREE_TEXT and isinstance(value, str):
            setattr(args, name, redact(value))
        elif name not in _PLACES and isinstance(value, (str, list, tuple)) and redact(text := str(value)) != text:
            raise ValueError(
                f"{flag_of(name)} holds a login or a key, which would be logged: leave it out, and use a "
                "local file or the environment."
            )
    return original


def _learn(text: str) -> None:
    """Remember the credentials in an argument as they are, and as libraries quote them in errors: decoded, encoded
    again, or in the header of a request, which is a part of aiohttp's errors."""
    global _known
    for secret in {secret for part in re.split(_NEXT_SOURCE, text) for secret in _secrets_of(part)}:
        plain = unquote(secret)
        basic = base64.b64encode(plain.encode()).decode()
        forms = {secret, plain, quote(plain), quote(plain, safe=""), basic}
        _secrets.update(form for form in forms if len(form) >= 4)  # shorter ones occur in ordinary words
    sys.excepthook = _show_traceback
    longest_first = sorted(_secrets, key=len, reverse=True)
    _known = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _secrets_of(part: str) -> Iterator[str]:
    place = _PLACE.fullmatch(part)
    if place is None or _HF.fullmatch(part):
        return
    _, pipe, _, rest = place.groups()
    if pipe:
        visible = _show_pipe(rest)
        for word in re.split(r"[\s'\"]+", rest):
            yield from _secrets_of(word)
            if word not in visible and not word.startswith("-") and len(word) >= 8 and not _shard_of(word):
                yield word
        return
    login, _, _ = rest.rpartition("@")
    yield from filter(None, (login, login.partition(":")[2]))
    query = re.split("[?;#]", rest + "?", maxsplit=1)[1]
    values = [query, *(value.partition("=")[2] for value in re.split("[?;#&/]", query))]
    yield from (value for value in values if len(value) >= 8)  # shorter values, such as `true`, are no secrets


def _show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.stderr.write(printable(redact("".join(traceback.format_exception(kind, error, trace)))))


def redact_logs() -> None:
    """Redact the messages of every handler of the root logger from now on, since other libraries quote URLs."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(_redact_record)  # a second call has no effect


def _redact_record(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    if (safe := printable(redact(message))) != message:
        record.msg, record.args = safe, ()
    return True
