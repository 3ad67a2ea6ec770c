"""What may be shown of a URL or a pipe: where it leads, never what opens it."""

import argparse
import logging
import re

_URL = re.compile(r"(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]*)://(?P<rest>[^\s'\"<>|;]*)")
_PIPE = re.compile(r"pipe:.*?(?=::|\n|$)")
_SHARD = re.compile(r"[\w.-]*(?:\{[\w.,-]*\}[\w.-]*)*\.(?:tar|tgz)(?:\.\w+)?(?![\w.])")


def printable(text: str) -> str:
    """`text` of others for a terminal or a log: what would move the cursor or hide a part of it is spelt out."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def redact(text: str) -> str:
    """`text` without credentials: of URLs neither user nor query values, of a pipe only its program and its shard."""
    return _URL.sub(_redact_url, _PIPE.sub(_redact_pipe, text))


def _redact_url(match: re.Match) -> str:
    place, _, query = match["rest"].partition("?")
    host, slash, path = place.partition("/")
    _, at, host = host.rpartition("@")
    if "@" in path and not at and ":" in host:  # an unescaped slash in a password
        return f"{match['scheme']}://***"
    shown = re.sub(r"=[^&#]*", "=***", query) if "=" in query else "***"
    return f"{match['scheme']}://{'***@' if at else ''}{host}{slash}{path.partition('#')[0]}" + (
        f"?{shown}" if query else ""
    )


def _redact_pipe(match: re.Match) -> str:
    words = match[0][len("pipe:") :].split()
    program = next((word for word in words if "=" not in word), "")
    program = program.rsplit("/", 1)[-1] if re.fullmatch(r"[\w./+-]+", program) else "***"
    shards = [found[0] for word in words for found in [_SHARD.search(word.partition("?")[0])] if found]
    return " ".join(["pipe:" + program, "***", *shards[-1:]])


# open_clip writes every argument to params.txt, to the log and to its trackers. So the arguments hold what may be
# shown, and the real text stays in the memory of this process.

_ARGUMENTS = ("train_data", "val_data")
_real: dict[str, str] = {}


def protect(args: argparse.Namespace) -> argparse.Namespace:
    """Put redacted text in the place of `--train-data` and `--val-data`; `real` gives the original back."""
    for name in _ARGUMENTS:
        value = getattr(args, name, None)
        if value and (shown := redact(value)) != value:
            if _real.setdefault(shown, value) != value:  # another secret for the same place
                shown = f"{shown} (#{len(_real)})"
                _real[shown] = value
            setattr(args, name, shown)
    return args


def real(value: str | None) -> str | None:
    """The text that `protect` replaced, or the value itself."""
    return _real.get(value, value) if value else value


class RedactingFilter(logging.Filter):
    """For log handlers, against messages of others that quote a URL."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if (shown := printable(redact(message))) != message:
            record.msg, record.args = shown, ()
        return True


def redact_logs() -> None:
    """Every handler of the root logger shows redacted messages from now on."""
    for handler in logging.getLogger().handlers:
        if not any(isinstance(known, RedactingFilter) for known in handler.filters):
            handler.addFilter(RedactingFilter())
