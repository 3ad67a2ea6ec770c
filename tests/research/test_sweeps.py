"""The sweep over settings of the loss, and the long runs, on a few scenes."""

import pytest

from research import drift, sweep
from research.sweep import make_pairs


@pytest.fixture
def few_scenes(monkeypatch):
    """At most 200 to measure on, in place of 1,000."""
    for module in (drift, sweep):
        monkeypatch.setattr(module, "make_pairs", lambda seed, size, *a, **k: make_pairs(seed, min(size, 200), *a, **k))


def test_drift_has_a_row_for_every_run_and_interval(few_scenes, capsys):
    drift.main(["--steps", "20", "--every", "10", "--runs", "learned_from_8", "tied"])
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row[:2] for row in rows[1:]] == [[x, y] for x in ("learned_from_8", "tied") for y in ("10", "20")]
    ratio = rows[0].index("match_ratio")
    assert all(float(row[ratio]) > 1 for row in rows[1:3]) and all(float(row[ratio]) == 0.5 for row in rows[3:])


def test_a_row_of_the_sweep_has_the_settings_that_were_asked_for(few_scenes, capsys):
    settings = ["match_logit=tied", "match_ratio=0.4", "reduction=sum"]
    sweep.main(["--steps", "1", "--warmup", "0", "--lr", "0", *settings])
    assert "| a 2.86 |" in capsys.readouterr().out  # 0.4 times 14.3, half of it
