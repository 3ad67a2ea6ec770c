"""The registry of the paper's tables: its flags are flags of `pcmepp train`, its numbers those of the paper."""

import dataclasses
import json
import shlex

import open_clip
import pytest
from shard_maker import several, write_tar

from pcmepp_openclip.commands.evaluation import eval_parser
from pcmepp_openclip.demo.dataset import write_train
from pcmepp_openclip.distances import DISTANCES
from pcmepp_openclip.training.command import prepare
from pcmepp_openclip.training.config import make_parser, parse
from research.paper.runs import Coco, Scenes
from research.paper.tables import FIGURES, TABLES, Table

PLACES = [(name, row) for name, table in TABLES.items() for row in table.rows if row.start != "none"]
SEARCHED = ("ann", "ann_csd")  # by `pcmepp eval --ann`


@pytest.fixture(scope="module")
def scales(tmp_path_factory):
    """Both scales on a few drawn pairs, so that `pcmepp train` finds its data."""
    out = tmp_path_factory.mktemp("paper")
    write_train(out / "scenes-256" / "seed-0" / "train", 256, 0, quiet=True)
    for split in ("train", "val"):
        names = [f"{shard:05d}.tar" for shard in range(8)]
        for shard, name in enumerate(names):
            write_tar(out / "coco" / split / name, [several(f"{shard}{i:02d}") for i in range(16)])
        (out / "coco" / split / "sizes.json").write_text(json.dumps(dict.fromkeys(names, 16)))
    (out / "coco" / "val2014").mkdir()
    (out / "coco" / "dataset_coco.json").touch()
    return {"scenes": Scenes(out, 2, 2, 256), "coco": Coco(out, out / "coco", 2)}


def accepted(flags) -> bool:
    """Whether `pcmepp train` has nothing against the flags, up to where it would build the model; those of
    `research.rivals` have a test of their own."""
    if "--rival" in flags:
        return True
    try:
        args, _ = prepare(list(flags))
    except ValueError as error:
        print(error)
        return False
    return open_clip.get_model_config(args.model) is not None


@pytest.mark.parametrize("data", ["scenes", "coco"])
def test_every_row_is_accepted_by_the_training_command(scales, data):
    refused, kept = [], {}
    for name, row in PLACES:
        run = scales[data].run(TABLES[name], row, 0)
        if not row.runs_on(data) or data not in TABLES[name].data or run.train is None:
            continue
        if run.folder not in kept:
            kept[run.folder] = accepted(run.train)
        if not kept[run.folder]:
            refused.append(f"{name}/{row.key}: {shlex.join(run.train)}")
    assert len(kept) > 20
    assert not refused


def test_hardest_negatives_are_trained_on_both_scales(scales):
    """The scenes have one epoch, so that a warm-up by epochs would be all of it."""
    (row,) = (row for row in TABLES["main"].rows if row.key == "b32-vse")
    for data, warmup in (("scenes", 0), ("coco", 2)):
        own = parse(scales[data].run(TABLES["main"], row, 0).train)
        assert own.triplet_warmup_epochs == warmup


def test_vib_weighs_what_it_does_in_the_authors_code_beside_pcme():
    """1e-3 beside the sum over 128 x 128 pairs and both directions."""
    parsed = [make_parser().read(shlex.split(row.flags)) for _, row in PLACES if "--rival" not in row.flags]
    found = [own.vib_weight / own.pcme_weight for own in parsed if own.pcme_weight]
    assert len(found) == 6 and found == pytest.approx([1e-3 / (2 * 128**2)] * 6)


def test_noise_is_of_single_captions_as_in_the_authors_code():
    noisy = [row for _, row in PLACES if "--noise-ratio" in row.flags and "--rival" not in row.flags]
    assert len(noisy) == 14 and all(make_parser().read(shlex.split(x.flags)).noise_per_caption for x in noisy)


def test_a_wrong_flag_would_be_noticed(scales):
    row = dataclasses.replace(TABLES["distances"].rows[-1], flags="--distance nothing")
    assert not accepted(scales["scenes"].run(TABLES["distances"], row, 0).train)
    row = dataclasses.replace(row, flags="--no-such-flag 1")
    assert not accepted(scales["scenes"].run(TABLES["distances"], row, 0).train)


@pytest.mark.parametrize("data", ["scenes", "coco"])
def test_every_evaluation_is_accepted(scales, data):
    for name, row in PLACES:
        if data in TABLES[name].data:
            args = eval_parser().parse_args(scales[data].run(TABLES[name], row, 0).evaluate)
            assert args.ann == (row.by in SEARCHED or name == "inference")
            known = row.by in DISTANCES or row.by in SEARCHED or TABLES[name].task == "zeroshot"
            assert known, f"{name}/{row.key} ranks by {row.by}"


def test_rows_that_train_alike_share_a_run(scales):
    def folder(table, key, scale=scales["scenes"]):
        (row,) = (row for row in TABLES[table].rows if row.key == key)
        return scale.run(TABLES[table], row, 0).folder

    assert folder("ablation", "vib") == folder("ablation", "vib")
    assert (
        folder("main", "b32-pcmepp") == folder("ablation", "all") == folder("beta", "1") == folder("inference", "csd")
    )
    assert folder("beta", "0") != folder("beta", "1")
    coco = scales["coco"]
    assert folder("main", "b32-pcmepp", coco) != folder("main", "l14-pcmepp", coco)
    changed = [dataclasses.replace(scales["scenes"], **{name: 7}) for name in ("steps", "start_steps", "size")]
    assert len({folder("beta", "1", scale) for scale in [scales["scenes"], *changed]}) == 4


def test_the_numbers_of_the_paper():
    """What the text of the paper says of its tables: a slip of the transcription would break one of these."""

    def numbers(table, column):
        return {row.key: row.paper[column] for row in TABLES[table].rows if column in row.paper}

    for group in ("b32", "b16", "l14"):
        rsum = {key: v for key, v in numbers("main", "RSUM").items() if key.startswith(group) and "swa" not in key}
        assert max(rsum.values()) == rsum[f"{group}-pcmepp"]
        ec = {key: v for key, v in numbers("main", "EC mAP@R").items() if key.startswith(group) and "swa" not in key}
        assert max(ec.values()) == ec[f"{group}-pcmepp"]
    noisy = numbers("noise", "RSUM")
    assert noisy["50-vse"] < noisy["50-infonce"] < noisy["50-pcme"] < noisy["50-pcmepp"] < noisy["50-decl"]
    alpha = numbers("alpha", "RSUM")
    assert alpha["20-0.01"] == noisy["20-pcmepp"] and alpha["50-0"] == noisy["50-pcmepp"]
    assert numbers("ablation", "RSUM")["all"] == numbers("main", "RSUM")["b32-pcmepp"] == 537.0
    assert numbers("ablation", "EC R-P")["vib"] == numbers("distances", "EC R-P")["csd"] == 49.0
    assert numbers("distances", "1K R@1")["match_probability"] == numbers("main", "1K R@1")["b32-pcme"]
    uncertainty, rho = list(numbers("beta", "uncertainty").values()), numbers("beta", "-rho")
    assert uncertainty == sorted(uncertainty) and max(rho, key=rho.get) == "2" and min(rho, key=rho.get) == "0"
    assert max(numbers("architecture", "RSUM").items(), key=lambda item: item[1]) == ("1-gpo", 537.1)
    assert max(numbers("msda", "RSUM").items(), key=lambda item: item[1]) == ("2-25", 535.9)
    assert max(numbers("inference", "RSUM").items(), key=lambda item: item[1]) == ("csd", 537.3)
    for name, table in TABLES.items():
        for row in table.rows:
            by_name = row.paper
            if by_name.get("CxC R@1") and by_name["CxC R@1"] > 1:  # more matches than 5K, a smaller gallery in 1K
                assert by_name["5K R@1"] < by_name["CxC R@1"] < by_name["1K R@1"], f"{name}/{row.key}"
            if by_name.get("EC R-P") and by_name["EC R-P"] > 1:
                assert by_name["EC mAP@R"] < by_name["EC R-P"] < by_name["EC R@1"], f"{name}/{row.key}"
            if by_name.get("RSUM"):
                assert by_name["RSUM"] < 600


def test_a_table_checks_its_rows():
    row = TABLES["ablation"].rows[0]
    with pytest.raises(AssertionError, match="two rows"):
        Table("x", "Table 0", (row, row))
    with pytest.raises(AssertionError, match="which is no column"):
        Table("x", "Table 0", (dataclasses.replace(row, paper={"no-such-column": 1.0}),))
    assert not set(TABLES) & set(FIGURES)
