"""Scenes as images of 32 x 32 pixels: clean, blurred, or half covered in one of several ways."""

from random import Random

from PIL import Image, ImageDraw, ImageFilter

from .scenes import COVERS, Scene, Thing

SIDE = 32
RADIUS = {"small": 4.0, "large": 7.0}
INKS = {
    "red": (215, 40, 40),
    "green": (40, 150, 60),
    "blue": (50, 80, 210),
    "yellow": (240, 205, 50),
    "purple": (150, 60, 170),
    "black": (30, 30, 30),
}
PAPER, GREY = (245, 245, 240), (150, 150, 150)
BLUR = 4.0
HALF, GRAIN = SIDE // 2, 4  # GRAIN: the side of a square of noise
HALVES = ((0, 0, HALF, SIDE), (HALF, 0, SIDE, SIDE), (0, 0, SIDE, HALF), (0, HALF, SIDE, SIDE))


def render(scene: Scene) -> Image.Image:
    """Draw the image of a scene, always the same one for the same scene."""
    image = Image.new("RGB", (SIDE, SIDE), PAPER)
    pen = ImageDraw.Draw(image)
    random, places, centres = _layout(scene)
    for thing, (x, y) in zip(scene.things, centres, strict=True):
        _draw(pen, thing, x, y)
    if scene.condition == "blurred":
        image = image.filter(ImageFilter.GaussianBlur(BLUR))
    elif scene.condition == "covered":
        _cover(image, scene.cover, _covered_half(places, random), random)
    return image


def visible(scene: Scene) -> int:
    """Return how many things of the scene are not behind its cover."""
    if scene.condition != "covered":
        return len(scene.things)
    random, places, _ = _layout(scene)
    half = _covered_half(places, random)
    return sum(not _inside(place, half) for place in places)


def _layout(scene: Scene) -> tuple[Random, list[tuple[int, int]], list[tuple[float, float]]]:
    """Return the random numbers of the rest, and the place and the exact centre of each thing. A thing stands in a
    quarter of the image; two share a row or a column, not both."""
    random, ends = Random(scene.jitter), (8, SIDE - 8)
    x, y = random.choice(ends), random.choice(ends)
    places = [(x, y)]
    if scene.relation is not None:
        places = [(end, y) if scene.relation == "left of" else (x, end) for end in ends]
    return random, places, [(x + random.uniform(-1, 1), y + random.uniform(-1, 1)) for x, y in places]


def _covered_half(places: list[tuple[int, int]], random: Random) -> tuple[int, int, int, int]:
    """Choose a half of the image that hides at least one thing: a cover that hides nothing would be no loss."""
    return random.choice([half for half in HALVES if any(_inside(place, half) for place in places)])


def _inside(place: tuple[int, int], box: tuple[int, int, int, int]) -> bool:
    return box[0] <= place[0] < box[2] and box[1] <= place[1] < box[3]


def _cover(image: Image.Image, cover: str, box: tuple[int, int, int, int], random: Random) -> None:
    """Cover a half with the colour of the paper, where nothing hints at it, with grey, or with coloured squares."""
    assert cover in COVERS, cover
    if cover != "noise":
        image.paste({"paper": PAPER, "grey": GREY}[cover], box)
        return
    inks = [*INKS.values(), PAPER]
    for x in range(box[0], box[2], GRAIN):
        for y in range(box[1], box[3], GRAIN):
            image.paste(random.choice(inks), (x, y, x + GRAIN, y + GRAIN))


def _draw(pen: ImageDraw.ImageDraw, thing: Thing, x: float, y: float) -> None:
    assert thing.size and thing.colour
    r, ink = RADIUS[thing.size], INKS[thing.colour]
    if thing.shape == "circle":
        pen.ellipse((x - r, y - r, x + r, y + r), fill=ink)
    elif thing.shape == "square":
        r *= 0.9
        pen.rectangle((x - r, y - r, x + r, y + r), fill=ink)
    elif thing.shape == "triangle":
        pen.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=ink)
    else:
        pen.rectangle((x - r, y - r / 3, x + r, y + r / 3), fill=ink)
        pen.rectangle((x - r / 3, y - r, x + r / 3, y + r), fill=ink)
