"""`pcmepp push` with the real client over HTTP: what a repo then holds, and what happens when the Hub fails."""

import contextlib
import fcntl
import json
import os
import pickle
import pty
import re
import shutil
import socket
import struct
import subprocess
import sys
import termios

import open_clip
import pytest
import torch
from helpers import REPO
from hub_helpers import TOKEN, assert_same_outputs, outputs
from huggingface_hub import ModelCard, constants, hf_hub_download
from safetensors.torch import load_file

from pcmepp_openclip import cli
from pcmepp_openclip.hub import upload
from pcmepp_openclip.models.export import export_model

FILES = {".gitattributes", "README.md", "open_clip_config.json", "open_clip_model.safetensors"}


@pytest.fixture
def push(capsys):
    def push(*words, code=0):
        assert cli.main(["push", *map(str, words)]) == code
        said = capsys.readouterr()
        assert TOKEN not in said.out + said.err and "%|" not in said.err  # a bar is for terminals
        return said.out if code == 0 else said.err

    return push


@pytest.fixture
def weights(tmp_path):
    """A small folder to push, for what does not look into it."""
    model = open_clip.create_model("PCMEpp-tiny")
    return export_model(model, tmp_path / "exported", "PCMEpp-tiny", card="---\nlicense: mit\n---\nmine\n")


def sent(hub):
    """Paths of the requests that carried something: weights and commits."""
    return [r.path.split("?")[0] for r in hub.requests if "/commit/" in r.path or "/_lfs/" in r.path]


def test_a_run_and_what_its_repo_holds(guarded, trained, push):
    assert "Step 8: 2 epochs, 128 samples seen: pushed to http" in push(trained, "me/run")
    files = guarded.files("me/run")
    assert set(files) == FILES | {"loss.png", "pseudo_positives.png", "uncertainty.png"}
    assert guarded.titles("me/run") == ["initial commit", "Step 8: 2 epochs, 128 samples seen"]
    config = json.loads(files["open_clip_config.json"])
    assert config["model_cfg"]["pcmepp_cfg"]["init_logvar_bias"] == -4.5
    assert config["preprocess_cfg"]["interpolation"] == "bicubic"
    (tensors := trained.parent / "pushed.safetensors").write_bytes(files["open_clip_model.safetensors"])
    state = torch.load(trained / "checkpoints/epoch_2.pt", weights_only=True)["state_dict"]
    loaded = load_file(tensors)
    assert loaded.keys() == state.keys() and all(torch.equal(loaded[name], state[name]) for name in state)


def test_the_card(guarded, trained, push):
    push(trained, "me/card")
    text = guarded.files("me/card")["README.md"].decode()
    for part in (
        *("import pcmepp_openclip", 'create_model_from_pretrained("hf-hub:me/card")', "unexpected keyword argument"),
        *("| photos | 64 | 128 |", "| lr | `0.001` |", "| batch_size | `16` |", "| vib_weight | `0.0001` |"),
        *("8 steps, 128 samples seen", "log-variance head | 1 transformer block", "a bias that starts at -4.5"),
        *("](loss.png)", "](pseudo_positives.png)", "](uncertainty.png)", "torch 2", "64 validation"),
        *("## Limits", "## Licence", "@inproceedings"),
    ):
        assert part in text, part
    data = ModelCard(text).data
    results = {result.metric_type: result.metric_value for result in data.eval_results}
    lines = (trained / "checkpoints/results.jsonl").read_text().splitlines()
    assert results["image_to_text_R@1"] == pytest.approx(json.loads(lines[-1])["image_to_text_R@1"], abs=1e-6)
    assert "csd/text_to_image_R@5" in results and data.license == "mit" and data.library_name == "open_clip"
    for hidden in (str(trained.parent), "secret-place", "/tmp", os.path.expanduser("~"), TOKEN):
        assert all(hidden.encode() not in content for content in guarded.files("me/card").values()), hidden


def test_loaded_again_it_is_the_trained_model(guarded, trained, push, tmp_path):
    push(trained, "me/again")
    original = open_clip.create_model("PCMEpp-tiny", pretrained=str(trained / "checkpoints/epoch_2.pt"))
    assert_same_outputs(open_clip.create_model("hf-hub:me/again"), original)
    model, preprocess = open_clip.create_model_from_pretrained("hf-hub:me/again")
    assert_same_outputs(model, original)
    _, _, own = open_clip.create_model_and_transforms("PCMEpp-tiny")
    assert repr(preprocess).replace("[", "(").replace("]", ")") == repr(own)
    tokens = open_clip.get_tokenizer("hf-hub:me/again")(["a dog"])
    assert torch.equal(tokens, open_clip.get_tokenizer("PCMEpp-tiny")(["a dog"])) and tokens.shape == (1, 32)
    for name in ("open_clip_config.json", "open_clip_model.safetensors"):
        shutil.copy(hf_hub_download("me/again", name), tmp_path)
    assert_same_outputs(open_clip.create_model(f"local-dir:{tmp_path}"), original)


def test_again_nothing_is_sent(guarded, weights, push):
    push(weights, "me/twice")
    guarded.requests.clear()
    assert "nothing has changed" in push(weights, "me/twice")
    assert sent(guarded) == [] and len(guarded.titles("me/twice")) == 2


def test_a_checkpoint_on_a_branch_with_a_tag_and_every_revision_loads(guarded, trained, push):
    first, last = (trained / f"checkpoints/epoch_{epoch}.pt" for epoch in (1, 2))
    push(last, "me/revisions")
    said = push(first, "me/revisions", "--branch", "early", "--tag", "v1")
    assert "Step 4: 1 epoch, 64 samples seen: pushed" in said
    commit = guarded.tags("me/revisions")["v1"]
    text = guarded.files("me/revisions", "early")["README.md"].decode()
    assert "**the run was not finished then** (1 of 2 epochs" in text and "| photos | 64 | 64 |" in text
    expected = {path: outputs(open_clip.create_model("PCMEpp-tiny", pretrained=str(path))) for path in (first, last)}
    for revision, path in (("", last), ("@main", last), ("@early", first), ("@v1", first), (f"@{commit}", first)):
        model = open_clip.create_model(f"hf-hub:me/revisions{revision}")
        assert torch.equal(outputs(model)["im"], expected[path]["im"]), revision
        assert open_clip.get_tokenizer(f"hf-hub:me/revisions{revision}")(["x"]).shape == (1, 32)
    with pytest.raises(RuntimeError, match="me/revisions"):
        open_clip.create_model("hf-hub:me/revisions@nothing")
    assert "tag 'v1' stands for another commit" in push(last, "me/revisions", "--tag", "v1", code=2)
    push(first, "me/revisions", "--branch", "early", "--tag", "v1")


def test_a_pull_request(guarded, trained, push, weights):
    push(weights, "me/asked")
    assert "/me/asked/discussions/1" in push(trained, "me/asked", "--pr")
    assert "loss.png" not in guarded.files("me/asked") and "loss.png" in guarded.files("me/asked", "refs/pr/1")
    assert "drop --branch" in push(trained, "me/asked", "--pr", "--branch", "x", code=2)
    assert "drop --tag or --pr" in push(trained, "me/asked", "--pr", "--tag", "x", code=2)
    guarded.fail("/commit/", lose_answer=True)
    (weights / "README.md").write_text("changed")
    assert "No answer whether the pull request was opened" in push(weights, "me/asked", "--pr", code=2)
    assert sum("/commit/main?create_pr" in r.path for r in guarded.requests) == 2  # it was not tried a second time


def test_a_private_repo(guarded, push, weights, monkeypatch):
    push(weights, "me/private", "--private")
    assert guarded.store.load("models", "me/private")["private"]
    assert open_clip.create_model("hf-hub:me/private") is not None
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(RuntimeError, match="me/private"):
        open_clip.create_model("hf-hub:me/private", cache_dir=str(weights.parent / "cache"))


def test_a_dry_run_needs_neither_network_nor_token(hub, trained, push, weights):
    said = push(trained, "me/dry", "--dry-run")
    assert "open_clip_model.safetensors " in said and "14,390," in said and "## How to load it" in said
    assert "mine" in push(weights, "me/dry", "--dry-run")
    assert hub.requests == []


def test_an_exported_folder(guarded, push, weights, tmp_path):
    (weights / "optimizer.pt").write_bytes(b"x")
    (weights / "code.py").write_text("raise SystemExit")
    push(weights, "me/exported")
    assert set(guarded.files("me/exported")) == FILES
    assert guarded.files("me/exported")["README.md"].endswith(b"mine\n")
    (weights / "README.md").unlink()
    push(weights, "me/exported2", "--license", "cc-by-4.0")
    card = guarded.files("me/exported2")["README.md"].decode()
    assert "license: cc-by-4.0" in card and "holds no record of its training" in card
    (weights / "open_clip_model.safetensors").rename(weights / "open_clip_pytorch_model.bin")
    assert "only safetensors are pushed, no pickles" in push(weights, "me/exported3", code=2)


def test_files_that_do_not_know_their_model(guarded, push, weights, tmp_path):
    file = weights / "open_clip_model.safetensors"
    state = load_file(file)
    torch.save({f"module.{name}": tensor for name, tensor in state.items()}, tmp_path / "bare.pt")
    for path in (file, tmp_path / "bare.pt"):
        assert "add --model" in push(path, "me/bare", code=2)
        push(path, "me/bare", "--model", "PCMEpp-tiny")
        loaded = open_clip.create_model("hf-hub:me/bare").state_dict()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    assert "does not fit the model config" in push(file, "me/bare", "--model", "PCMEpp-ViT-B-32", code=2)
    assert "There is no model 'PCMEpp-huge'" in push(file, "me/bare", "--model", "PCMEpp-huge", code=2)
    assert "no such file or folder" in push(tmp_path / "nothing", "me/bare", code=2)
    assert "neither open_clip_config.json nor a good" in push(tmp_path, "me/bare", code=2)
    assert "'run' is no name of a repo" in push(file, "run", code=2)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil-was-here",)


def test_a_pickle_is_not_run(guarded, push, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": Evil()}, tmp_path / "evil.pt")
    (tmp_path / "evil2.pt").write_bytes(pickle.dumps(Evil()))
    for name in ("evil.pt", "evil2.pt"):
        push(tmp_path / name, "me/evil", "--model", "PCMEpp-tiny", code=2)
    assert not (tmp_path / "evil-was-here").exists()


# What may fail. Waits are shortened; the client's own are as they are.


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(upload, "RETRY_WAITS_S", (0.1, 0.2))


PASSING = {
    "409": {"pattern": "/commit/", "status": 409, "times": 1},
    "412": {"pattern": "/commit/", "status": 412, "times": 1},
    "429": {"pattern": "/commit/", "status": 429, "headers": {"Retry-After": "1"}, "times": 1},
    "500": {"pattern": "/repos/create", "status": 500, "times": 2},
    "503 of the storage": {"pattern": "/_lfs/", "status": 503, "headers": {"Retry-After": "0"}, "times": 1},
    "cut upload": {"pattern": "/_lfs/", "cut_upload_after": 1_000_000, "times": 1},
    "cut commit": {"pattern": "/commit/", "cut_upload_after": 1000, "times": 1},
    "lost answer": {"pattern": "/commit/", "lose_answer": True, "times": 1},
    "expired address": {"pattern": "/_lfs/", "status": 403, "message": "Request has expired", "times": 1},
}


@pytest.mark.parametrize("failure", PASSING.values(), ids=[name.replace(" ", "-") for name in PASSING])
def test_what_passes_is_tried_again(failure, guarded, push, weights, hasty, request):
    repo = f"me/{request.node.callspec.id}"
    asked = guarded.fail(**failure)
    assert "pushed to" in push(weights, repo)
    assert asked.hits == failure["times"]
    assert guarded.files(repo)["open_clip_model.safetensors"] == (weights / "open_clip_model.safetensors").read_bytes()
    assert len(guarded.titles(repo)) == 2  # one commit, however often it was tried


LASTING = {
    "401": ({"pattern": "/repos/create", "status": 401}, "does not take the token"),
    "403": ({"pattern": "/commit/", "status": 403, "message": "no"}, "may not write to me/lasting.*member of me"),
    "404": ({"pattern": "/commit/", "status": 404}, "does not find me/lasting or its branch"),
    "402": ({"pattern": "/lfs/objects/batch", "status": 402}, "no room left for me/lasting"),
    "400": ({"pattern": "/commit/", "status": 400, "message": "bad name"}, r"refuses the push.*400: bad name"),
    "503": ({"pattern": "/commit/", "status": 503}, "Gave up pushing to me/lasting after 3 tries: the Hub answers"),
    "no network": ({"pattern": "/api/", "lose_answer": True}, "Gave up .* the Hub cannot be reached"),
}


@pytest.mark.parametrize("failure, words", LASTING.values(), ids=[name.replace(" ", "-") for name in LASTING])
def test_what_lasts_is_given_up_in_one_sentence(failure, words, guarded, push, weights, hasty):
    guarded.fail(**failure, headers={"X-Note": f"Bearer {TOKEN}"} if "status" in failure else {})
    said = push(weights, "me/lasting", code=2)
    last = said.splitlines()[-1]
    assert re.search(words, last), said
    assert all(line.startswith("Pushing to me/lasting: the Hub ") for line in said.splitlines()[:-1])
    guarded.failures.clear()
    push(weights, "me/lasting")  # and it can be finished later


def test_a_server_that_repeats_the_token(guarded, push, weights, hasty):
    guarded.fail("/commit/", status=400, message=f"bad token {TOKEN} in https://me:pw@host/x?sig=abc")
    said = push(weights, "me/echo", code=2)  # `push` looks for the token
    assert "pw" not in said and "abc" not in said and "bad token" in said


def test_nobody_listens(guarded, push, weights, hasty, monkeypatch):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{held.getsockname()[1]}")
        said = push(weights, "me/alone", code=2)
    assert "Gave up pushing to me/alone after 3 tries: the Hub cannot be reached (ConnectError)." in said


def test_a_full_quota(guarded, push, weights):
    guarded.quota = 1000
    assert "no room left for me/full" in push(weights, "me/full", code=2)


def test_tokens_that_may_not(guarded, push, weights, monkeypatch):
    push(weights, "me/guarded")
    guarded.reader = "hf_reader"
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    assert "may not write to me/guarded" in push(weights, "me/guarded", code=2)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "does not take the token" in push(weights, "me/guarded", code=2)
    monkeypatch.delenv("HF_TOKEN")
    assert "no token to push to me/guarded with: set HF_TOKEN or run `hf auth login`" in push(
        weights, "me/guarded", code=2
    )


TERMINAL = """
import sys, open_clip
from pcmepp_openclip import cli
assert cli.main(["push", sys.argv[1], "me/seen"]) == 0
print("NOW THE OTHER WAY", flush=True)
open_clip.create_model("hf-hub:me/seen", cache_dir=sys.argv[2])
"""


def test_progress_on_a_terminal(guarded, weights, tmp_path):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-c", TERMINAL, str(weights), str(tmp_path / "cache")]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, stdin=theirs, env=env)
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # how a terminal ends
        while block := os.read(ours, 4096):
            seen += block
    assert process.wait() == 0, seen.decode()
    up, down = seen.decode().split("NOW THE OTHER WAY")
    assert "14.4M/14.4M" in up and "14.4M/14.4M" in down and TOKEN not in up + down
