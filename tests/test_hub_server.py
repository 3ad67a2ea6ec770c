"""The local Hub with the real client: round trips, and every failure that can be asked of it."""

import subprocess
import sys
import time
from pathlib import Path

import hub_server
import huggingface_hub
import pytest
from hub_server import Hub
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

TOKEN = "hf_fake"
WEIGHTS = bytes(range(256)) * 2000


@pytest.fixture
def own(tmp_path):
    with Hub(tmp_path / "hub", token=TOKEN) as hub:
        yield hub


@pytest.fixture
def api(own):
    return HfApi(endpoint=own.url, token=TOKEN)


@pytest.fixture
def folder(tmp_path) -> Path:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    (folder / "sub" / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    return folder


def push(api: HfApi, folder: Path, repo: str = "me/model"):
    api.create_repo(repo, exist_ok=True)
    return api.upload_folder(repo_id=repo, folder_path=folder)


def pull(hub: Hub, tmp_path: Path, file: str = "model.safetensors", **kwargs) -> bytes:
    path = hf_hub_download("me/model", file, endpoint=hub.url, cache_dir=tmp_path / "cache", **kwargs)
    return Path(path).read_bytes()


def statuses(hub: Hub, part: str) -> list[int]:
    return [request.status for request in hub.requests if part in request.path]


def test_round_trip(own, api, folder, tmp_path):
    commit = push(api, folder)
    copy = Path(snapshot_download("me/model", endpoint=own.url, cache_dir=tmp_path / "cache"))
    assert {p.relative_to(copy).as_posix() for p in copy.rglob("*") if p.is_file()} == {
        *("README.md", "sub/config.json", "model.safetensors", ".gitattributes")
    }
    assert (copy / "model.safetensors").read_bytes() == WEIGHTS
    assert pull(own, tmp_path, revision=commit.oid) == WEIGHTS
    assert own.files("me/model")["sub/config.json"] == b"{}"
    assert api.repo_info("me/model").sha == commit.oid
    assert api.file_exists("me/model", "README.md") and not api.file_exists("me/model", "nothing")
    assert api.list_repo_refs("me/model").branches[0].name == "main"
    assert api.whoami()["name"] == "me"


def test_an_unchanged_file_is_not_sent_again(own, api, folder):
    push(api, folder)
    own.reset()
    (folder / "README.md").write_text("changed")
    push(api, folder)
    assert not statuses(own, "/_lfs/")
    assert own.files("me/model")["README.md"] == b"changed"


def test_delete_files_and_repo(own, api, folder):
    push(api, folder)
    api.delete_file("README.md", "me/model")
    api.delete_folder("sub", "me/model")
    assert set(own.files("me/model")) == {"model.safetensors", ".gitattributes"}
    api.delete_repo("me/model")
    with pytest.raises(RepositoryNotFoundError):
        api.repo_info("me/model")


def test_a_commit_on_another_head_is_refused(own, api, folder):
    old = push(api, folder).oid
    (folder / "README.md").write_text("second")
    push(api, folder)
    with pytest.raises(HfHubHTTPError, match="412"):
        api.upload_file(path_or_fileobj=b"x", path_in_repo="x.txt", repo_id="me/model", parent_commit=old)


def test_what_is_not_there(own, api, folder, tmp_path):
    push(api, folder)
    with pytest.raises(EntryNotFoundError):
        pull(own, tmp_path, "nothing.json")
    with pytest.raises(RevisionNotFoundError):
        pull(own, tmp_path, revision="no-such-branch")
    with pytest.raises(RepositoryNotFoundError):
        hf_hub_download("me/nothing", "x", endpoint=own.url, cache_dir=tmp_path / "cache")


def test_writing_needs_the_token(own, folder):
    with pytest.raises(HfHubHTTPError, match="401"):
        push(HfApi(endpoint=own.url, token="hf_wrong"), folder)
    assert not own.store.exists("models", "me/model")


def test_add_without_a_client(own, folder, tmp_path):
    own.add("me/model", {"model.safetensors": folder / "model.safetensors", "a/config.json": b"[1]"})
    assert pull(own, tmp_path) == WEIGHTS
    assert pull(own, tmp_path, "a/config.json") == b"[1]"


# Failures. The real client retries some by itself; what it does is shown, not wished for.


def test_status_with_headers_some_times_then_fine(own, api, folder):
    failure = own.fail("/_lfs/", method="PUT", status=503, headers={"Retry-After": "0"}, times=2)
    push(api, folder)
    assert failure.hits == 2 and statuses(own, "/_lfs/") == [503, 503, 200]
    assert own.files("me/model")["model.safetensors"] == WEIGHTS


def test_status_for_ever(own, api, folder):
    api.create_repo("me/model")
    own.fail("/commit/", status=403, message="out of quota")
    with pytest.raises(HfHubHTTPError, match="out of quota") as error:
        push(api, folder)
    assert error.value.response.status_code == 403
    assert set(own.files("me/model")) == {".gitattributes"}


def test_headers_reach_the_client(own, api):
    own.fail("/api/whoami", status=429, headers={"Retry-After": "7", "RateLimit": '"api";r=0;t=7'})
    with pytest.raises(HfHubHTTPError) as error:
        api.whoami()
    assert error.value.response.headers["Retry-After"] == "7"


def test_a_download_cut_short_is_taken_up_again(own, api, folder, tmp_path):
    push(api, folder)
    failure = own.fail("/resolve/.*model.safetensors", method="GET", cut_after=100_000, times=1)
    assert pull(own, tmp_path) == WEIGHTS
    assert failure.hits == 1
    assert [r.status for r in own.requests if r.method == "GET" and "/resolve/" in r.path] == [200, 200]


def test_a_part_of_a_file(own, api, folder):
    push(api, folder)
    url = f"{own.url}/me/model/resolve/main/model.safetensors"
    answer = huggingface_hub.get_session().get(url, headers={"Range": "bytes=1000-1999"})
    assert answer.status_code == 206 and answer.content == WEIGHTS[1000:2000]


def test_an_upload_cut_short_leaves_nothing_behind(own, api, folder):
    own.fail("/_lfs/", cut_upload_after=100_000, times=1)
    push(api, folder)
    assert statuses(own, "/_lfs/") == [0, 200]
    assert own.files("me/model")["model.safetensors"] == WEIGHTS
    assert all(len(blob.name) == 64 for blob in (own.store.root / "blobs").iterdir())


def test_an_answer_lost_after_the_commit_was_made(own, api, folder):
    api.create_repo("me/model")
    own.fail("/commit/", lose_answer=True, times=1)
    with pytest.raises(Exception, match=r"(?i)disconnect|reset|closed"):
        push(api, folder)
    assert own.files("me/model")["model.safetensors"] == WEIGHTS


def test_delay_and_rate(own, api, tmp_path):
    own.add("me/model", {"slow.bin": b"x" * 40_000})
    own.fail("/resolve/", method="HEAD", delay=0.4)
    own.fail("/resolve/", method="GET", rate=80_000)
    start = time.monotonic()
    assert pull(own, tmp_path, "slow.bin") == b"x" * 40_000
    assert 0.8 < time.monotonic() - start < 5


def test_a_private_repo_needs_the_token(own, api, folder, tmp_path):
    api.create_repo("me/model", private=True)
    push(api, folder)
    with pytest.raises(HfHubHTTPError, match="401"):
        pull(own, tmp_path, token="hf_wrong")
    assert pull(own, tmp_path, token=TOKEN) == WEIGHTS


def test_repos_outlive_the_server(own, api, folder, tmp_path):
    push(api, folder)
    with Hub(own.store.root) as again:
        assert pull(again, tmp_path) == WEIGHTS


def test_as_a_script(tmp_path):
    command = [sys.executable, hub_server.__file__, str(tmp_path / "hub"), "--token", TOKEN]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = process.stdout.readline().strip()
        assert HfApi(endpoint=url, token=TOKEN).whoami()["name"] == "me"
    finally:
        process.terminate()
        process.wait()


def test_the_clients_of_the_tests_talk_to_the_local_hub(hub):
    assert hub.url == huggingface_hub.constants.ENDPOINT
    assert huggingface_hub.constants.HF_HUB_DISABLE_XET
