"""Push a folder to a Hub repo as one commit of the files that have changed, with retries where these help.

    target = HubTarget("org/name", private=True)
    check_access(target)                               # makes the repo, and checks the right to write
    url, changed = push(folder, target, "Step 48")     # a second call sends nothing

The token is the client's own: HF_TOKEN or `hf auth login`. It is never an argument here, and no message holds it or a
URL's query: what a server says is shown without them.
"""

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import get_token
from huggingface_hub.errors import HfHubHTTPError, HTTPError

from ..system.redact import printable, redact

# Seconds between tries. The client's own retries cover the sending of a file, 2 of the 9 failures that the tests
# make, and not the requests that make a repo, a commit or a tag.
RETRY_WAITS_S = (1.0, 2.0, 4.0, 8.0, 16.0)
MAX_RETRY_AFTER_S = 600.0  # seconds of a Retry-After that are still waited for
SILENCE_TIMEOUT_S = 60.0  # seconds that the Hub may take to answer or to take a byte; the client would wait for ever

T = TypeVar("T")


class PermanentHubError(ValueError):
    """A failure that waiting does not cure, or did not. The message is one sentence for the user."""


class TransientHubError(Exception):
    """A failure that may be over soon. `wait` is the time in seconds that the server asks for, or None."""

    def __init__(self, message: str, wait: float | None = None, answered: bool = True):
        super().__init__(message)
        self.wait = wait
        self.answered = answered


@dataclass(frozen=True)
class HubTarget:
    """A place to push to.

    Arguments:
        branch: the branch, which is made if it is not there; by default the main one.
        pull_request: open one instead of committing.
        private: make the repo private, if it has to be made; one that exists stays as it is.
    """

    repo_id: str
    private: bool = False
    branch: str | None = None
    pull_request: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", self.repo_id):
            raise ValueError(f"'{self.repo_id}' is no name of a repo: give ORG/NAME, as in my-org/pcmepp-b16.")
        if self.branch and self.pull_request:
            raise ValueError("--pr opens a pull request to the main branch: drop --branch.")

    @property
    def words(self) -> list[str]:
        """Return the arguments of `pcmepp push` for this target."""
        branch = ["--branch", self.branch] if self.branch else []
        return [self.repo_id, *branch, *["--private"] * self.private, *["--pr"] * self.pull_request]


def check_access(target: HubTarget, silence: float = SILENCE_TIMEOUT_S) -> None:
    """Make the repo if it is not there, and check that this token may write to it.

    PermanentHubError says in one sentence why it may not; TransientHubError says that the Hub could not be asked.
    """
    if not get_token():
        raise PermanentHubError(
            f"There is no token to push to {target.repo_id} with: set HF_TOKEN or run `hf auth login`. "
            "There is no flag for it, since flags are logged."
        )
    api = _api()
    with _explained(target, silence):
        api.create_repo(target.repo_id, private=target.private or None, exist_ok=True)
        if not target.pull_request:  # anyone may open one
            api.auth_check(target.repo_id, write=True)


def push(folder: Path, target: HubTarget, message: str, tag: str | None = None) -> tuple[str, bool]:
    """Commit the files of `folder`, and return the commit's URL and whether the repo did not hold all of it before.

    Each retry is a line on stderr; the client's progress bars are shown on a terminal.
    """
    from huggingface_hub import CommitOperationAdd
    from huggingface_hub.utils import disable_progress_bars, logging

    logging.set_verbosity(logging.CRITICAL)  # the client's warnings quote signed addresses
    if not sys.stderr.isatty():
        disable_progress_bars()
    api = _api()

    def commit() -> Any:
        check_access(target)
        if target.branch:
            api.create_branch(target.repo_id, branch=target.branch, exist_ok=True)
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        operations = [CommitOperationAdd(path.relative_to(folder).as_posix(), path) for path in files]
        return api.create_commit(  # upload_folder may make several commits: weights and card would not change together
            target.repo_id,
            operations,
            commit_message=message,
            revision=target.branch,
            create_pr=target.pull_request,
        )

    head = _retry(target, lambda: _head(api, target))
    info = _retry(target, commit)
    if tag:
        _retry(target, lambda: _tag(api, target, tag, info.oid))
    return info.pr_url or info.commit_url, info.oid != head


def _head(api: Any, target: HubTarget) -> str | None:
    """Return the newest commit, None if there is none or no repo."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        return api.repo_info(target.repo_id, revision=target.branch).sha
    except (RepositoryNotFoundError, RevisionNotFoundError):
        return None


def _tag(api: Any, target: HubTarget, tag: str, commit: str) -> None:
    there = {ref.name: ref.target_commit for ref in api.list_repo_refs(target.repo_id).tags}
    if there.get(tag, commit) != commit:
        raise PermanentHubError(
            f"{target.repo_id} is pushed, but its tag '{tag}' stands for another commit: choose another tag."
        )
    api.create_tag(target.repo_id, tag=tag, revision=commit, exist_ok=True)


def _retry(target: HubTarget, do: Callable[[], T]) -> T:
    """Call `do`, again after longer and longer waits where that may help; PermanentHubError where not."""
    for wait in (*RETRY_WAITS_S, None):
        try:
            with _explained(target):
                return do()
        except TransientHubError as failure:
            if target.pull_request and not failure.answered:  # it may have been opened, and must not be twice
                raise PermanentHubError(
                    f"No answer whether the pull request was opened: look at {target.repo_id}."
                ) from None
            if wait is None:
                raise PermanentHubError(
                    f"Gave up pushing to {target.repo_id} after {len(RETRY_WAITS_S) + 1} tries: {failure}."
                ) from None
            wait = wait if failure.wait is None else failure.wait
            print(f"Pushing to {target.repo_id}: {failure}; trying again in {wait:g} s.", file=sys.stderr)
        time.sleep(wait)
    raise AssertionError


@contextlib.contextmanager
def _explained(target: HubTarget, silence: float = SILENCE_TIMEOUT_S) -> Iterator[None]:
    """Turn the exceptions of the client into PermanentHubError or TransientHubError while the context lasts."""
    from huggingface_hub import get_session

    get_session().timeout = silence
    try:
        yield
    except (PermanentHubError, TransientHubError):
        raise
    except Exception as error:
        known = classify(error, target.repo_id)
        if known is None:
            raise
        raise known from None


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi(library_name="pcmepp-openclip")


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
