"""Push a folder to a Hub repo as one commit of the files that have changed, with retries where these help.

    target = HubTarget("org/name", private=True)
    check_access(target)                               # makes the repo, and checks the right to write
    pushed = push(folder, target, "Step 48")           # a second call sends nothing

The token is the client's own: HF_TOKEN or `hf auth login`. It is never an argument here.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from . import errors
from .errors import PermanentHubError, TransientHubError

# Seconds between tries. The client's own retries cover the sending of a file, 2 of the 9 failures that the tests
# make, and not the requests that make a repo, a commit or a tag.
RETRY_WAITS_S = (1.0, 2.0, 4.0, 8.0, 16.0)
SILENCE_TIMEOUT_S = 60.0  # seconds that the Hub may take to answer or to take a byte; the client would wait for ever

T = TypeVar("T")
Say = Callable[[str], None]


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


@dataclass(frozen=True)
class Pushed:
    """The result of a push. `changed` is False where the repo already held all of it."""

    url: str
    commit: str
    changed: bool


def check_access(target: HubTarget, silence: float = SILENCE_TIMEOUT_S) -> None:
    """Make the repo if it is not there, and check that this token may write to it.

    PermanentHubError says in one sentence why it may not; TransientHubError says that the Hub could not be asked.
    """
    from huggingface_hub import get_token

    if not get_token():
        raise PermanentHubError(
            f"There is no token to push to {target.repo_id} with: set HF_TOKEN or run `hf auth login`. "
            "There is no flag for it, since flags are logged."
        )
    api = _api()
    private = target.private or None
    _call(target, lambda: api.create_repo(target.repo_id, private=private, exist_ok=True), silence)
    if not target.pull_request:  # anyone may open one
        _call(target, lambda: api.auth_check(target.repo_id, write=True), silence)


def push(
    folder: Path, target: HubTarget, message: str, tag: str | None = None, say: Say = lambda _: None, bars: bool = False
) -> Pushed:
    """Commit the files of `folder`; those that the repo already holds are not sent.

    Arguments:
        say: called with one line per retry that gives the reason.
        bars: show the client's progress bars, on a terminal.
    """
    from huggingface_hub import CommitOperationAdd
    from huggingface_hub.utils import disable_progress_bars, logging

    logging.set_verbosity(logging.CRITICAL)  # the client's warnings quote signed addresses
    if not bars:
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

    head = _retry(target, lambda: _head(api, target), say)
    info = _retry(target, commit, say)
    if tag:
        _retry(target, lambda: _tag(api, target, tag, info.oid), say)
    return Pushed(info.pr_url or info.commit_url, info.oid, info.oid != head)


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


def _retry(target: HubTarget, do: Callable[[], T], say: Say) -> T:
    """Call `do`, again after longer and longer waits where that may help; PermanentHubError where not."""
    for wait in (*RETRY_WAITS_S, None):
        try:
            return _call(target, do)
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
            say(f"Pushing to {target.repo_id}: {failure}; trying again in {wait:g} s.")
        time.sleep(wait)
    raise AssertionError


def _call(target: HubTarget, do: Callable[[], T], silence: float = SILENCE_TIMEOUT_S) -> T:
    """Call `do`; the exceptions of the client become PermanentHubError or TransientHubError."""
    from huggingface_hub import get_session

    get_session().timeout = silence
    try:
        return do()
    except (PermanentHubError, TransientHubError):
        raise
    except Exception as error:
        known = errors.classify(error, target.repo_id)
        if known is None:
            raise
        raise known from None


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi(library_name="pcmepp-openclip")
