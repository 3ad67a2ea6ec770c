"""What the tests share: the local Hub that every huggingface_hub client here talks to, and the models."""

import logging
import os
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent / "support"))
from hub_server import Hub

_FOLDER = tempfile.TemporaryDirectory(prefix="pcmepp-tests-")
_HUB = Hub(Path(_FOLDER.name) / "hub")

# The fuzz tests: the same fifty inputs in every `make test`, new ones for minutes in `make fuzz`.
_FUZZ = {"deadline": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("short", max_examples=50, derandomize=True, database=None, **_FUZZ)
settings.register_profile("long", max_examples=20_000, **_FUZZ)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))


def pytest_configure(config: pytest.Config) -> None:
    # huggingface_hub reads its environment when it is imported: no test must have imported it yet.
    _HUB.__enter__()
    os.environ.update(_HUB.env(cache=Path(_FOLDER.name) / "hf_home"))
    os.environ.pop("HF_TOKEN", None)
    # One thread each, here and in children: on a busy machine two that wait for each other cost minutes.
    os.environ["OMP_NUM_THREADS"] = "1"


# Test files that take longest. They come first, so that no process is left with one of them at the end.
LONG = ("system_slurm", "system_network", "system_demo", "benchmarks", "survival", "data_making", "kinds", "launch")
LONG += ("eval_command", "gpo_models", "hub_train", "ranks", "data_epochs", "train", "augment", "network", "docs")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the files by how long they take, see `LONG`, and keep the order within a file."""
    place = {f"test_{name}.py": index for index, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONG)))


def pytest_unconfigure(config: pytest.Config) -> None:
    _HUB.__exit__()
    _FOLDER.cleanup()


@pytest.fixture(scope="session")
def session_hub() -> Hub:
    """The same Hub, for fixtures that outlive a test; what they change there they set back."""
    return _HUB


@pytest.fixture
def hub():
    """The Hub that this process and its children are clients of; without failures, repos stay for the session."""
    _HUB.reset()
    yield _HUB
    _HUB.reset()


@pytest.fixture(scope="session", autouse=True)
def _threads():
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _as_it_was():
    """What a test adds to open_clip's configs and to the root logger is gone for the next one."""
    import open_clip

    root, factory = logging.getLogger(), open_clip.factory
    handlers, level, disabled = list(root.handlers), root.level, logging.root.manager.disable
    configs, paths = dict(factory._MODEL_CONFIGS), list(factory._MODEL_CONFIG_PATHS)
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.disable(disabled)  # a benchmark that runs here is quiet
    factory._MODEL_CONFIGS.clear()
    factory._MODEL_CONFIGS.update(configs)
    factory._MODEL_CONFIG_PATHS[:] = paths


@pytest.fixture(scope="module")
def known_kinds(tmp_path_factory):
    """open_clip knows one small model of each kind of tower, see `kinds.py`."""
    import open_clip
    from kinds import add_kinds

    factory = open_clip.factory
    configs, paths = dict(factory._MODEL_CONFIGS), list(factory._MODEL_CONFIG_PATHS)
    add_kinds(tmp_path_factory.mktemp("kinds"))
    yield
    factory._MODEL_CONFIGS.clear()
    factory._MODEL_CONFIGS.update(configs)
    factory._MODEL_CONFIG_PATHS[:] = paths


@pytest.fixture
def tiny():
    """A fresh PCMEpp-tiny with dict output, and its plain twin: an open_clip CLIP of the same weights."""
    from helpers import make_model

    return make_model("PCMEpp-tiny")


@pytest.fixture(scope="session")
def tiny_model():
    """A PCMEpp-tiny of a fixed seed, for tests that do not change it."""
    import open_clip
    import torch

    import pcmepp_openclip  # noqa: F401

    torch.manual_seed(0)
    return open_clip.create_model("PCMEpp-tiny")


@pytest.fixture
def exported(tiny_model, tmp_path) -> Path:
    """That model as a folder that open_clip reads."""
    from pcmepp_openclip.models.export import export_model

    return export_model(tiny_model, tmp_path / "exported", "PCMEpp-tiny", card="a card")


@pytest.fixture
def tiny_batch(tiny):
    from helpers import make_batch

    return make_batch(tiny)


@pytest.fixture
def guarded(hub, monkeypatch):
    """The local Hub, which now asks for a token, and this process has it."""
    from hub_helpers import TOKEN

    hub.token = TOKEN
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield hub
    hub.token = hub.reader = None


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """The folder of a run of 2 epochs with validation; further runs of the session share it, so nobody writes there."""
    from drawn_shards import write_shards
    from hub_helpers import train_flags

    from pcmepp_openclip import cli
    from pcmepp_openclip.training import command as train

    folder = tmp_path_factory.mktemp("trained")
    data = write_shards(folder / "secret-place", 2, 32)
    assert cli.main(["data", "count", data]) == 0
    assert train.main(train_flags(data, folder, "run")) == 0
    return folder / "run"


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """The process that real ranks are forked from: it imports everything once for all test files."""
    from ranks import Ranks

    server = Ranks(tmp_path_factory.mktemp("ranks") / "log")
    yield server
    server.close()


@pytest.fixture(scope="module")
def registries():
    """What a module registers is gone after it."""
    from pcmepp_openclip import DISTANCES, LOSSES
    from pcmepp_openclip.evaluation.tasks import RETRIEVAL_EVALUATORS, ZEROSHOT_EVALUATORS

    before = [(registry, dict(registry)) for registry in (DISTANCES, LOSSES, RETRIEVAL_EVALUATORS, ZEROSHOT_EVALUATORS)]
    yield
    for registry, entries in before:
        registry.clear()
        registry.update(entries)
