"""The local Hub with the real client; `pcmepp push` meets its failures in test_hub_push.py."""

from pathlib import Path

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
    with Hub(own.store.root) as again:  # repos outlive the server
        assert pull(again, tmp_path / "again") == WEIGHTS


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


def test_add_without_a_client(own, folder, tmp_path):
    own.add("me/model", {"model.safetensors": folder / "model.safetensors", "a/config.json": b"[1]"})
    assert pull(own, tmp_path) == WEIGHTS
    assert pull(own, tmp_path, "a/config.json") == b"[1]"
    url = f"{own.url}/me/model/resolve/main/model.safetensors"
    answer = huggingface_hub.get_session().get(url, headers={"Range": "bytes=1000-1999"})
    assert answer.status_code == 206 and answer.content == WEIGHTS[1000:2000]


def test_an_upload_cut_short_leaves_nothing_behind(own, api, folder):
    own.fail("/_lfs/", cut_upload_after=100_000, times=1)
    push(api, folder)
    assert [request.status for request in own.requests if "/_lfs/" in request.path] == [0, 200]
    assert own.files("me/model")["model.safetensors"] == WEIGHTS
    assert all(len(blob.name) == 64 for blob in (own.store.root / "blobs").iterdir())


def test_a_private_repo_needs_the_token(own, api, folder, tmp_path):
    api.create_repo("me/model", private=True)
    push(api, folder)
    with pytest.raises(HfHubHTTPError, match="401"):
        pull(own, tmp_path, token="hf_wrong")
    assert pull(own, tmp_path, token=TOKEN) == WEIGHTS


def test_the_clients_of_the_tests_talk_to_the_local_hub(hub):
    assert hub.url == huggingface_hub.constants.ENDPOINT
    assert huggingface_hub.constants.HF_HUB_DISABLE_XET
