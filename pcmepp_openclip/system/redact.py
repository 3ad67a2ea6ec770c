"""What may be shown of a URL or a pipe: where it leads, never its credentials.

A place that stands alone, such as an argument, is parsed to its end: a password may hold any character. Where a URL in
a sentence ends is not known, so more of it is hidden. Credentials that were found in the arguments (`redact_args`) are
hidden wherever they appear.
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
from urllib.parse import quote, quote_plus, unquote

from .text import flag_of

_SCHEME = r"[a-zA-Z][a-zA-Z0-9+.-]*"
_PLACE = re.compile(
    rf"(?P<name>\s*(?:[A-Za-z][\w.-]*=)?)(?:pipe:(?P<command>.*)|(?P<scheme>{_SCHEME})://(?P<rest>.*))", re.S
)
_URL = re.compile(rf"(?P<scheme>{_SCHEME})://(?P<rest>(?:(?!{_SCHEME}://)[^\n])*)")
_PIPE = re.compile(r"pipe:([^\n]*)")
_HF = re.compile(r"datasets/[^/@?#]+/[^/@?#]+(?:@[^/@?#]+)?/[^@?#]*")
_SHARD = re.compile(r"[\w.-]*(?:\{[\w.,-]*\}[\w.-]*)*\.(?:tar|tgz)(?:\.\w+)?")


def printable(text: str) -> str:
    """Untrusted text for a terminal, a log or a page: characters that move the cursor or hide text are escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def redact(text: str) -> str:
    """`text` without credentials: URLs without the user and without the values in their path and query, a pipe as its
    program and its shard."""
    if "://" in text or "pipe:" in text:
        text = "::".join(map(_redact_part, text.split("::")))
    return text if _known is None else _known.sub("***", text)


def _redact_part(text: str) -> str:
    if place := _PLACE.fullmatch(text):
        if place["command"] is not None:
            return place["name"] + _show_pipe(place["command"])
        return place["name"] + _show_url(place["scheme"], place["rest"])
    return _URL.sub(_redact_within, _PIPE.sub(lambda match: _show_pipe(match[1]), text))


def _show_url(scheme: str, rest: str) -> str:
    """A URL that ends where the text does."""
    if scheme.lower() == "hf" and _HF.fullmatch(rest):  # the one kind where an @ belongs to the path
        return f"{scheme}://{rest}"
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    _, at, host = authority.rpartition("@")
    path, mark, query = rest[len(authority) :].partition("#")[0].partition("?")
    if "@" in rest[len(authority) :] or (not at and not re.fullmatch(r"[^:]*(:\d*)?|\[.*", host)):
        # A login with an unescaped / ? or #, whose end is not known.
        shard = rest.rpartition("@")[2].rpartition("/")[2]
        return f"{scheme}://***" + (f"/{shard}" if _SHARD.fullmatch(shard) else "")
    before, _, parameters = path.partition(";")
    if "=" in parameters:  # such as ;sig=..., a signature in the path
        path = f"{before};{_show_query(parameters)}"
    return f"{scheme}://{'***@' if at else ''}{host}{path}" + (f"?{_show_query(query)}" if mark and query else "")


def _show_query(query: str) -> str:
    """Only the first name: what looks like a second one may be a part of the first value."""
    name, equals, _ = query.partition("=")
    return f"{name}=***" if equals and re.fullmatch(r"[\w-]{1,40}", name) else "***"


def _redact_within(match: re.Match) -> str:
    """A URL within a line of text: it may end at its next space or quote, or anywhere before the last @."""
    scheme, rest = match["scheme"], match["rest"]
    if scheme.lower() == "hf" and _HF.match(rest):
        return match[0]
    _, at, rest = rest.rpartition("@")
    place, space, after = re.fullmatch(r"(\S*)(\s?)(.*)", rest, re.S).groups()  # type: ignore[union-attr]
    if re.search("[?#;]", place):
        place = _show_url(scheme, place).partition("://")[2]
    return f"{scheme}://{'***@' if at else ''}{place}{space}{after}"


def _show_pipe(command: str) -> str:
    try:
        words = shlex.split(command)
    except ValueError:  # a quote without its other half
        words = []
    program = next((word for word in words if "=" not in word), "")
    known = re.fullmatch(r"[\w./+-]+", program) and program in command.split()  # not one in quotes
    program = program.rsplit("/", 1)[-1] if known else "***"
    return " ".join([f"pipe:{program}", "***", *filter(None, map(_shard_of, words[1:][::-1]))][:3])


def _shard_of(word: str) -> str:
    """The name of the shard that a word of a command ends with, or nothing."""
    end = word.partition("?")[0].rpartition("@")[2].rpartition("/")[2]
    return end if _SHARD.fullmatch(end) else ""


# open_clip writes every argument to params.txt, to the log and to its trackers. So its namespace holds only text that
# may be shown; the original text is returned to the caller.

_PLACES = ("train_data", "val_data", "train_data_sizes")  # arguments that may hold credentials
_FREE_TEXT = ("wandb_notes",)  # used only as it is shown
_secrets: set[str] = set()
_known: re.Pattern | None = None  # matches all of them


def redact_args(args: argparse.Namespace) -> dict[str, str]:
    """Replace the arguments that may hold credentials by redacted text, and return their original values by name.

    From then on `redact` also hides these credentials wherever they appear in a text. ValueError for credentials in
    any other argument: open_clip itself would read it, and write it to its files.
    """
    original = {name: value for name in _PLACES if (value := getattr(args, name, None))}
    for name, value in original.items():
        shown = _show_sizes(value) if name == "train_data_sizes" else redact(value)
        if shown != value:
            setattr(args, name, shown)
            sys.argv = [word.replace(value, shown) for word in sys.argv]
            _learn(value)
    sys.argv = list(map(redact, sys.argv))  # W&B writes it down
    for name, value in vars(args).items():
        if name in _FREE_TEXT and isinstance(value, str):
            setattr(args, name, redact(value))
        elif name not in _PLACES and any(redact(text) != text for text in _texts(value)):
            raise ValueError(
                f"{flag_of(name)} holds a login or a key, which would be logged: leave it out, and use a "
                "local file or the environment."
            )
    return original


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _texts(part)


def _show_sizes(text: str) -> str:
    """NAME=FILE,... up to the first URL: a comma may be a part of it, so that nothing after it is shown."""
    parts = re.split(r",(?=\s*[A-Za-z][\w.-]*=)", text)
    first = next((i for i, part in enumerate(parts) if redact(part) != part or "://" in part), len(parts))
    return ",".join([*map(redact, parts[: first + 1]), *["***"] * (first + 1 < len(parts))])


def _learn(text: str) -> None:
    """Remember the credentials in an argument, in every form in which a message may quote them."""
    global _known
    for secret in {found for part in re.split(r"::|,(?=\s*[A-Za-z][\w.-]*=)", text) for found in _secrets_of(part)}:
        plain = unquote(secret)
        forms = {secret, plain, quote(plain, safe=""), quote(plain), quote_plus(plain), repr(plain)[1:-1]}
        forms |= {base64.b64encode(form.encode()).decode() for form in (secret, plain)}
        _secrets.update(form for form in forms if len(form) >= 4)  # shorter ones are in every other word
    sys.excepthook = _show_traceback
    longest_first = sorted(_secrets, key=len, reverse=True)
    _known = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _secrets_of(part: str) -> Iterator[str]:
    place = _PLACE.fullmatch(part)
    if place is None:
        return
    if place["command"] is not None:
        shown = _show_pipe(place["command"])
        for word in re.split(r"[\s'\"]+", place["command"]):
            yield from _secrets_of(word)
            if word not in shown and not word.startswith("-") and len(word) >= 8 and not _shard_of(word):
                yield word
        return
    rest = place["rest"]
    login, at, _ = rest.rpartition("@")
    if at and not _HF.fullmatch(rest):
        yield login
        yield login.partition(":")[2]
    path, _, query = rest.partition("?")
    values = [path.partition("#")[2], query, query.partition("#")[2]]
    values += [value.partition("=")[2] for value in query.split("&")]
    parameters = [value.partition("=")[2] for value in path.split(";")[1:]]
    values += [*parameters, *(value.partition("/")[0] for value in parameters)]
    yield from (value for value in values if len(value) >= 8)  # not every `true`


def _show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.stderr.write(printable(redact("".join(traceback.format_exception(kind, error, trace)))))


class RedactingFilter(logging.Filter):
    """Redacts the messages of a log handler, since other libraries quote URLs."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if (shown := printable(redact(message))) != message:
            record.msg, record.args = shown, ()
        return True


def redact_logs() -> None:
    """Redact the messages of every handler of the root logger from now on."""
    for handler in logging.getLogger().handlers:
        if not any(isinstance(known, RedactingFilter) for known in handler.filters):
            handler.addFilter(RedactingFilter())
