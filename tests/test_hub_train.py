"""`pcmepp train --push-to-hub`: real runs that push to a local Hub from their background, and whatever goes wrong."""

import json
import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import open_clip
import pytest
from drawn_shards import write_shards
from hub_helpers import TOKEN, assert_same_outputs, train_flags
from hub_server import Hub
from huggingface_hub import ModelCard
from ranks import Ranks
from watching import children, log_of, wait_for

from pcmepp_openclip import cli
from pcmepp_openclip.hub.upload import HubTarget
from pcmepp_openclip.runs import checkpoints
from pcmepp_openclip.training import command as train
from pcmepp_openclip.training.push import Pusher

UNSEEN = ("--val-frequency", "0")  # where validation is not what is looked at


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    pattern = write_shards(tmp_path_factory.mktemp("data"), 2, 32)
    assert cli.main(["data", "count", pattern]) == 0
    return pattern


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Training processes that have the token, as an environment variable and in no other way."""
    os.environ["HF_TOKEN"] = TOKEN
    try:
        server = Ranks(tmp_path_factory.mktemp("ranks") / "log")
    finally:
        del os.environ["HF_TOKEN"]
    yield server
    server.close()


@pytest.fixture
def flags(data, tmp_path):
    return lambda repo, *more: train_flags(data, tmp_path, "run", "--push-to-hub", repo, "--resume", "latest", *more)


def workers(pid: int) -> list[int]:
    return [child for child in children(pid) if "hub.background" in command_line(child)]


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:  # it has just ended
        return ""


def state(pid: int) -> str:
    path = Path(f"/proc/{pid}/stat")
    return path.read_text().rsplit(")", 1)[1].split()[0] if path.exists() else "X"


def alive(pid: int) -> bool:
    return state(pid) not in "ZX"


def is_idle(pid: int) -> bool:
    """Return whether it waits, all imported, for a second; on a busy machine imports take longer than a push may."""
    return all(state(pid) == "S" and time.sleep(0.05) is None for _ in range(20))


@dataclass(frozen=True)
class Pushed:
    """A run of 6 epochs of 4 steps that pushed, and the Hub that it pushed to."""

    hub: Hub
    run: Path
    log: str
    steps: list[int]  # those that were pushed

    def card(self, step: int) -> str:
        return self.hub.files("me/training", f"step-{step}")["README.md"].decode()


@pytest.fixture(scope="module")
def pushed(ranks, data, session_hub, tmp_path_factory):
    """On a slow Hub that fails now and then, with checkpoints that are deleted while they wait."""
    session_hub.reset()
    session_hub.token = TOKEN
    session_hub.fail("/_lfs/", upload_rate=5e6)
    session_hub.fail("/commit/", status=503, times=1)
    folder = tmp_path_factory.mktemp("pushed")
    more = ["--epochs", "6", "--delete-previous-checkpoint", "--hub-tag", "--hub-private"]
    assert ranks.run(1, train_flags(data, folder, "run", "--push-to-hub", "me/training", *more)) == [0]
    steps = [int(title.split()[1].rstrip(":")) for title in session_hub.titles("me/training")[1:]]
    yield Pushed(session_hub, folder / "run", log_of(folder / "run"), steps)
    session_hub.reset()
    session_hub.token = session_hub.reader = None


def test_the_run_folder_holds_its_last_checkpoint_and_no_leftovers(pushed):
    assert [path.name for path in (pushed.run / "checkpoints").glob("*.pt")] == ["epoch_6.pt"]
    assert not (pushed.run / "hub-queue").exists() and not list(pushed.run.glob(".hub-*"))
    assert (pushed.run / "done").exists()


def test_newer_checkpoints_take_the_place_of_those_that_wait(pushed):
    assert pushed.hub.titles("me/training")[-1] == "Step 24: 6 epochs, 384 samples seen"
    assert pushed.steps == sorted(set(pushed.steps)) and 0 < len(pushed.steps) < 6


def test_every_push_is_tagged_and_the_repo_is_private(pushed):
    assert set(pushed.hub.tags("me/training")) == {f"step-{step}" for step in pushed.steps}
    assert pushed.hub.store.load("models", "me/training")["private"]


def test_the_log_tells_of_pushes_and_of_failures(pushed):
    assert "Hub: me/training holds the last checkpoint, step 24." in pushed.log
    assert "Hub: pushed step 24: http" in pushed.log
    assert "503" in pushed.log and "trying again in" in pushed.log


def test_a_checkpoint_is_pushed_after_its_validation(pushed):
    for epoch in range(1, 7):
        ready = pushed.log.index(f"Hub: step {4 * epoch} is ready")
        assert pushed.log.rindex(f"Eval Epoch: {epoch} ") < ready, epoch


def test_each_card_has_the_metrics_of_its_own_epoch(pushed):
    results = [json.loads(line) for line in (pushed.run / "checkpoints/results.jsonl").read_text().splitlines()]
    assert len(results) == 6
    for step in pushed.steps:
        shown = {x.metric_type: x.metric_value for x in ModelCard(pushed.card(step)).data.eval_results}
        assert shown["clip_val_loss"] == pytest.approx(results[step // 4 - 1]["clip_val_loss"], abs=1e-6), step


def test_the_last_card_counts_the_samples(pushed):
    card = pushed.card(24)
    assert "384 samples seen" in card and "| data | samples |" in card and "| photos | 64 | 384 |" in card


def test_the_repo_gives_the_trained_model(pushed, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    original = open_clip.create_model("PCMEpp-tiny", pretrained=str(pushed.run / "checkpoints/epoch_6.pt"))
    assert_same_outputs(open_clip.create_model("hf-hub:me/training"), original)


def test_the_token_is_in_no_file(pushed, ranks):
    written = [path for path in [*pushed.run.rglob("*"), ranks.log] if path.is_file()]
    assert {"out.log", "params.txt", "history.jsonl", "epoch_6.pt", "log"} <= {path.name for path in written}
    for path in written:
        assert TOKEN.encode() not in path.read_bytes(), path


def test_nothing_secret_is_on_the_hub(pushed):
    revisions = pushed.hub.store.load("models", "me/training")["commits"]
    assert len(revisions) > len(pushed.steps)
    for revision in revisions:
        for name, content in pushed.hub.files("me/training", revision).items():
            assert TOKEN.encode() not in content and str(pushed.run.parent).encode() not in content, name


def test_a_push_by_hand_has_nothing_left_to_do(pushed, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    pushed.hub.requests.clear()
    assert cli.main(["push", str(pushed.run), "me/training"]) == 0
    assert not any("/commit/" in r.path or "/_lfs/" in r.path for r in pushed.hub.requests)


def test_a_checkpoint_that_is_deleted_while_it_waits(guarded, trained, tmp_path):
    checkpoint = tmp_path / "run" / "epoch_2.pt"
    checkpoint.parent.mkdir()
    shutil.copy(trained / "checkpoints/epoch_2.pt", checkpoint)
    pusher = Pusher(HubTarget("me/waiting"), tmp_path / "run")
    pusher.offer(checkpoint, 8, hold=True)
    checkpoint.unlink()
    assert pusher.held is not None  # until its validation is done
    pusher.release()
    pusher.finish(120)
    assert guarded.titles("me/waiting")[-1] == "Step 8: 2 epochs, 128 samples seen" and pusher.pushed == 8


def test_a_stop_pushes_what_was_saved(guarded, ranks, flags, tmp_path):
    pids = ranks.start(
        2, flags("me/stopped", *UNSEEN, "--epochs", "9000", "--save-frequency", "9999", "--hub-branch", "x")
    )
    run = tmp_path / "run"
    wait_for(lambda: "Train Epoch: 1 " in log_of(run) and len(workers(pids[0])) == 1)
    (worker,) = workers(pids[0])
    wait_for(lambda: is_idle(worker))
    os.kill(worker, signal.SIGTERM)  # a scheduler sends it to every process
    time.sleep(0.5)
    assert alive(worker)
    os.kill(pids[1], signal.SIGTERM)
    assert workers(pids[1]) == []
    assert ranks.wait(pids) == [75, 75]
    epochs, _ = checkpoints.position(checkpoints.newest_good(run / "checkpoints"))
    assert guarded.titles("me/stopped", "x")[-1].split(": ")[1].startswith(f"{epochs} epoch")
    assert "Hub: me/stopped holds the last checkpoint" in log_of(run)


def test_the_run_outlives_its_pusher_and_push_finishes_the_job(guarded, ranks, flags, tmp_path):
    (pid,) = ranks.start(1, flags("me/orphan", *UNSEEN, "--hub-branch", "side"))
    run = tmp_path / "run"
    while ranks.alive(pid):
        for worker in workers(pid):
            os.kill(worker, signal.SIGKILL)
        time.sleep(0.05)
    assert ranks.wait([pid]) == [0]
    log = log_of(run)
    command = f"`pcmepp push {run} me/orphan --branch side`"
    assert "Hub: step 8 was not pushed: the process that pushes was killed (signal 9). Training continues." in log
    assert f"Hub: the last checkpoint is not on the Hub yet: run {command}." in log
    assert (run / "done").exists() and not (run / "hub-queue").exists()
    assert cli.main(["push", str(run), "me/orphan", "--branch", "side"]) == 0
    assert guarded.titles("me/orphan", "side")[-1] == "Step 8: 2 epochs, 128 samples seen"


def test_the_pusher_does_not_outlive_its_run(guarded, ranks, flags, tmp_path):
    guarded.fail("/_lfs/", upload_rate=1e5)
    (pid,) = ranks.start(1, flags("me/killed", *UNSEEN, "--epochs", "500"))
    wait_for(lambda: any("/lfs/objects/batch" in r.path for r in list(guarded.requests)))
    (worker,) = workers(pid)
    os.kill(pid, signal.SIGKILL)
    assert ranks.wait([pid]) == [-9]
    wait_for(lambda: not alive(worker), 30)
    assert len(guarded.titles("me/killed")) == 1


def test_no_network_at_the_start(guarded, ranks, flags, tmp_path):
    guarded.fail("/", lose_answer=True)
    (pid,) = ranks.start(1, flags("me/unreachable", *UNSEEN))
    wait_for(lambda: "Hub: Pushing to me/unreachable: the Hub cannot be reached" in log_of(tmp_path / "run"))
    assert not guarded.store.exists("models", "me/unreachable") or len(guarded.titles("me/unreachable")) == 1
    guarded.failures.clear()
    assert ranks.wait([pid]) == [0]
    assert guarded.titles("me/unreachable")[-1] == "Step 8: 2 epochs, 128 samples seen"
    said = ranks.log.read_text()
    assert "the Hub cannot be reached (RemoteProtocolError). Training starts anyway" in said


REFUSED = {
    "401": ({"status": 401}, "does not take the token"),
    "403": ({"status": 403, "message": "not yours"}, "may not write to org/refused .403: not yours"),
    "404": ({"status": 404}, "does not find org/refused"),
}


@pytest.mark.parametrize("failure, words", REFUSED.values(), ids=REFUSED)
def test_a_run_that_may_not_push_does_not_start(failure, words, guarded, flags, tmp_path, capsys):
    guarded.fail("/api/repos/create", **failure)
    guarded.fail("/auth-check/write", **failure)
    assert train.main(flags("org/refused")) == 2
    said = capsys.readouterr().err
    assert said.startswith("pcmepp train: --push-to-hub: ") and said.count("\n") == 1
    assert words.replace(".403", "(403") in said and not (tmp_path / "run").exists()


def test_mistakes_that_show_before_the_first_step(hub, flags, tmp_path, capsys):
    for argv, words in (
        (flags("me/x"), "There is no token to push to me/x"),
        (flags("nonsense"), "'nonsense' is no name of a repo"),
        (flags("me/x", "--logs", "none"), "--logs"),
        (flags("me/x", "--hub-token", "abc"), "there is no flag --hub-token"),  # a token is never an argument
    ):
        assert train.main(argv) == 2
        said = capsys.readouterr().err
        assert words in said and "abc" not in said
    assert not (tmp_path / "run").exists()
