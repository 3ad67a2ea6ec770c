"""What a run tells of its flags, in its checkpoints and on its model card: only what is on a list."""

import dataclasses
import functools

import open_clip
import pytest

from pcmepp_openclip.config import PCMEppCfg
from pcmepp_openclip.host import seams
from pcmepp_openclip.host.published import AT_START, MODEL_NAMES
from pcmepp_openclip.losses.terms import LOSSES, WEIGHT
from pcmepp_openclip.runs import record
from pcmepp_openclip.system.flags import FIXED, PUBLISHED
from pcmepp_openclip.training.config import FLAGS, parse, recorded

PRIVATE = {  # a new flag of open_clip's is a decision: it goes here or on the list of what is published
    # places and people
    *("logs", "name", "resume", "cache_dir", "train_data", "val_data", "imagenet_val", "imagenet_v2", "remote_sync"),
    *("wandb_notes", "wandb_project_name", "csv_img_key", "csv_caption_key", "csv_separator"),
    # the machine, and how the run was watched
    *("device", "dist_backend", "dist_url", "no_set_device_rank", "remote_sync_frequency", "remote_sync_protocol"),
    *("report_to", "debug", "copy_codebase", "log_local", "log_every_n_steps", "trace"),
    *("save_frequency", "save_most_recent", "delete_previous_checkpoint"),
}
OURS = {flag.dest for rows in FLAGS.values() for flag in rows}
CFG = {*(field.name for field in dataclasses.fields(PCMEppCfg)), *(name + WEIGHT for name in LOSSES)}


@functools.cache
def all_flags() -> dict:
    return vars(parse(["--model", "PCMEpp-tiny"]))


NAMES = recorded(PUBLISHED, FIXED)


def kept(args: dict) -> dict:
    return record.hyperparameters(args, NAMES)


@pytest.mark.skipif(open_clip.__version__ != seams.TESTED, reason="unlisted flags are private")
def test_every_flag_is_published_or_private_by_decision():
    every, public = set(all_flags()), NAMES | CFG
    assert not public & PRIVATE
    assert every - public - PRIVATE - OURS == {"rank", "pcmepp_cfg"}, (
        "new flags: add each to PUBLISHED in host/published.py, or to PRIVATE here"
    )
    assert (PRIVATE | NAMES) - every == set(), "flags that are gone"
    ours = {"train_data_sizes", "cache_tokens", "push_to_hub", "hub_branch", "hub_license", "hub_private", "hub_tag"}
    ours |= {"dry_run", "samples_per_second_per_gpu", "save_best"}
    assert OURS - public == ours | {"save_every_minutes", "save_retry_minutes", "rank_timeout_minutes"}


def test_the_other_lists_are_of_published_flags():
    assert {*recorded(FIXED), *AT_START, *MODEL_NAMES} <= NAMES | CFG


def test_what_is_not_on_the_list_is_not_published():
    args = all_flags() | {"pcmepp_cfg": {"head_layers": 1}}
    before = kept(args)
    for name in sorted(PRIVATE | (OURS - NAMES - CFG) | {"a_new_flag", "rank", "tensorboard_path"}):
        assert name not in before
        for value in (3, "word", True):
            assert kept(args | {name: value}) == before, name


def test_what_is_on_the_list_is_published_unless_it_may_be_a_place():
    args = all_flags() | {"pcmepp_cfg": {"head_layers": 1}}
    for name in sorted(NAMES - set(MODEL_NAMES)):
        assert kept(args | {name: 3})[name] == 3
        for place in ("/home/me/data", "hf_TheToken", "s3://bucket/x", "a" * 61, ["fine", "/not/fine"]):
            assert name not in kept(args | {name: place}), place
    for name in sorted(CFG - {"weights"}):
        assert kept(args | {"pcmepp_cfg": {name: 0.25}})[name] == 0.25


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_a_name_of_a_model_may_have_a_slash_and_a_path_is_a_local_file(name, tmp_path):
    args = all_flags() | {"pcmepp_cfg": None}
    assert kept(args | {name: "timm/lamb"})[name] == "timm/lamb"
    (tmp_path / "secret.pt").touch()
    assert kept(args | {name: str(tmp_path / "secret.pt")})[name] == "a local file"
    assert kept(args | {name: "/nowhere/at/all"})[name] == "a local file"
