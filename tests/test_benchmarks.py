"""`python -m benchmarks`: what it measures is the work it names, and a table claims no more than was measured.

Nothing here is timed: a machine under load must not fail a test.
"""

import itertools
import json
import math
import multiprocessing
import sys
import time
from random import Random

import pytest
import torch
from helpers import REPO, slow_csd

from benchmarks import ambiguity, flops, loss, measure, pcme, results, retrieval, step
from benchmarks.__main__ import main
from benchmarks.measure import Row, added_memory, alone, resampled, row, turns
from pcmepp_openclip import Gaussian, matching_loss

MB = 2**20


@pytest.mark.parametrize(
    "ratios, bar, least, verdict",
    [
        ([0.9] * 5, 1.0, False, "met"),
        ([1.0] * 5, 1.0, False, "met"),
        ([1.1] * 5, 1.0, False, "not met"),
        ([0.9, 0.9, 0.9, 0.9, 1.1], 1.0, False, "bar within the spread"),
        ([0.9] * 7 + [1.1], 1.0, False, "met"),
        ([1.1, 1.2, 1.3], 1.0, True, "met"),
        ([0.8, 0.9, 0.95], 1.0, True, "not met"),
        ([0.8, 1.2], 1.0, True, "bar within the spread"),
        ([], 2.0, False, "met"),
        ([], 1.9, False, "not met"),
        ([0.9, 1.2], None, False, ""),
    ],
)
def test_a_verdict_is_that_of_the_whole_spread(ratios, bar, least, verdict):
    repeats = row("x", ratios, [1.0] * len(ratios), "s", bar, least=least) if ratios else Row("x", 2.0, 1.0, "s", bar)
    assert repeats.verdict == verdict


@pytest.mark.parametrize("repeats, least", [(5, 0.75), (8, 0.8), (24, 0.85)])
def test_the_spread_holds_the_true_ratio_about_as_often_as_it_says(repeats, least):
    """On a machine that drifts by half, and now and then is slow for a moment."""
    random, truth, held, trials = Random(0), 0.95, 0, 300
    for _ in range(trials):
        speed = random.uniform(1, 1.5)
        pairs = []
        for _ in range(repeats):
            speed *= random.gauss(1, 0.05)
            noise = (random.gauss(1, 0.03) * random.choice([1] * 9 + [1.3]) for _ in range(2))
            pairs.append((truth * speed * next(noise), speed * next(noise)))
        low, high = resampled(pairs, draws=200)
        held += low <= truth <= high
    assert least < held / trials < 0.98


def test_a_row_is_of_pairs():
    got = row("x", [1.0, 2.0, 9.0], [1.0, 1.0, 3.0], "s")
    assert (got.ours, got.theirs, got.ratio) == (2.0, 1.0, 2.0)
    assert got.repeats == ((1.0, 1.0), (2.0, 1.0), (9.0, 3.0))
    with pytest.raises(ValueError):
        row("x", [1.0], [1.0, 2.0], "s")


def test_turns_reverse_and_leave_the_warm_up_and_what_is_before_out(monkeypatch):
    log, now = [], 0.0

    def work(name, seconds):
        def run():
            nonlocal now
            log.append(name)
            now += seconds * (100 if len(log) <= 2 else 1)  # the first of each is slow

        return run

    def before():
        nonlocal now
        now += 1000

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    seconds = turns([work("a", 1.0), work("b", 2.0)], 3, before)
    assert "".join(log) == "baabbaab"
    assert seconds == [[1.0] * 3, [2.0] * 3]


def hold(megabytes: int, freed_first: int) -> float:
    """Memory of a work that frees one block before it holds another; what was held before it is not its own."""
    torch.ones(500 * MB // 4)

    def work():
        torch.ones(freed_first * MB // 4)
        torch.ones(megabytes * MB // 4)

    return added_memory(work)


def test_memory_is_the_peak_of_what_was_held():
    assert alone(hold, (300, 200), (100, 400)) == [pytest.approx(300, abs=10), pytest.approx(400, abs=10)]


def test_memory_of_many_small_blocks_leaves_no_holes():
    assert alone(hold_small, ()) == [pytest.approx(200, abs=15)]


def hold_small() -> float:
    def work():
        blocks = [torch.ones(MB // 4) for _ in range(200)]
        del blocks[::2]
        blocks.append(torch.ones(100 * MB // 4))  # fits in what was freed, though in no one hole

    return added_memory(work)


def test_one_thread_is_for_a_while():
    threads = torch.get_num_threads()
    with measure.one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == threads


def test_other_processes_are_busy_for_a_while():
    before = set(multiprocessing.active_children())
    with measure.busy_cores(2):
        assert len(set(multiprocessing.active_children()) - before) == 2
    assert set(multiprocessing.active_children()) == before


def test_the_losses_are_those_that_they_are_called():
    n = 6
    leaves = loss.inputs(n)
    gradients = {}
    for kind in ("pcmepp", "clip", "chunked clip", "nmd"):
        for leaf in leaves:
            leaf.grad = None
        loss.step(kind, leaves)
        gradients[kind] = [leaf.grad for leaf in leaves]
    assert all(g is not None and g.abs().max() > 0 for g in gradients["pcmepp"])
    assert [g is not None for g in gradients["clip"]] == [True, True, False, False, True]
    for got, expected in zip(gradients["chunked clip"], gradients["clip"], strict=True):
        assert (got is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(got, expected)
    v, t, lv, lt, _ = (leaf.detach().requires_grad_() for leaf in leaves)
    logits = 1 - slow_csd(Gaussian(v, lv), Gaussian(t, lt))
    matching_loss(logits, torch.eye(n)).backward()
    for got, expected in zip(gradients["nmd"], (v, t, lv, lt), strict=False):
        torch.testing.assert_close(got, expected.grad.float(), rtol=1e-4, atol=1e-7)


def test_both_losses_of_the_variances_do_their_work():
    gradients = []
    for kind in pcme.WEIGHTS:
        leaves = loss.inputs(6)
        pcme.loss_step(kind, leaves)()
        gradients.append([leaf.grad for leaf in leaves])
    for ours, theirs in zip(*(found[:4] for found in gradients), strict=True):
        assert ours.abs().max() > 0 and theirs.abs().max() > 0 and not torch.equal(ours, theirs)


def test_growth_is_the_exponent():
    rows = {n: Row("x", 3.0 * n**2, 5.0 * n, "s") for n in (10, 20, 80)}
    got = loss.growth("x", rows)
    assert (got.ours, got.theirs) == (pytest.approx(2), pytest.approx(1))


def test_retrieval_is_done_to_its_end():
    for distance in ("csd", "cosine"):
        found = retrieval.work(distance, count=20)()
        assert [ranking.distance for ranking in found] == [distance] * 2 and len(found[1].own_rank_N) == 100


def test_each_text_gets_its_ambiguity_and_its_encoding():
    confusions = ambiguity.confusions(16)()
    assert len(confusions) == ambiguity.QUERIES and all(1 < float(each) < 16 for each in confusions)
    assert [x.shape for x in ambiguity.encodings()()] == [(1, ambiguity.DIM)] * ambiguity.QUERIES


def test_a_step_trains_all_parameters(monkeypatch):
    models = []
    create = step.open_clip.create_model
    monkeypatch.setattr(step.open_clip, "create_model", lambda *a, **k: models.append(create(*a, **k)) or models[-1])
    work = step.training_step("PCMEpp-tiny", 2, text_length=16)
    before = {name: parameter.clone() for name, parameter in models[0].named_parameters()}
    work()
    assert not [name for name, parameter in models[0].named_parameters() if torch.equal(parameter, before[name])]


EARLIER = {
    "machine": "8 cores of another",
    "rows": [
        {"what": "ViT-B-32, training FLOPs per pair", "ratio": 2.0, "spread": None},
        {"what": "gone", "ratio": 1.0, "spread": None},
    ],
}


def test_a_run_writes_one_table_and_compares(tmp_path, monkeypatch, capsys):
    (tmp_path / "earlier.json").write_text(json.dumps(EARLIER))
    monkeypatch.setattr(flops, "SPLITS", {"ViT-B-32": flops.SPLITS["ViT-B-32"]})
    monkeypatch.setattr(flops, "KINDS", {name: flops.KINDS[name] for name in ("RN50", "ViT-B-16-SigLIP")})
    words = ["flops", "--out", str(tmp_path / "out"), "--compare", str(tmp_path / "earlier.json")]
    monkeypatch.setattr(sys, "argv", ["benchmarks", *words])
    main()
    printed = capsys.readouterr().out
    text = (tmp_path / "out/table.md").read_text()
    run = json.loads((tmp_path / "out/table.json").read_text())
    assert text.strip() in printed and results.machine() in text and "8 cores of another" in text
    rows = {record["what"]: record for record in run["rows"]}
    first = rows["ViT-B-32, training FLOPs per pair"]
    assert first["verdict"] == "met" and first["ratio"] == first["ours"] / first["theirs"] < 0.95
    lines = [line for line in text.splitlines() if ", training FLOPs per pair" in line]
    assert len(lines) == len(rows)
    assert all(record["verdict"] == "met" for record in rows.values() if record["bar"])
    change = 100 * (first["ratio"] / 2 - 1)
    assert lines[0].endswith(f"| ≤ 0.95 | met | 2.000 | {change:+.1f} % |")
    assert lines[1].endswith("|  | new |")
    machine, again = results.read(tmp_path / "out/table.json")
    assert machine == results.machine() and math.isclose(again[first["what"]]["ratio"], first["ratio"])


def test_a_change_within_the_spread_is_said_to_be():
    now = row("x", [1.0, 1.1], [1.0, 1.0], "s")
    assert results.change(now, {"ratio": 1.0, "spread": [0.9, 1.02]}) == "+5.0 % (within the spread)"
    assert results.change(now, {"ratio": 0.9, "spread": [0.8, 0.99]}) == "+16.7 %"
    assert results.change(now, {"ratio": 1.5, "spread": [1.3, 1.6]}) == "-30.0 %"
    assert results.change(Row("x", 1.0, 1.0, "MB"), {"ratio": 1.0, "spread": None}) == "+0.0 %"


def test_the_readme_shows_some_rows_of_the_table_unaltered():
    """At most six rows of the run in docs/benchmarks.md, in a table with the same head, and the machine of that run."""
    docs = (REPO / "docs/benchmarks.md").read_text().splitlines()
    readme = (REPO / "README.md").read_text().splitlines()
    head = f"| {' | '.join(results.HEADS)} |"
    start = readme.index(head) + 2
    shown = list(itertools.takewhile(lambda line: line.startswith("|"), readme[start:]))
    assert head in docs and 5 <= len(shown) <= 6 and len(set(shown)) == len(shown)
    assert not [line for line in shown if line not in docs]
    (machine,) = (line for line in docs if " cores of " in line)
    assert machine in readme


@pytest.mark.parametrize(
    "args, words",
    [
        (["flop"], "there is no benchmark 'flop'; there are: flops, data, "),
        (["models", "ViT-B-23"], "open_clip has no model 'ViT-B-23'"),
        (["models", "--page", "README.md"], "--page: README.md lacks the line <!-- python -m benchmarks models -->"),
        (["models", "--page", "nowhere.md"], "--page: there is no file nowhere.md"),
        (["flops", "--compare", "nowhere.json"], "--compare: nowhere.json is not a table.json of an earlier run"),
        (["flops", "--compare", "pyproject.toml"], "--compare: pyproject.toml is not a table.json of an earlier run"),
    ],
)
def test_mistakes(args, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", *args])
    monkeypatch.chdir(REPO)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2 and words in capsys.readouterr().err
