"""The demo's scenes: captions are true of what they are said to be true of, and images show it."""

import itertools
import json
import tarfile
from random import Random

import numpy as np
import pytest

from pcmepp_openclip.demo import dataset, drawing
from pcmepp_openclip.demo.scenes import (
    COLOURS,
    COVERS,
    SHAPES,
    SIZES,
    Caption,
    Scene,
    Thing,
    draw_caption,
    draw_scene,
    fitting,
    opposite,
)

RED_BLUE = Scene((Thing("small", "red", "circle"), Thing("large", "blue", "square")), "left of")
ONE = Scene((Thing("small", "red", "circle"),))


def describes(thing, other):
    return all(fact is None or fact == shown for fact, shown in zip(thing.facts, other.facts, strict=True))


def is_true(caption, scene):
    """Whether a caption is true of a scene, by the definition; `fitting` is the fast form."""
    if caption.second is None:
        return any(describes(caption.first, thing) for thing in scene.things)
    if len(scene.things) < 2:
        return False
    one, two = scene.things
    return any(
        describes(caption.first, a) and describes(caption.second, b) and caption.relation in (None, relation)
        for a, b, relation in ((one, two, scene.relation), (two, one, opposite(scene.relation)))
    )


@pytest.mark.parametrize(
    "caption, text, fits",
    [
        (Caption(Thing()), "a shape", (True, True)),
        (Caption(Thing(colour="red")), "a red shape", (True, True)),
        (Caption(Thing(shape="square")), "a square", (True, False)),
        (Caption(Thing("small", "blue")), "a small blue shape", (False, False)),  # small and blue, but not the same one
        (Caption(Thing(), Thing()), "two shapes", (True, False)),
        (Caption(Thing(shape="square"), Thing("small")), "a square and a small shape", (True, False)),
        (Caption(Thing(colour="red"), Thing(shape="circle")), "a red shape and a circle", (False, False)),
        (Caption(Thing(), Thing(shape="square"), "left of"), "a shape left of a square", (True, False)),
        (Caption(Thing(shape="square"), Thing(), "right of"), "a square right of a shape", (True, False)),
        (Caption(Thing(shape="square"), Thing(), "left of"), "a square left of a shape", (False, False)),
        (Caption(Thing(), Thing(), "above"), "a shape above a shape", (False, False)),
    ],
)
def test_what_a_caption_says(caption, text, fits):
    assert str(caption) == text
    assert (is_true(caption, RED_BLUE), is_true(caption, ONE)) == fits
    assert fitting([caption], [RED_BLUE, ONE]).tolist() == [list(fits)]


def test_a_drawn_caption_fits_its_scene_and_the_fast_form_is_the_definition():
    random = Random(0)
    scenes = [draw_scene(random) for _ in range(150)]
    captions = [draw_caption(random, scene) for scene in scenes]
    matrix = fitting(captions, scenes)
    assert matrix.diagonal().all()
    slow = [[is_true(caption, scene) for scene in scenes] for caption in captions]
    assert matrix.tolist() == slow
    counts = matrix.sum(axis=1)
    assert counts.min() < 5 and counts.max() == len(scenes)  # from exact to vague


def test_captions_are_told_apart_by_their_words():
    """Two captions with the same words are true of the same scenes: else the truth would not be one of the text's."""
    random = Random(1)
    scenes = [draw_scene(random) for _ in range(400)]
    captions = [draw_caption(random, scene) for scene in scenes for _ in range(3)]
    by_text: dict[str, np.ndarray] = {}
    for caption, row in zip(captions, fitting(captions, scenes), strict=True):
        assert (by_text.setdefault(str(caption), row) == row).all()


def test_every_fact_shows_in_the_picture():
    things = [Thing(*facts) for facts in itertools.product(SIZES, COLOURS, SHAPES)]
    drawn = {drawing.render(Scene((thing,), jitter=5)).tobytes() for thing in things}
    assert len(drawn) == len(things)
    swapped = Scene(RED_BLUE.things[::-1], "left of", jitter=5)
    turned = Scene(RED_BLUE.things, "above", jitter=5)
    assert len({drawing.render(scene).tobytes() for scene in (RED_BLUE, swapped, turned)}) == 3


def pixels(condition, cover="none", scene=RED_BLUE, jitter=5):
    return np.asarray(drawing.render(Scene(scene.things, scene.relation, condition, jitter, cover)), dtype=int)


def test_less_can_be_seen_of_a_blurred_scene():
    clean, blurred = pixels("clean"), pixels("blurred")
    assert np.abs(np.diff(blurred, axis=1)).max() < np.abs(np.diff(clean, axis=1)).max() / 3


@pytest.mark.parametrize("scene", [ONE, RED_BLUE])
@pytest.mark.parametrize("cover", COVERS)
def test_half_of_a_covered_scene_is_hidden_and_with_it_a_thing(cover, scene):
    for jitter in range(20):
        clean, covered = pixels("clean", scene=scene, jitter=jitter), pixels("covered", cover, scene, jitter)
        changed = (clean != covered).any(axis=2)
        rows, columns = changed.any(axis=1).nonzero()[0], changed.any(axis=0).nonzero()[0]
        halves = [axis.max() < 16 or axis.min() >= 16 for axis in (rows, columns)]
        assert any(halves)  # nothing has changed outside a half
        colours = {tuple(colour) for colour in covered[changed]}
        assert colours <= {"paper": {drawing.PAPER}, "grey": {drawing.GREY}}.get(
            cover, {*drawing.INKS.values(), drawing.PAPER}
        )
        if cover == "grey":
            assert changed.mean() == 0.5
        if cover == "paper":  # as if there had been nothing, so the things that are left can be counted by their ink
            inks = {tuple(colour) for colour in covered.reshape(-1, 3)} - {drawing.PAPER}
            assert len(inks) == drawing.visible(Scene(scene.things, scene.relation, "covered", jitter, cover))
            assert len(inks) < len(scene.things)


def test_a_scene_without_a_cover_shows_all_of_its_things():
    assert drawing.visible(RED_BLUE) == 2 and drawing.visible(Scene(ONE.things, None, "blurred")) == 1


def test_scenes_are_covered_in_all_ways():
    random = Random(0)
    scenes = [draw_scene(random) for _ in range(300)]
    assert {scene.cover for scene in scenes if scene.condition == "covered"} == set(COVERS)
    assert {scene.cover for scene in scenes if scene.condition != "covered"} == {"none"}


def test_the_same_seed_draws_the_same(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        pattern = dataset.write_train(tmp_path / name, size=20, seed=seed, quiet=True)
        assert pattern.endswith("{00000..00000}.tar")
        dataset.write_zeroshot(tmp_path / name, size=10, seed=seed)
    assert json.loads((tmp_path / "a/sizes.json").read_text()) == {"00000.tar": 20}
    for file in ("00000.tar", "test/0.tar"):
        a, b, c = ((tmp_path / name / file).read_bytes() for name in "abc")
        assert a == b != c


def test_training_and_held_out_pairs_are_drawn_apart(tmp_path):
    dataset.write_train(tmp_path / "train", size=50, seed=0, quiet=True)
    dataset.write_retrieval(tmp_path, dataset.draw_held_out(50, seed=0))
    seen, held_out = (
        {tar.extractfile(member).read() for member in tar if member.name.endswith(".png")}
        for tar in map(tarfile.open, (tmp_path / "train/00000.tar", tmp_path / "test/0.tar"))
    )
    assert len(seen & held_out) <= 3 < 40 < len(seen)  # scenes of one thing behind a cover look all the same


def test_the_layout_is_the_one_that_clip_benchmark_reads(tmp_path):
    from clip_benchmark.datasets.builder import build_wds_dataset

    held_out = dataset.draw_held_out(12, seed=0)
    dataset.write_retrieval(tmp_path / "retrieval", held_out)
    pairs = list(build_wds_dataset("retrieval", np.asarray, data_dir=str(tmp_path / "retrieval")))
    assert [image.shape for image, _ in pairs] == [(32, 32, 3)] * 12
    assert [caption for _, captions in pairs for caption in captions] == list(map(str, held_out.captions))
    matches = json.loads((tmp_path / "retrieval/test/matches.json").read_text())["images_of_caption"]
    for images, caption in zip(matches, held_out.captions, strict=True):
        assert images == [i for i, scene in enumerate(held_out.scenes) if is_true(caption, scene)]
    with tarfile.open(tmp_path / "retrieval/test/0.tar") as tar:
        facts = [json.load(tar.extractfile(member)) for member in tar if member.name.endswith(".json")]
    assert [fact["condition"] for fact in facts] == [scene.condition for scene in held_out.scenes]
    assert [fact["cover"] for fact in facts] == [scene.cover for scene in held_out.scenes]

    dataset.write_zeroshot(tmp_path / "zeroshot", size=12, seed=0)
    classes = build_wds_dataset("zeroshot", np.asarray, data_dir=str(tmp_path / "zeroshot"))
    assert classes.classes == dataset.CLASSES and classes.templates == dataset.TEMPLATES
    assert all(0 <= label < len(dataset.CLASSES) for _, label in classes)
