"""What a run tells of its flags, in its checkpoints and on its model card: only what is on a list."""

import dataclasses

import pytest

from pcmepp_openclip.config import PCMEppCfg
from pcmepp_openclip.host import flags
from pcmepp_openclip.host.published import AT_START, FIXED, MODEL_NAMES, PUBLISHED
from pcmepp_openclip.losses.terms import LOSSES, WEIGHT
from pcmepp_openclip.runs import record
from pcmepp_openclip.training.command import own_parser

PRIVATE = {  # a new flag of open_clip's, or of ours, is a decision: it goes here or on the list of what is published
    # places and people
    *("logs", "name", "resume", "cache_dir", "train_data", "train_data_sizes", "val_data", "imagenet_val"),
    *("imagenet_v2", "remote_sync", "push_to_hub", "hub_branch", "hub_license", "hub_private", "hub_tag"),
    *("cache_tokens", "wandb_notes", "wandb_project_name", "csv_img_key", "csv_caption_key", "csv_separator"),
    # the machine, and how the run was watched
    *("device", "dist_backend", "dist_url", "no_set_device_rank", "remote_sync_frequency", "remote_sync_protocol"),
    *("report_to", "debug", "copy_codebase", "log_local", "log_every_n_steps", "trace", "dry_run"),
    *("samples_per_second_per_gpu",),
    *("save_frequency", "save_most_recent", "delete_previous_checkpoint", "save_best"),
    *("save_every_minutes", "save_retry_minutes", "rank_timeout_minutes"),
}
CFG = {*(field.name for field in dataclasses.fields(PCMEppCfg)), *(name + WEIGHT for name in LOSSES)}


def all_flags() -> dict:
    own, rest = own_parser().parse_known_args(["--model", "PCMEpp-tiny"])
    return vars(flags.parse_args(rest)) | vars(own)


def test_every_flag_is_published_or_private_by_decision():
    given, public = set(all_flags()), {*PUBLISHED, *CFG}
    assert not public & PRIVATE
    assert given - public - PRIVATE == set(), (
        "new flags: add each to PUBLISHED in host/published.py, or to PRIVATE here"
    )
    assert (PRIVATE | set(PUBLISHED)) - given == {"world_size"}, "flags that are gone"


def test_the_other_lists_are_of_published_flags():
    assert {*FIXED, *AT_START, *MODEL_NAMES} <= {*PUBLISHED, *CFG}


def test_what_is_not_on_the_list_is_not_published():
    args = all_flags() | {"pcmepp_cfg": {"head_layers": 1}}
    before = record.hyperparameters(args)
    for name in PRIVATE | {"a_new_flag", "rank", "tensorboard_path"}:
        for value in (3, "word", True):
            assert record.hyperparameters(args | {name: value}) == before, name
    assert not (PRIVATE | {"pcmepp_cfg"}) & before.keys()


def test_what_is_on_the_list_is_published_unless_it_may_be_a_place():
    args = all_flags() | {"pcmepp_cfg": {"head_layers": 1}}
    for name in set(PUBLISHED) - set(MODEL_NAMES):
        assert record.hyperparameters(args | {name: 3})[name] == 3
        for place in ("/home/me/data", "hf_TheToken", "s3://bucket/x", "a" * 61, ["fine", "/not/fine"]):
            assert name not in record.hyperparameters(args | {name: place}), place


def test_every_setting_of_the_model_is_published():
    args = all_flags()
    for name in CFG - {"weights", "distance", "reduction"}:
        assert record.hyperparameters(args | {"pcmepp_cfg": {name: 0.25}})[name] == 0.25


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_a_name_of_a_model_may_have_a_slash_and_a_path_is_a_local_file(name, tmp_path):
    args = all_flags() | {"pcmepp_cfg": None}
    assert record.hyperparameters(args | {name: "timm/lamb"})[name] == "timm/lamb"
    (tmp_path / "secret.pt").touch()
    assert record.hyperparameters(args | {name: str(tmp_path / "secret.pt")})[name] == "a local file"
    assert record.hyperparameters(args | {name: "/nowhere/at/all"})[name] == "a local file"
