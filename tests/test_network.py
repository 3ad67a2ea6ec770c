"""How ranks find each other, and how all of them end when one does: real processes on this machine."""

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from drawn_shards import write_shards
from network_rank import tally_of
from watching import children

from pcmepp_openclip.data.tally import Tally
from pcmepp_openclip.system import network
from pcmepp_openclip.training import failures

WORKER = "network_rank"


# The interface. {address: name} as on typical nodes; `sources` are the own addresses from which a host is reached.

HOME, WIRE, FAST = {"127.0.0.1": "lo", "::1": "lo"}, {"10.0.0.1": "eth0", "fe80::1": "eth0"}, {"10.1.0.1": "ib0"}
CASES = {
    "one machine": ({**HOME, **WIRE}, {"head": ["127.0.0.1"]}, False, "lo"),
    "one machine by its name": ({**HOME, **WIRE}, {"head": ["10.0.0.1"]}, False, "eth0"),
    "another node": ({**HOME, **WIRE, **FAST}, {"head": ["10.1.0.1"]}, True, "ib0"),
    "IPv6": ({**HOME, "fd00::7": "eth1"}, {"head": ["fd00::7"]}, True, "eth1"),
    "loopback first": ({**HOME, **WIRE, **FAST}, {"head": ["::1", "10.1.0.1"]}, True, "ib0"),
    "the head is loopback, one interface": ({**HOME, **WIRE}, {"head": ["127.0.0.1"]}, True, "eth0"),
    "the head is loopback, default route": (
        {**HOME, **WIRE, **FAST},
        {"head": ["127.0.0.1"], network.ELSEWHERE: ["10.0.0.1"]},
        True,
        "eth0",
    ),
    "the head is loopback, a choice": ({**HOME, **WIRE, **FAST}, {"head": ["127.0.0.1"]}, True, None),
    "no such name": ({**HOME, **WIRE, **FAST}, {}, True, None),
    "no interfaces known": ({}, {"head": ["10.0.0.1"]}, True, None),
}


def test_the_interface_is_that_of_the_route_to_the_head_node(monkeypatch):
    for case, (names, sources, several, wanted) in CASES.items():
        monkeypatch.setattr(network, "_interfaces", lambda names=names: names)
        monkeypatch.setattr(network, "_sources", lambda host, sources=sources: sources.get(host, []))
        assert network.interface_towards("head", several) == wanted, case


def test_the_variable_is_set_only_if_it_is_unset(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # it is as it was after the test
    for before, head, after in (
        (None, "localhost", "lo"),
        ("eth7", "localhost", "eth7"),
        (None, "no-such-host.invalid", None),
        (None, None, None),
    ):
        for name, value in (("GLOO_SOCKET_IFNAME", before), ("MASTER_ADDR", head)):
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
        network.choose_interface()
        assert os.environ.get("GLOO_SOCKET_IFNAME") == after, (before, head)


def test_the_launcher_says_whether_there_are_several_nodes(monkeypatch):
    for environment, several in (
        ({}, False),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, False),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, True),
        ({"SLURM_NNODES": "2"}, True),
        ({"SLURM_NNODES": "2", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, False),
    ):
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NNODES"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert network.several_nodes() is several


# Groups and files.


def test_a_group_that_cannot_be_created_names_the_variable(ranks, tmp_path):
    assert ranks.run(1, ["refused", tmp_path], module=WORKER) == [1]
    last = ranks.log.read_text().splitlines()[-1]
    assert "The ranks could not connect to each other by the network interface nowhere0 (GLOO_SOCKET_IFNAME)" in last
    assert "set GLOO_SOCKET_IFNAME on every node" in last


def test_the_limit_of_open_files_is_raised(ranks, tmp_path):
    assert ranks.run(1, ["open_files", tmp_path], module=WORKER) == [0]
    (enough, too_low), soft = json.loads((tmp_path / "files.json").read_text())
    assert enough is None and soft == 4096
    assert too_low.startswith("A process may have 4096 open files here, and with 5000 ranks it may need 11024")
    assert "ulimit -Hn" in too_low


def test_summaries_are_added_up_and_a_late_rank_breaks_nothing(ranks, tmp_path):
    world = 3
    assert ranks.run(world, ["gather", tmp_path], module=WORKER) == [0] * world
    answers = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world)]
    for others, count in ((range(world), world), (range(world - 1), world - 1)):
        slow = Tally()
        for rank in others:
            slow.add(tally_of(rank))
        plain, ranks_in_it = answers[0].pop(0)
        assert Tally.from_plain(plain) == slow and ranks_in_it == count
        assert all(answer.pop(0) == [plain, count] for answer in answers[1:])


def test_gradients_are_added_in_the_same_order_in_every_step(ranks, tmp_path):
    """From the first step on, or a run of more than two ranks that is resumed would not be the same to the last bit."""
    assert ranks.run(4, ["buckets", tmp_path], module=WORKER) == [0] * 4
    first, *others = torch.load(tmp_path / "0.pt", weights_only=True)
    assert len(first) > 50
    for later in others:
        assert all(torch.equal(a, b) for a, b in zip(first, later, strict=True))


# A rank that fails ends the others.


def ended(ranks, pids, seconds):
    """The exit codes of ranks that end by themselves."""
    end = time.monotonic() + seconds
    while any(ranks.alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    late = [pid for pid in pids if ranks.alive(pid)]
    for pid in late:
        os.kill(pid, signal.SIGKILL)
    codes = ranks.wait(pids)
    assert not late, f"{late} of {pids} were left"
    return codes


@pytest.mark.parametrize("failing", [0, 1])
def test_bad_data_of_one_rank_end_all_ranks_with_its_sentence(ranks, tmp_path, failing):
    """The other one waits for data, where the loss of its connections does not show. Rank 0 holds the store."""
    shard = write_shards(tmp_path / "shards", shards=1, samples=16).replace("{00000..00000}", "00000")
    gate, log, said = tmp_path / "gate", tmp_path / "run/out.log", len(ranks.log.read_text())
    pipe = f"pipe:[ -e {gate} ] || exec cat {shard}; [ $RANK = {failing} ] && exec true; exec tail -f {gate}"
    flags = """--model PCMEpp-tiny --train-num-samples 64 --dataset-resampled --dataset-type webdataset --batch-size 4
    --epochs 1000 --workers 1 --precision fp32 --device cpu --train-data-shuffle-buffer 4 --save-frequency 0
    --train-data-max-empty-shards 2 --name run"""
    argv = [*flags.split(), "--train-data", pipe, "--logs", str(tmp_path)]
    pids = ranks.start(2, ["train", tmp_path / "groups", *argv], module=WORKER)
    end = time.monotonic() + 60
    while not (log.exists() and "Train Epoch: 0" in log.read_text()):
        assert time.monotonic() < end, ranks.log.read_text()[said:]
        time.sleep(0.02)
    workers = [worker for pid in pids for worker in children(pid)]
    gate.touch()
    end = time.monotonic() + 60
    assert ended(ranks, pids, 30) == [2, 2]
    assert len(workers) == 2
    while any(map(running, workers)) or any(str(gate) in command for command in commands()):
        assert time.monotonic() < end, "a data worker or its command is left"
        time.sleep(0.02)
    text = ranks.log.read_text()[said:]
    assert len(re.findall("pcmepp train: .*no usable sample", text)) == 1 and "Traceback" not in text
    assert json.loads((tmp_path / "groups").read_text()) == ["gloo"]  # one group beside torch's default one


@pytest.mark.parametrize(
    "signals, codes",
    [
        ([(0, "KILL")], [-9, 1]),
        ([(1, "KILL")], [1, -9]),
        ([(1, "STOP"), (0, "STOP"), (1, "CONT")], [1, 1]),  # the rank that holds the store does not answer
        ([(0, "STOP"), (1, "KILL"), (0, "CONT")], [1, -9]),
        ([(1, "STOP"), (0, "TERM"), (1, "CONT")], [75, 75]),
    ],
    ids=["rank 0 vanishes", "rank 1 vanishes", "rank 1 late, rank 0 stopped", "rank 0 late", "stop of a late rank"],
)
def test_a_rank_that_is_late_or_vanishes_ends_the_others_with_a_sentence(ranks, tmp_path, signals, codes):
    """Signals to the ranks of a run, a second apart, by the command itself."""
    said, log = len(ranks.log.read_text()), tmp_path / "run/out.log"
    flags = """train --model PCMEpp-tiny --dataset-type synthetic --train-num-samples 64 --workers 0 --batch-size 4
    --epochs 10000 --precision fp32 --device cpu --save-frequency 0 --name run --rank-timeout-minutes 0.05"""
    argv = [*flags.split(), "--logs", tmp_path]
    pids = ranks.start(2, argv, module="pcmepp_openclip.cli")
    end = time.monotonic() + 60
    while not (log.exists() and "Train Epoch: 0" in log.read_text()):
        assert time.monotonic() < end, ranks.log.read_text()[said:]
        time.sleep(0.02)
    for rank, name in signals:
        os.kill(pids[rank], getattr(signal, f"SIG{name}"))
        time.sleep(1)
    found = ended(ranks, pids, 40)
    text = ranks.log.read_text()[said:]
    assert found == codes and "Traceback" not in text, text[-3000:]
    assert (tmp_path / "run/stopped").exists() == (75 in codes)
    if 1 in codes:
        assert "has lost another rank" in text


def test_a_store_that_does_not_answer_keeps_no_rank_that_failed(monkeypatch):
    """The rank that holds it may be stopped on another node, where nothing wakes it up."""

    class Store:
        def compare_set(self, *args):
            time.sleep(20)
            raise RuntimeError("the connection was closed")

    monkeypatch.setattr(network, "run_store", Store)
    monkeypatch.setattr(failures, "REPORT_TIMEOUT_S", 0.1)
    begin = time.monotonic()
    with (
        pytest.raises(ValueError, match="no such data"),
        failures.FailureWatch(1, 2, leads_node=True, before_exit=lambda: None),
    ):
        raise ValueError("no such data")
    assert time.monotonic() - begin < 10


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def commands() -> list[str]:
    """The command lines of all processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_text())
    return found
