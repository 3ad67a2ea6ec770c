"""Images of extreme shape: a few bytes that a resize would make gigabytes of."""

import io

import numpy as np
import open_clip
import pytest
import torch
from eval_data import write_tar
from helpers import run_python
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image

from pcmepp_openclip.host.data import bounded
from pcmepp_openclip.models.export import export_model


def strip(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG", optimize=True)
    return file.getvalue()


USE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
from pcmepp_openclip import cli
from pcmepp_openclip.training import command as train
folder = sys.argv[1]
common = ["--workers", "0", "--batch-size", "2"]
evaluation = ["--model", f"local-dir:{folder}/model", "--retrieval", f"{folder}/data", "--out", f"{folder}/out"]
codes = [cli.main(["eval", *evaluation, *common])]
flags = ["--model", "PCMEpp-tiny", "--force-image-size", "224", "--train-data", f"{folder}/data/test/0.tar", "--epochs"]
flags += ["1", "--val-data", f"{folder}/data/test/0.tar", "--train-num-samples", "2", "--val-num-samples", "2"]
flags += ["--logs", folder, "--name", "run", "--dataset-type", "webdataset", "--precision", "fp32", "--warmup", "1"]
codes.append(train.main([*flags, *common]))
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))  # ru_maxrss counts the parent's
print("CODES", codes, "PEAK", int(peak.split()[1]) >> 10)
"""


def test_a_strip_takes_no_gigabytes_in_evaluation_training_and_validation(tmp_path):
    """312 bytes took 14 GB."""
    model = open_clip.create_model("PCMEpp-tiny", force_image_size=224)
    export_model(model, tmp_path / "model", "PCMEpp-tiny")
    samples = [{"png": strip(*size), "txt": "a strip"} for size in [(1, 60_000), (60_000, 1)]]
    write_tar(tmp_path / "data/test/0.tar", samples)
    (tmp_path / "data/test/nshards.txt").write_text("1")
    done = run_python("-c", USE, str(tmp_path))
    assert "CODES [0, 0]" in done.stdout, done.stderr[-2000:]
    assert int(done.stdout.split("PEAK")[1]) < 2500, done.stdout


@pytest.mark.parametrize("size", [(30, 200), (200, 30), (64, 64)])
@pytest.mark.parametrize("target", [(16, 16), (16, 24)])
def test_what_is_cut_off_does_not_show(size, target):
    """With a bound so low that ordinary images are cut to their middle, the result is nearly the same; with that of
    the commands it is the same to the bit."""
    noise = np.random.default_rng(0).integers(0, 256, (size[1] // 10 + 1, size[0] // 10 + 1, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)
    stock = image_transform_v2(PreprocessCfg(size=target), is_train=False)
    assert torch.equal(bounded(stock)(image), stock(image))
    low = bounded(stock, max_pixels=2 * target[0] * target[1])
    assert (low(image) - stock(image)).abs().mean() < 0.15


def test_other_ways_to_resize_are_left_alone():
    for mode in ("longest", "squash"):
        stock = image_transform_v2(PreprocessCfg(size=(16, 16), resize_mode=mode), is_train=False)
        assert bounded(stock) is stock
