"""Failures of the Hub, explained to a user: whether to try again and when, or one sentence that says what to do.

No sentence holds a URL's query or a token: what a server says is shown without them.
"""

import re
from collections.abc import Iterator

from huggingface_hub import get_token
from huggingface_hub.errors import HfHubHTTPError, HTTPError

from ..system.redact import printable, redact

MAX_RETRY_AFTER_S = 600.0  # seconds of a Retry-After that are still waited for


class PermanentHubError(ValueError):
    """A failure that waiting does not cure, or did not. The message is one sentence for the user."""


class TransientHubError(Exception):
    """A failure that may be over soon. `wait` is the time in seconds that the server asks for, or None."""

    def __init__(self, message: str, wait: float | None = None, answered: bool = True):
        super().__init__(message)
        self.wait = wait
        self.answered = answered


def classify(error: Exception, repo_id: str) -> TransientHubError | PermanentHubError | None:
    """Explain an exception of huggingface_hub; None if it is no failure of the Hub."""
    for cause in _causes(error):
        if isinstance(cause, HfHubHTTPError) and cause.response is not None:
            return _by_status(cause, repo_id)
        if isinstance(cause, (HTTPError, ConnectionError, TimeoutError)):  # HTTPError is the HTTP library's base class
            return TransientHubError(f"the Hub cannot be reached ({type(cause).__name__})", answered=False)
    if isinstance(error, (OSError, RuntimeError)):  # other ways to send a file have no errors of their own
        return TransientHubError(f"the upload failed ({type(error).__name__}: {clean(str(error))})")
    if isinstance(error, ValueError):  # the client checks the name of the repo and the card
        return PermanentHubError(f"The Hub's client refuses {repo_id}: {clean(str(error))}")
    return None


def _by_status(error: HfHubHTTPError, repo_id: str) -> TransientHubError | PermanentHubError:
    status = error.response.status_code
    said = clean(error.server_message or error.response.headers.get("X-Error-Message") or "")
    because = f" ({status}: {said})" if said else f" ({status})"
    if status in (402, 413, 507) or (status == 403 and re.search(r"(?i)quota|storage", said)):
        return PermanentHubError(
            f"There is no room left for {repo_id}{because}: free space or change the plan, then push again."
        )
    if status == 403 and re.search(r"(?i)expired", said):  # an upload has its own address: the next try gets a new one
        return TransientHubError(f"the upload took longer than its address was good for{because}")
    if status == 401:
        return PermanentHubError(
            f"The Hub does not take the token{because}: set HF_TOKEN or run `hf auth login` again."
        )
    if status == 403:
        return PermanentHubError(
            f"The token may not write to {repo_id}{because}: use one with the right to write, of a member of "
            f"{repo_id.split('/')[0]}."
        )
    if status == 404:
        return PermanentHubError(
            f"The Hub does not find {repo_id} or its branch{because}: check the name and the token's rights."
        )
    if status in (408, 409, 412, 425, 429) or status >= 500:
        return TransientHubError(f"the Hub answers{because}", _seconds(error.response.headers.get("Retry-After")))
    return PermanentHubError(f"The Hub refuses the push to {repo_id}{because}.")


def clean(text: str) -> str:
    """Return text from elsewhere in one line, without credentials."""
    token = get_token()
    text = printable(redact(" ".join(text.split())))
    if token:
        text = text.replace(token, "***")
    return re.sub(r"\bhf_\w+", "hf_***", text)[:300]


def _seconds(header: str | None) -> float | None:
    try:
        return None if header is None else min(max(float(header), 0.0), MAX_RETRY_AFTER_S)
    except ValueError:  # the client itself waits for a date
        return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
