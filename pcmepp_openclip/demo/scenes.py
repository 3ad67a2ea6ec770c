"""Drawn scenes, and captions that name more or less of what is in them.

A scene has one or two things, each with a size, a colour and a shape; of two, one stands left of the other or above it.
A caption is a predicate over scenes: it says which of these facts hold, from none ("a shape") to all ("a small red
circle left of a large blue square"). So it is known which captions truly fit which scenes, and how many.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

SIZES = ("small", "large")
COLOURS = ("red", "green", "blue", "yellow", "purple", "black")
SHAPES = ("circle", "square", "triangle", "cross")
RELATIONS = ("left of", "above", "right of", "below")  # two further on is the opposite
CONDITIONS = ("clean", "blurred", "covered")
COVERS = ("paper", "grey", "noise")  # the first one is invisible: it has the colour of the background
CLEAN_SHARE, TWO_SHARE = 0.6, 2 / 3


@dataclass(frozen=True)
class Thing:
    """A thing in a scene, or as a caption describes it, where None leaves a fact open."""

    size: str | None = None
    colour: str | None = None
    shape: str | None = None

    @property
    def facts(self) -> tuple[str | None, ...]:
        return self.size, self.colour, self.shape

    def __str__(self) -> str:
        words = [*filter(None, self.facts[:2]), self.shape or "shape"]
        return f"a {' '.join(words)}"


@dataclass(frozen=True)
class Scene:
    """The facts of an image.

    Arguments:
        things: one or two.
        relation: of the first to the second, "left of" or "above"; None for one thing.
        condition: "clean", "blurred" or "covered": the facts stay the same, but less of them can be seen.
        jitter: seed of all that no caption speaks of: exact places, and which half is covered.
        cover: the cover of a covered scene, one of `COVERS`; "none" for the others.
    """

    things: tuple[Thing, ...]
    relation: str | None = None
    condition: str = "clean"
    jitter: int = 0
    cover: str = "none"


@dataclass(frozen=True)
class Caption:
    """A predicate over scenes: one thing, or two and perhaps how the first stands to the second. A caption of one thing
    is true of a scene in which any thing has the named facts."""

    first: Thing
    second: Thing | None = None
    relation: str | None = None

    def __str__(self) -> str:
        if self.second is None:
            return str(self.first)
        if self.relation is None and self.first == self.second == Thing():
            return "two shapes"
        return f"{self.first} {self.relation or 'and'} {self.second}"


def opposite(relation: str) -> str:
    return RELATIONS[(RELATIONS.index(relation) + 2) % 4]


def draw_scene(random: Random, things: int | None = None) -> Scene:
    """Draw a random scene, of one or two things unless `things` says how many."""
    number = things or (2 if random.random() < TWO_SHARE else 1)
    chosen = tuple(Thing(random.choice(SIZES), random.choice(COLOURS), random.choice(SHAPES)) for _ in range(number))
    condition = "clean" if random.random() < CLEAN_SHARE else random.choice(CONDITIONS[1:])
    cover = random.choice(COVERS) if condition == "covered" else "none"
    relation = random.choice(RELATIONS[:2]) if number == 2 else None
    return Scene(chosen, relation, condition, random.getrandbits(32), cover)


def draw_caption(random: Random, scene: Scene) -> Caption:
    """Draw a caption that fits the scene and names some of its facts: how many is uniform, which ones too."""
    things, relation = list(scene.things), scene.relation
    if len(things) == 2 and relation and random.random() < 0.5:  # either of them may come first
        things.reverse()
        relation = opposite(relation)
    places = [(i, fact) for i in range(len(things)) for fact in range(3)]
    if relation:
        places.append((2, 0))
    named = set(random.sample(places, random.randint(0, len(places))))
    said = [Thing(*(fact if (i, f) in named else None for f, fact in enumerate(t.facts))) for i, t in enumerate(things)]
    relation = relation if (2, 0) in named else None
    mentioned = [thing for thing in said if thing != Thing()]
    if relation is None and len(mentioned) < 2:  # nothing is said of the other one, so it is left out
        return Caption(mentioned[0] if mentioned else Thing())
    return Caption(said[0], said[1], relation)


def fitting(captions: Sequence[Caption], scenes: Sequence[Scene]) -> np.ndarray:
    """Return which captions fit which scenes, [captions, scenes] of bool. A caption may name either thing first."""
    words = np.array([_both_orders(scene) for scene in scenes])  # [scenes, 2, 7]

    @functools.cache
    def is_word(place: int, word: str) -> np.ndarray:
        return words[:, :, place] == word

    def fits(caption: Caption) -> np.ndarray:
        second = caption.second or Thing()
        holds = np.ones(words.shape[:2], dtype=bool)
        if caption.second is not None:
            holds &= ~is_word(5, "")  # there is a second thing
        for place, word in enumerate((*caption.first.facts, *second.facts, caption.relation)):
            if word is not None:
                holds &= is_word(place, word)
        return holds[:, 0] | holds[:, 1]

    rows = {caption: fits(caption) for caption in set(captions)}
    return np.stack([rows[caption] for caption in captions])


def _both_orders(scene: Scene) -> list[tuple[str | None, ...]]:
    """Return the facts of both things and the relation of the first to the second, from either of them."""
    one, two = (*scene.things, Thing("", "", ""))[:2]
    if scene.relation is None:
        return [(*one.facts, *two.facts, "")] * 2
    return [(*one.facts, *two.facts, scene.relation), (*two.facts, *one.facts, opposite(scene.relation))]
