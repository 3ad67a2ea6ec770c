"""launch/vm.sh: a machine that is about to be preempted, crashes, and what is not started again.

The metadata server is a real one on loopback. A stand-in for Python plays the run where only the script is tested."""

import http.server
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

REPO = Path(__file__).parent.parent
VM = REPO / "launch/vm.sh"


class Metadata(http.server.BaseHTTPRequestHandler):
    """Speaks as the three providers do. `server.preempted` is whether the end is announced, `server.asked` how often
    it was asked for, with the headers that the provider wants."""

    def do_PUT(self):
        wanted = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self._answer(200 if wanted else 404, "the-token")

    def do_GET(self):
        server, path, events = self.server, self.path, ""
        if path == "/latest/meta-data/spot/instance-action":
            if self.headers["X-aws-ec2-metadata-token"] != "the-token":
                return self._answer(401, "")
            server.asked += 1
            return self._answer(200 if server.preempted else 404, '{"action": "terminate", "time": "soon"}')
        if path == "/computeMetadata/v1/instance/preempted" and self.headers["Metadata-Flavor"] == "Google":
            server.asked += 1
            return self._answer(200, "TRUE" if server.preempted else "FALSE")
        if path == "/metadata/scheduledevents?api-version=2020-07-01" and self.headers["Metadata"] == "true":
            server.asked += 1
            events = '{"EventType": "Freeze"}' + (', {"EventType": "Preempt"}' if server.preempted else "")
            return self._answer(200, f'{{"DocumentIncarnation": 1, "Events": [{events}]}}')
        return self._answer(404, "")

    def _answer(self, status, text):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def metadata():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    server.preempted, server.asked = False, 0
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()


class Machine:
    """Starts the script on what would be a machine with one disk, `folder`."""

    def __init__(self, folder: Path, command, **variables):
        drop = ("SLURM_", "LAUNCH", "CLOUD", "METADATA", "VM_", "MAX_RESTARTS")
        env = {key: value for key, value in os.environ.items() if not key.startswith(drop)}
        self.env = {**env, "PYTHON": sys.executable, "PYTHONPATH": str(REPO), "CLOUD": "none", **variables}
        self.folder, self.command = folder, command

    def start(self):
        return subprocess.Popen(
            [str(word) for word in self.command],
            env=self.env,
            cwd=REPO,
            stdout=(self.folder / "output").open("a"),
            stderr=subprocess.STDOUT,
        )

    @property
    def output(self):
        return (self.folder / "output").read_text()

    @property
    def said(self):
        return re.findall(r"^launch: (.*)$", self.output, flags=re.MULTILINE)


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_a_preempted_machine_saves_and_the_same_command_resumes(metadata, tmp_path):
    """The smoke recipe with a rank: announced, saved, exit code 75; on the next machine it ends exactly as planned."""
    flags = ["--train-num-samples", "320", "--name", "run"]
    places = {"LOGS": str(tmp_path), "LAUNCH": "launch/vm.sh", "NPROC": "1"}
    cloud = {"CLOUD": "aws", "METADATA": f"http://127.0.0.1:{metadata.server_port}"}
    machine = Machine(tmp_path, [REPO / "launch/recipes/smoke-cpu.sh", *flags], **places, **cloud)
    log = tmp_path / "run/out.log"

    def steps():
        return re.findall(r"Train Epoch: 0 \[ *(\d+)/320", log.read_text()) if log.exists() else []

    first = machine.start()
    wait_for(lambda: len(steps()) >= 2 or first.poll() is not None)
    metadata.preempted = True
    assert first.wait(120) == 75, machine.output[-3000:]
    assert 2 <= len(steps()) < 40 and (tmp_path / "run/stopped").exists()
    assert "start 0: the machine is about to be preempted: asking the run to save and exit" in machine.said
    assert re.fullmatch(r"start 0: stopped after step \d+: the same command resumes the run", machine.said[-1])
    metadata.preempted = False
    assert machine.start().wait(240) == 0, machine.output[-3000:]
    assert steps() == [str(8 * step) for step in range(1, 41)]
    assert (tmp_path / "run/done").read_text() == "320 samples\n" and machine.said[-1] == "start 0: done"


STAND_IN = """#!/usr/bin/env bash
# In place of Python: notes its flags, and does what the file `script` says for this start.
set -eu
cd "$(dirname "$0")"
echo "$*" >>calls
mkdir -p runs/run/checkpoints
eval "$(sed -n "$(wc -l <calls)p" script)"
"""
WAIT = "until [[ -e runs/run/stop ]]; do sleep 0.05; done; "
SAVE = "sleep 0.05; touch runs/run/checkpoints/epoch_0_batch_$(wc -l <calls).pt; "


@pytest.fixture
def play(tmp_path):
    """play(*starts, **variables): the script with a run that does so at its starts."""

    def machine(*starts, **variables):
        (tmp_path / "script").write_text("\n".join(starts))
        (tmp_path / "python").write_text(STAND_IN)
        (tmp_path / "python").chmod(0o755)
        flags = ["--logs", tmp_path / "runs", "--name", "run"]
        return Machine(tmp_path, [VM, *flags], PYTHON=str(tmp_path / "python"), **variables)

    return machine


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
def test_each_provider_s_notice_is_heard(metadata, play, tmp_path, cloud):
    stop = WAIT + "echo 'step 5' >runs/run/stopped; exit 75"
    machine = play(stop, CLOUD=cloud, METADATA=f"http://127.0.0.1:{metadata.server_port}")
    running = machine.start()
    wait_for(lambda: metadata.asked >= 1)
    assert running.poll() is None and not (tmp_path / "runs/run/stop").exists()
    metadata.preempted = True
    assert running.wait(30) == 75, machine.output
    assert sum("is about to be preempted" in line for line in machine.said) == 1


def test_after_the_notice_a_shutdown_does_not_cut_the_saving_short(metadata, play, tmp_path):
    save = "touch asked; until [[ -e go ]]; do sleep 0.05; done; echo 'step 5' >runs/run/stopped; exit 75"
    machine = play(WAIT + save, CLOUD="gcp", METADATA=f"http://127.0.0.1:{metadata.server_port}")
    metadata.preempted = True
    running = machine.start()
    wait_for((tmp_path / "asked").exists)
    time.sleep(6)  # later, a second request would end the run
    running.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    (tmp_path / "go").touch()
    assert running.wait(30) == 75 and "again: ending the run" not in machine.output, machine.output


def test_sigterm_asks_the_run_to_save(play, tmp_path):
    machine = play("touch here; " + WAIT + "echo 'step 5' >runs/run/stopped; exit 75")
    running = machine.start()
    wait_for((tmp_path / "here").exists)
    running.send_signal(signal.SIGTERM)
    assert running.wait(30) == 75 and "start 0: TERM: asking the run to save and exit" in machine.said


def test_a_crash_is_started_again_where_there_was_progress(play, tmp_path):
    machine = play(SAVE + "exit 1", SAVE + "kill -9 $$", "touch runs/run/done")
    assert machine.start().wait(30) == 0, machine.output
    assert [line.split(": ", 1)[1] for line in machine.said if "run folder" not in line] == [
        "crashed (exit code 1): starting again from its last checkpoint",
        "crashed (exit code 137): starting again from its last checkpoint",
        "done",
    ]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 3 and all(
        call.count("--resume latest") == 1 + (number > 0) for number, call in enumerate(calls)
    )


@pytest.mark.parametrize(
    "starts, variables, code, words",
    [
        ([SAVE + "exit 2"], {}, 2, "failed by a mistake in the flags or the data (exit code 2): not started again"),
        (["exit 1"], {}, 1, "failed without a checkpoint since it started (exit code 1): not started again"),
        ([SAVE + "exit 1", "exit 1"], {}, 1, "start 1: failed without a checkpoint"),
        ([SAVE + "exit 1"] * 3, {"MAX_RESTARTS": "1"}, 1, "already started again 1 times (MAX_RESTARTS)"),
        (["echo 'step 3' >runs/run/stopped; exit 75"], {}, 75, "stopped after step 3"),  # by hand
    ],
)
def test_what_is_not_started_again(play, tmp_path, starts, variables, code, words):
    machine = play(*starts, **variables)
    assert machine.start().wait(30) == code, machine.output
    assert words in machine.said[-1]


def test_an_unknown_provider_is_refused(play):
    machine = play("exit 1", CLOUD="oracle")
    assert machine.start().wait(30) == 2 and machine.output == "CLOUD=oracle: there are aws, gcp, azure and none.\n"


def test_a_machine_without_curl_is_told(play, tmp_path):
    (tmp_path / "tools").mkdir()
    for name in ("bash", "env", "dirname", "cat"):
        (tmp_path / "tools" / name).symlink_to(shutil.which(name))
    machine = play("exit 1", CLOUD="aws", PATH=str(tmp_path / "tools"))
    assert machine.start().wait(30) == 2 and machine.output.startswith("There is no curl") and not machine.said


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--global-batch-size", "64"], "1 ranks instead of 2: accumulation keeps the global batch of 64"),
        ([], "1 ranks instead of 2: the global batch changes with them, since --global-batch-size is not given"),
    ],
)
def test_another_number_of_ranks_is_said(play, flags, words):
    for ranks in ("2", "2", "1"):
        machine = play("touch runs/run/done", "touch runs/run/done", "touch runs/run/done", NPROC=ranks)
        machine.command += flags
        assert machine.start().wait(30) == 0, machine.output
    assert [line for line in machine.said if "instead" in line] == [f"start 0: {words}"]
