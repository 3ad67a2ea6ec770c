"""Every kind of bad input: what comes through, what is counted, and what ends a run."""

import io
import json
import logging
import tarfile
import zlib
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from shard_maker import (
    arguments,
    captions,
    flat,
    get_data,
    load,
    pair,
    picture,
    serve,
    several,
    to_tensor,
    write_shards,
    write_tar,
)

from pcmepp_openclip import cli
from pcmepp_openclip.data import defects
from pcmepp_openclip.data.captioned import read_captioned
from pcmepp_openclip.data.count import count_shard
from pcmepp_openclip.data.decode import MAX_PIXELS, BadImage, decode_image


def bomb() -> bytes:
    """A PNG of a few bytes that says it has 40,000 x 40,000 pixels."""
    small = bytearray(picture(format="PNG"))
    small[16:24] = (40_000).to_bytes(4, "big") * 2
    small[29:33] = zlib.crc32(small[12:29]).to_bytes(4, "big")
    return bytes(small)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"

BAD_SAMPLES = {
    defects.NO_IMAGE: lambda key: {f"{key}.txt": b"text"},
    defects.NO_CAPTION: lambda key: {f"{key}.jpg": picture()},
    defects.EMPTY_CAPTION: lambda key: pair(key, " \n "),
    defects.NOT_UTF8: lambda key: pair(key, b"caf\xe9"),
    defects.BROKEN_IMAGE: lambda key: pair(key, image=picture(size=(200, 200))[:900]),
    defects.UNKNOWN_FORMAT: lambda key: pair(key, image=EPS),
    defects.HUGE_IMAGE: lambda key: pair(key, image=bomb()),
    defects.HUGE_FILE: lambda key: pair(key, "x" * (1 << 20) + "x"),
}


def write_bad(folder, causes=tuple(BAD_SAMPLES), shards=4, good=10):
    """Shards in which a bad sample of each kind stands among the good ones; the captions of the good ones."""
    keys = []
    for number in range(shards):
        samples = [BAD_SAMPLES[cause](f"{number}bad{i}") for i, cause in enumerate(causes)]
        for i in range(good):
            keys.append(f"{number}good{i}")
            samples.insert(2 * i, pair(keys[-1]))
        write_tar(folder / f"{number:05d}.tar", samples)
    return f"{folder}/{{00000..{shards - 1:05d}}}.tar", [f"caption {key}" for key in keys]


@pytest.mark.parametrize("resampled", [False, True])
def test_bad_samples_are_skipped_and_counted(tmp_path, resampled):
    pattern, good = write_bad(tmp_path)
    (tmp_path / "sizes.json").write_text(json.dumps({f"{i:05d}.tar": 18 for i in range(4)}))
    data = load(arguments(pattern, dataset_resampled=resampled, train_num_samples=300 if resampled else None))
    seen = flat(data)
    assert set(seen) <= set(good) and len(set(seen)) >= (35 if resampled else 40)
    lost = data.dataloader.last.by_source([tmp_path.name])[tmp_path.name]
    assert set(lost) == set(BAD_SAMPLES)
    if not resampled:
        assert lost == dict.fromkeys(BAD_SAMPLES, 4)
        assert len(seen) == 72 and data.dataloader.last.stood_in == 32


def test_counting_finds_them_and_an_exact_pass_then_repeats_nothing(tmp_path):
    pattern, good = write_bad(tmp_path)
    assert cli.main(["data", "count", pattern, "--workers", "2"]) == 0
    assert json.loads((tmp_path / "sizes.json").read_text()) == {f"{i:05d}.tar": 10 for i in range(4)}
    data = load(arguments(pattern))
    assert sorted(flat(data)) == sorted(good)
    assert not data.dataloader.last.lost and not data.dataloader.last.stood_in


@pytest.mark.parametrize(
    "way, linked",
    [(tarfile.LNKTYPE, ("b.jpg", "b.txt", "b.json")), (tarfile.SYMTYPE, ("b.txt",)), (tarfile.SYMTYPE, ("b.json",))],
)
def test_links_are_counted_and_refused_by_the_evaluation(tmp_path, way, linked):
    """A sample of links vanished, and a link in place of the .json left one caption of five. A link that is not read is
    no reason."""
    path = tmp_path / "0.tar"
    with tarfile.open(path, "w") as tar:
        for name, data in {**several("a"), **several("b"), **several("c"), "c.cls": b""}.items():
            info = tarfile.TarInfo(name)
            if name in (*linked, "c.cls"):
                info.type, info.linkname = way, f"a.{name[2:]}"
            else:
                info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    count = count_shard(str(path), MAX_PIXELS)
    assert (count.samples, count.usable, count.unusable) == (3, 2, {defects.LINK: [1]})
    data = load(arguments(str(path), train_num_samples=3, batch_size=3))
    assert set(flat(data)) == {"a caption 0", "c caption 0"}
    assert data.dataloader.last.by_source([tmp_path.name])[tmp_path.name] == {defects.LINK: 1}
    with pytest.raises(ValueError, match=rf"{linked[0]} of .*0.tar is a link"):
        read_captioned(str(path))


def test_duplicate_keys_are_used_once(tmp_path):
    samples = [pair("a"), pair("b"), list(pair("b", "again").items()), pair("c"), pair("a", "again")]
    write_tar(tmp_path / "0.tar", samples)
    count = count_shard(str(tmp_path / "0.tar"), MAX_PIXELS)
    assert (count.samples, count.usable, count.unusable) == (5, 3, {defects.DUPLICATE_KEY: [2, 4]})
    data = load(arguments(str(tmp_path / "0.tar"), train_num_samples=3, batch_size=3))
    assert sorted(flat(data)) == ["caption a", "caption b", "caption c"]


ODD = [
    *(("CMYK", "JPEG", {}), ("L", "JPEG", {}), ("RGBA", "PNG", {}), ("P", "PNG", {}), ("1", "PNG", {})),
    *(("P", "PNG", {"transparency": bytes(range(200))}), ("LA", "PNG", {}), ("RGB", "WEBP", {}), ("RGB", "GIF", {})),
]


def test_odd_modes_become_what_pillow_makes_of_them():
    for mode, format, options in ODD:
        image = picture(mode=mode, format=format, **options)
        slow = Image.open(io.BytesIO(image)).convert("RGBA").convert("RGB")
        if Image.open(io.BytesIO(image)).mode == "CMYK":
            slow = Image.open(io.BytesIO(image)).convert("RGB")
        ours = decode_image(image)
        assert ours.mode == "RGB" and np.array_equal(np.asarray(ours), np.asarray(slow)), (mode, format, options)


def test_16_bits_are_scaled_not_clipped():
    values = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG")
    assert Image.open(io.BytesIO(file.getvalue())).mode.startswith("I")
    assert np.array_equal(np.asarray(decode_image(file.getvalue()))[..., 0], values // 256)


@pytest.mark.parametrize("format", ["WEBP", "GIF", "PNG"])
def test_of_an_animation_the_first_frame_is_used(format):
    frames = [Image.new("RGB", (9, 9), color) for color in ("red", "blue", "green")]
    file = io.BytesIO()
    frames[0].save(
        file, format, save_all=True, append_images=frames[1:], **({"lossless": True} if format == "WEBP" else {})
    )
    assert np.array_equal(np.asarray(decode_image(file.getvalue())), np.asarray(frames[0]))


def test_a_bomb_is_not_decoded():
    with pytest.raises(BadImage) as error:
        decode_image(bomb())
    assert error.value.cause == defects.HUGE_IMAGE
    with pytest.raises(BadImage):
        decode_image(picture(size=(30, 30)), max_pixels=899)
    decode_image(picture(size=(30, 30)), max_pixels=900)


def test_a_postscript_image_starts_no_program(tmp_path, monkeypatch):
    """Pillow hands EPS to Ghostscript, whatever the file is called."""
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
    with pytest.raises(OSError):
        Image.open(io.BytesIO(EPS)).load()
    assert (tmp_path / "ran").exists(), "this is what must not happen in ours"
    (tmp_path / "ran").unlink()
    with pytest.raises(BadImage):
        decode_image(EPS)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("resampled, remote", [(False, True), (True, False), (False, False)])
def test_bad_shards_are_skipped_and_counted(tmp_path, resampled, remote):
    """Of seven shards of 20 samples one is cut off, one is missing, one is a web page and one is empty."""
    pattern = write_shards(tmp_path / "d", [20] * 7)
    shards = [tmp_path / f"d/{i:05d}.tar" for i in range(7)]
    (tmp_path / "d/sizes.json").write_text(json.dumps({path.name: 20 for path in shards}))
    shards[2].write_bytes(shards[2].read_bytes()[: shards[2].stat().st_size * 6 // 10])
    shards[3].unlink()
    shards[4].write_bytes(b"<html>404</html>" * 1000)
    shards[5].write_bytes(b"")
    with serve(tmp_path) as server:
        if remote:
            pattern = f"d={server.url}/d/{{00000..00006}}.tar"
        number = 300 if resampled else None
        data = load(arguments(pattern, dataset_resampled=resampled, train_num_samples=number, workers=2))
        seen = flat(data)
    by_shard = Counter(caption[8:11] for caption in set(seen))
    assert set(by_shard) == {"000", "001", "002", "006"}
    lost = data.dataloader.last.by_source(["d"])["d"]
    assert set(lost) == {defects.TRUNCATED_SHARD, defects.MISSING_SHARD, defects.NOT_A_TAR}
    if not resampled:
        assert len(seen) == 140 and by_shard["000"] == by_shard["001"] == by_shard["006"] == 20
        assert 5 <= by_shard["002"] <= 15
        wanted = {defects.TRUNCATED_SHARD: 20 - by_shard["002"], defects.MISSING_SHARD: 20, defects.NOT_A_TAR: 40}
        assert lost == wanted  # all that was lost is counted


def test_a_server_that_stays_away_is_counted(tmp_path):
    write_shards(tmp_path / "d", [20, 20])
    (tmp_path / "d/sizes.json").write_text(json.dumps({"00000.tar": 20, "00001.tar": 20}))
    with serve(tmp_path) as server:
        server.drops["/d/00001.tar"] = 10**6
        data = load(arguments(f"d={server.url}/d/{{00000..00001}}.tar", "--train-data-retries", "1"))
        seen = set(flat(data))
    assert {caption for caption in seen if caption.startswith("caption 000")} == {
        f"caption 000{i:05d}" for i in range(20)
    }
    assert set(data.dataloader.last.by_source(["d"])["d"]) == {defects.LOST_SHARD}


def test_wrong_sizes_are_noticed(tmp_path):
    pattern = write_shards(tmp_path / "d", [10, 10])
    (tmp_path / "d/sizes.json").write_text(json.dumps({"00000.tar": 14, "00001.tar": 6}))
    data = load(arguments(pattern))
    assert len(flat(data)) == 20
    lost = data.dataloader.last.by_source(["d"])["d"]
    assert lost == {defects.FEWER_THAN_COUNTED: 4, defects.MORE_THAN_COUNTED: 1}


@pytest.mark.parametrize("cause, resampled, workers", [(defects.NO_CAPTION, False, 0), (defects.BROKEN_IMAGE, True, 2)])
def test_a_source_with_nothing_usable_ends_the_run_with_the_cause(tmp_path, resampled, workers, cause):
    """Where stock open_clip reads on for ever."""
    for number in range(3):
        write_tar(tmp_path / f"d/{number}.tar", [BAD_SAMPLES[cause](f"{number}{i}") for i in range(5)])
    (tmp_path / "d/sizes.json").write_text(json.dumps({f"{i}.tar": 5 for i in range(3)}))
    args = arguments(
        f"{tmp_path}/d/{{0..2}}.tar", "--train-data-max-empty-shards", "4", dataset_resampled=resampled, workers=workers
    )
    with pytest.raises(ValueError, match=f"'d' has no usable sample in 4 consecutive shards: .*{cause}") as error:
        captions(load(args))
    assert "\n" not in str(error.value)


def test_the_share_of_bad_samples_that_ends_a_run_is_a_setting(tmp_path):
    pattern, _ = write_bad(tmp_path / "d", [defects.BROKEN_IMAGE] * 3)
    (tmp_path / "d/sizes.json").write_text(json.dumps({f"{i:05d}.tar": 13 for i in range(4)}))
    assert captions(load(arguments(pattern)))
    with pytest.raises(ValueError, match=r"--train-data-max-bad-fraction 0.1 allows: .*broken image"):
        captions(load(arguments(pattern, "--train-data-max-bad-fraction", "0.1")))


def test_details_once_each_and_a_summary_each_epoch(tmp_path, caplog):
    pattern, _ = write_bad(tmp_path / "d", [defects.BROKEN_IMAGE] * 3)
    (tmp_path / "d/sizes.json").write_text(json.dumps({f"{i:05d}.tar": 13 for i in range(4)}))
    data = load(arguments(pattern, workers=2))
    caplog.set_level(logging.INFO)
    for epoch in range(3):
        data.set_epoch(epoch)
        captions(data)
    details = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(details) == 1 and "broken image" in details[0].getMessage()
    summaries = [r.getMessage() for r in caplog.records if "unusable: " in r.getMessage()]
    assert len(summaries) == 3 and all("broken image" in line for line in summaries)


def test_an_endless_word_does_not_hold_up_the_tokenizer(tmp_path):
    import open_clip

    write_tar(tmp_path / "0.tar", [pair("a", "z" * 900_000), pair("b"), pair("c"), pair("d")])
    args = arguments(str(tmp_path / "0.tar"), train_num_samples=4)
    tokenizer = open_clip.get_tokenizer("PCMEpp-tiny")
    data = get_data(args, (to_tensor, to_tensor), tokenizer=tokenizer)["train"]
    ((_, texts),) = list(data.dataloader)
    expected = tokenizer(["z" * 16 * 77])[0]
    assert any(torch.equal(row, expected[: len(row)]) for row in texts)


def test_a_photo_is_turned_as_its_exif_data_say_only_if_that_is_asked_for(tmp_path):
    for orientation in range(9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        photo = picture(size=(30, 20), quality=100, exif=exif)
        stored, upright = Image.open(io.BytesIO(photo)), ImageOps.exif_transpose(Image.open(io.BytesIO(photo)))
        assert np.array_equal(np.asarray(decode_image(photo)), np.asarray(stored))
        assert np.array_equal(np.asarray(decode_image(photo, upright=True)), np.asarray(upright)), orientation
    write_tar(tmp_path / "0.tar", [pair(f"{i}", image=photo) for i in range(4)])  # turned by a quarter
    for flags, wanted in (((), (30, 20)), (("--train-data-exif-orientation",), (20, 30))):
        data = load(arguments(str(tmp_path / "0.tar"), *flags, train_num_samples=4), transform=lambda image: image.size)
        ((sizes, _),) = data.dataloader
        assert tuple(int(side[0]) for side in sizes) == wanted
