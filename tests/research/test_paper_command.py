"""`python -m research.paper` at its smallest with real processes, and with a stand-in where only the order matters."""

import json
import math
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Executor, Future

import pytest
import torch

from pcmepp_openclip import cli
from pcmepp_openclip.data.captioned import Captioned
from pcmepp_openclip.evaluation.retrieval import precisions
from research.command import run as start
from research.paper import __main__ as command
from research.paper import baselines, pages, runs
from research.paper.pages import agreement
from research.paper.tables import FIGURES, TABLES

SMALL = ["--seeds", "1", "--steps", "2", "--start-steps", "2", "--size", "256"]


def paper(*words):
    return start(command.NAME, command.main, list(map(str, words)))


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(runs, "HELD_OUT", 30)
    monkeypatch.setattr(runs, "ZEROSHOT", 24)


def in_this_process(self, line, log):
    """`Runner._call` without the seconds that a new process takes to import."""
    from pcmepp_openclip.training import command as train

    log.parent.mkdir(parents=True, exist_ok=True)
    log.touch()
    words = line[line.index("-m") + 1 :]
    if words[0] == "pcmepp_openclip.train":
        assert train.main(words[1:]) == 0
    else:
        assert cli.run(words[1:]) == 0


class Inline(Executor):
    """A pool that does the work at once: training sets signal handlers, which only the main thread may."""

    def __init__(self, workers):
        pass

    def submit(self, work, *args):
        future = Future()
        try:
            future.set_result(work(*args))
        except runs.Failed as failure:
            future.set_exception(failure)
        return future


def test_a_table_of_two_rows_in_real_processes(small, tmp_path, capfd):
    """One training from scratch, which both rows share, and one evaluation."""
    line = ["imagenet", "--rows", "one,best-k", *SMALL, "--out", str(tmp_path / "out")]
    assert paper(*line) == 0
    printed = capfd.readouterr().out
    results = json.loads((tmp_path / "out/imagenet/results.json").read_text())
    (run,) = (tmp_path / "out/runs").iterdir()
    found = json.loads((run / "seed-0/eval-zeroshot/results.json").read_text())["zeroshot"]["zeroshot"]["metrics"]
    one, best = results["rows"]
    assert one["paper"] == {"Top-1": 30.43} and best["paper"] == {"Top-1": 41.82}
    assert one["ours"]["0"]["Top-1"] == pytest.approx(100 * found["one_prompt"])
    assert best["ours"]["0"]["Top-1"] == pytest.approx(100 * found["oracle_best_K_per_class"])
    assert results["baselines"]["chance"]["Top-1"] == pytest.approx(100 / 24) and "41.82" in printed
    assert "Match_loss" in (run / "seed-0/run/out.log").read_text()
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    assert paper(*line) == 0  # nothing is run again
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}


def test_rows_start_from_one_clip_and_a_failed_row_is_shown(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runs.Runner, "_call", in_this_process)
    monkeypatch.setattr(runs, "ThreadPoolExecutor", Inline)
    out = tmp_path / "out"
    line = ["distances", "--rows", "wasserstein,csd", *SMALL, "--out", str(out)]
    assert paper(*line) == 0
    table, scale = TABLES["distances"], runs.Scenes(out, 2, 2, 256)
    rows = {row.key: scale.run(table, row, 0) for row in table.rows}
    clip = torch.load(scale.start(0).clip, weights_only=True)
    assert clip and not any("uncertainty" in name for name in clip)
    log = (rows["csd"].folder / "run/out.log").read_text()
    assert "Warm start" in log and "Contrastive_loss" not in log
    found = json.loads(rows["wasserstein"].results.read_text())["retrieval"]["retrieval"]["metrics"]
    results = json.loads((out / "distances/results.json").read_text())
    ours = results["rows"][0]["ours"]["0"]
    assert ours["RSUM"] == pytest.approx(found["wasserstein/RSUM"])
    directions = ("image_to_text", "text_to_image")
    assert ours["EC mAP@R"] == pytest.approx(50 * sum(found[f"wasserstein/{x}_mAP@R"] for x in directions))
    assert ours["EC R@1"] == pytest.approx(50 * sum(found[f"wasserstein/{x}_any_match_R@1"] for x in directions))
    assert "CxC R@1" not in ours and (out / "distances/index.html").exists()
    capsys.readouterr()

    def failing(self, line, log):
        if f"{rows['wasserstein'].folder}" in " ".join(line):
            raise runs.Failed(log)
        in_this_process(self, line, log)

    monkeypatch.setattr(runs.Runner, "_call", failing)
    rows["wasserstein"].results.unlink()
    rows["csd"].results.unlink()
    assert paper(*line) == 1
    said = capsys.readouterr()
    assert "rows of distances failed" in said.err and f"failed, see {rows['wasserstein'].evaluation}.log" in said.out
    results = json.loads((out / "distances/results.json").read_text())
    assert [bool(row["failed"]) for row in results["rows"]] == [True, False]
    assert results["rows"][1]["ours"]["0"] and not results["order"]


def evaluated(path, **changed):
    """Write the results.json of a row that is ranked by CSD."""
    recalls = {f"csd/{x}_R@1": 0.5 for x in ("image_to_text", "text_to_image")}
    matches = {key.replace("R@1", name): 0.5 for key in recalls for name in ("mAP@R", "R-Precision", "any_match_R@1")}
    metrics = {"csd/RSUM": 300.0, **recalls, **matches, **changed}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"retrieval": {"retrieval": {"metrics": metrics}}}))


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-30]),
        lambda path: path.write_bytes(b"\xff" * 40),
        lambda path: path.write_text("[]"),
        lambda path: path.write_text("{}"),
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.write_text(path.read_text().replace("300.0", '"300"')),
        lambda path: path.write_text(path.read_text().replace("300.0", "1e999")),
        lambda path: evaluated(path, other=math.nan),
    ],
)
def test_a_damaged_result_fails_its_row_alone(damage, tmp_path, capsys):
    table, scale = TABLES["beta"], runs.Scenes(tmp_path, 2, 2, 256)
    rows = {row.key: scale.run(table, row, 0) for row in table.rows[:2]}
    for run in rows.values():
        evaluated(run.results)
    damage(rows["0"].results)
    assert paper("beta", "--rows", "0,0.1", *SMALL, "--out", str(tmp_path)) == 1
    said = capsys.readouterr()
    assert f"0, seed 0: failed, {rows['0'].results} is damaged" in said.err and "delete it" in said.err
    found = {row["key"]: row for row in json.loads((tmp_path / "beta/results.json").read_text())["rows"]}
    assert found["0"]["failed"] == {"0": str(rows["0"].results)} and found["0.1"]["ours"]["0"]["RSUM"] == 300


def test_two_commands_in_one_folder(tmp_path, capsys):
    """The second one is refused while the first one works, and the folder is free once the first one is gone."""
    scale = runs.Scenes(tmp_path, 2, 2, 256)
    evaluated(scale.run(TABLES["beta"], TABLES["beta"].rows[0], 0).results)
    line = ["beta", "--rows", "0", *SMALL, "--out", str(tmp_path)]
    take = "import fcntl, sys, time; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True)"
    command = [sys.executable, "-c", f"{take}; time.sleep(100)", str(tmp_path / "lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        assert paper(*line) == 1
        assert f"another `python -m research.paper` works in --out {tmp_path}" in capsys.readouterr().err
        other.kill()
    assert paper(*line) == 0


def test_a_failed_start_fails_its_rows_once(small, tmp_path, monkeypatch):
    calls = []

    def failing(self, line, log):
        calls.append(line)
        raise runs.Failed(log)

    monkeypatch.setattr(runs.Runner, "_call", failing)
    table, scale = TABLES["distances"], runs.Scenes(tmp_path, 2, 2, 256)
    outcomes = runs.Runner(scale, at_a_time=2).run(table, table.rows, [0])
    assert len(calls) == 1 and {o.logs[0] for o in outcomes} == {scale.start(0).folder / "train.log"}


def test_a_process_that_fails_leaves_its_log(tmp_path):
    scale = runs.Scenes(tmp_path, 2, 2, 256)
    with pytest.raises(runs.Failed) as failure:
        runs.Runner(scale)._call([sys.executable, "-c", "raise SystemExit('no luck')"], tmp_path / "x/train.log")
    assert "no luck" in failure.value.log.read_text()


def test_sigterm_ends_what_was_started(small, tmp_path):
    table, scale = TABLES["distances"], runs.Scenes(tmp_path, 2, 2, 256)
    begun = tmp_path / "begun"
    code = f"import pathlib, time; pathlib.Path({str(begun)!r}).touch(); time.sleep(100)"
    started = runs.Runner(scale, shlex.join([sys.executable, "-c", code]), at_a_time=2)
    before = signal.getsignal(signal.SIGTERM)

    def terminate():
        while not begun.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=terminate).start()
    with pytest.raises(SystemExit) as end:
        started.run(table, table.rows, [0])
    assert end.value.code == 143 and not started._running and signal.getsignal(signal.SIGTERM) == before


def coco_folder(tmp_path):
    for split in ("train", "val"):
        (tmp_path / "coco" / split).mkdir(parents=True)
        for i in range(3):
            (tmp_path / "coco" / split / f"{i:05d}.tar").touch()
    (tmp_path / "coco/val2014").mkdir()
    (tmp_path / "coco/dataset_coco.json").touch()
    return tmp_path / "coco"


def test_other_data_are_another_run(tmp_path):
    """Two folders of the same files, and one whose shards or captions have changed since."""
    a, b = coco_folder(tmp_path / "a"), coco_folder(tmp_path / "b")
    rows = {row.key: row for row in TABLES["main"].rows}

    def places(folder):
        scale = runs.Coco(tmp_path / "out", folder)
        return [scale.run(TABLES["main"], rows[key], 0).results for key in ("b32-clip", "b32-pcmepp")]

    before = places(a)
    assert before == places(a) and not set(before) & set(places(b))
    for file in (a / "train/00001.tar", a / "dataset_coco.json"):
        file.write_text("x")
        assert not set(before) & set(places(a))
        file.write_text("")
    assert before == places(a)


def test_the_commands_of_coco_are_printed(tmp_path, capsys):
    coco = coco_folder(tmp_path)
    launcher = ["--launcher", "torchrun --nproc-per-node 8 -m --", "--ranks", "8", "--seeds", "2", "--print"]
    rows = ["--rows", "b32-clip,b32-pcmepp,b32-swa"]
    assert paper("main", "--data", "coco", "--coco-dir", str(coco), *rows, *launcher) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    kinds = [line[5:7] if line[5] == "eval" else line[4] for line in lines]
    assert all(line[:4] == ["torchrun", "--nproc-per-node", "8", "-m"] for line in lines)
    trainings = [line for line in lines if line[5] == "pcmepp_openclip.train"]
    assert len(lines) == 8 and len(trainings) == 2, kinds  # the rows of one model share its training
    for seed, line in enumerate(trainings):
        assert line[line.index("--batch-size") + 1] == "16" and line[line.index("--seed") + 1] == str(seed)
        assert f"coco={coco}/train/{{00000..00002}}.tar" in line and line[-2:] == ["--resume", "latest"]
    checkpoints = {line[line.index("--pretrained") + 1].rpartition("/")[2] for line in lines if line not in trainings}
    assert checkpoints == {"openai", "best.pt", "swa.pt"}


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "name a table"),
        (["distance"], "there is no table 'distance'; did you mean 'distances'?"),
        (["zzz"], "tables and figures: main, noise"),
        (["distances", "--rows", "cds"], "has no row 'cds'; did you mean 'csd'?"),
        (["main", "--rows", "b32-swa"], "none of them is run on scenes"),
        (["distances", "beta", "--rows", "csd"], "--rows chooses rows of one table"),
        (["distances", "--size", "10"], "--size 10 is smaller than a batch"),
        (["distances", "--data", "coco"], "--data coco needs --coco-dir"),
        (["distances", "--data", "coco", "--coco-dir", "nowhere"], "--coco-dir nowhere: there is no such folder"),
        (["distances", "--data", "coco", "--coco-dir", "."], "dataset_coco.json is not in it"),
        (["distances", "--data", "coco", "--coco-dir", "half"], "there is no val/*.tar in it; make these by launch"),
        (["distances", "--data", "coco", "--coco-dir", "coco", "--ranks", "3"], "--ranks 3 must divide"),
        (["distances", "--data", "coco", "--coco-dir", "coco", "--steps", "3"], "--steps is for --data scenes"),
        (["distances", "--data", "coco", "--coco-dir", "coco", "--launcher", " "], "--launcher is empty"),
        (["imagenet", "--data", "coco", "--coco-dir", "coco"], "imagenet is not about COCO"),
        (["distances", "--launcher", "x"], "--launcher is for --data coco"),
        (["distances", "--print"], "--print is for --data coco"),
        (["distances", "--seeds", "0"], "--seeds must be at least 1"),
        (["distances", "--seeds", "many"], "--seeds invalid int value"),
    ],
)
def test_a_mistake_is_one_sentence(words, message, tmp_path, monkeypatch, capsys):
    shutil.copytree(coco_folder(tmp_path), tmp_path / "half")
    shutil.rmtree(tmp_path / "half/val")
    monkeypatch.chdir(tmp_path)
    assert paper(*words) == 2
    error = capsys.readouterr().err
    assert error.startswith("python -m research.paper: ") and error.count("\n") == 1 and message in error
    assert not (tmp_path / "pcmepp-paper").exists()


def test_the_list_and_the_figures(tmp_path, monkeypatch, capsys):
    assert paper("--list") == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in [*TABLES, *FIGURES])
    monkeypatch.chdir(tmp_path)
    assert paper("bins") == 0
    assert "pcmepp eval --model" in capsys.readouterr().out
    calls = []
    monkeypatch.setattr(command.toy, "main", calls.append)
    assert paper("toy", "--seeds", 2) == 0 and calls == [["--out", "pcmepp-paper/toy", "--seeds", "2"]]


def measured(data, scores, rounds):
    """The metrics of the orders by `scores`, the mean over rounds.

    Arguments:
        scores: (matches [N, M] of booleans) to a score for each, of which the largest comes first.
    """
    fits, own = (torch.zeros(12, 6, dtype=torch.bool) for _ in range(2))
    for i, images in enumerate(data.images_of_caption):
        fits[i, images], own[i, data.image_of_caption[i]] = True, True
    found = {}
    for _ in range(rounds):
        for direction, right, mine in (("text_to_image", fits, own), ("image_to_text", fits.T, own.T)):
            order = scores(right).argsort(dim=1, descending=True, stable=True)
            hit, own_hit = right.gather(1, order), mine.gather(1, order)
            average, r_precision = precisions(hit, right.sum(dim=1))
            numbers = {"mAP@R": average, "R-Precision": r_precision, "any_match_R@1": hit[:, 0].double()}
            numbers |= {f"R@{k}": own_hit[:, :k].any(dim=1).double() for k in (1, 5)}
            for name, value in numbers.items():
                key = f"{direction}_{name}"
                found[key] = found.get(key, 0) + value.mean().item() / rounds
    return found


def test_baselines_are_those_of_real_orders():
    """Chance against many random orders, the prior against the order by the number of matches."""
    drawn = random.Random(0)
    image_of_caption = [i // 2 for i in range(12)]
    matches = [sorted({own, *drawn.sample(range(6), drawn.randrange(5))}) for own in image_of_caption]
    data = Captioned([None] * 6, ["x"] * 12, image_of_caption, [], matches)
    prior = measured(data, lambda right: right.sum(dim=0).expand(right.shape), 1)
    for key, value in prior.items():
        assert value == pytest.approx(baselines.retrieval_prior(data)[key], abs=1e-6), key
    expected, generator = baselines.retrieval_chance(data), torch.Generator().manual_seed(0)
    found = measured(data, lambda right: torch.rand(right.shape, generator=generator), 4000)
    for key, value in found.items():
        assert value == pytest.approx(expected[key], abs=0.006), key
    recalls = [expected[f"{d}_R@{k}"] for d in ("image_to_text", "text_to_image") for k in (1, 5, 10)]
    assert expected["RSUM"] == pytest.approx(100 * sum(recalls)) and expected["text_to_image_R@10"] == 1


def test_agreement_counts_pairs_over_seeds():
    paper = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 3.0, "none": 9.0}
    ours = {"a": {0: 1.0, 1: 2.0}, "b": {0: 2.0, 1: 1.0}, "c": {0: 9.0, 1: 9.0}, "d": {0: 0.0, 1: 0.0}}
    found = agreement(paper, ours)
    assert (found.pairs, found.held, found.reversed) == (5, 2, 2)  # a-b differs between seeds, c-d ties in the paper
    assert found.paper_best == ("c", "d") and found.our_best == ("c",)
    assert found.low <= found.high and "of 5 pairs that the paper orders, 2 hold" in str(found)
    assert agreement({"a": 1.0}, ours) is None
    tied = agreement({"a": 1.0, "b": 2.0}, {"a": {0: 1.0, 1: 1.0}, "b": {0: 1.0, 1: 3.0}})  # in one of the seeds
    assert (tied.tau, tied.low, tied.high) == (1, 1, 1)
    assert agreement(paper, {"a": {0: math.nan}, "b": {0: 1.0}}) is None


def test_a_cell_shows_the_spread():
    assert pages.spread([1.0, 2.0, 4.0], 1) == "2.3 ±1.5"
    assert pages.spread([2.0], 2) == "2.00" and pages.spread([], 1) == pages.spread([math.nan], 1) == "–"


def test_uncertainty_columns():
    found = {
        "metrics": {"images/csd_R@1/bin_correlation": -0.8, "captions/csd_R@1/bin_correlation": -0.6},
        "bins": {"images/csd_R@1": [(1.0, 0.5, 1), (4.0, 0.1, 2)], "captions/csd_R@1": [(5.0, 0.5, 10)]},
    }
    uncertainty, rho = TABLES["beta"].columns[-2:]
    assert uncertainty.value(found, "csd", "scenes") == pytest.approx((3 + 5) / 2)
    assert rho.value(found, "csd", "scenes") == pytest.approx(0.7)
    assert math.isnan(rho.value({"metrics": {}}, "csd", "scenes"))
    assert math.isnan(uncertainty.value({"metrics": {}}, "csd", "scenes"))
