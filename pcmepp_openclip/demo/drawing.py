"""Scenes as images of 32 x 32 pixels: clean, blurred, or half covered."""

from random import Random

from PIL import Image, ImageDraw, ImageFilter

from .scenes import Scene, Thing

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
PAPER, COVER = (245, 245, 240), (150, 150, 150)
BLUR = 4.0


def render(scene: Scene) -> Image.Image:
    """The image of a scene, always the same one for the same scene."""
    random = Random(scene.jitter)
    image = Image.new("RGB", (SIDE, SIDE), PAPER)
    pen = ImageDraw.Draw(image)
    ends = (8, SIDE - 8)  # each thing stands in a quarter of the image; two share a row or a column, not both
    x, y = random.choice(ends), random.choice(ends)
    centres = {None: [(x, y)], "left of": [(ends[0], y), (ends[1], y)], "above": [(x, ends[0]), (x, ends[1])]}
    for thing, (x, y) in zip(scene.things, centres[scene.relation], strict=True):
        _draw(pen, thing, x + random.uniform(-1, 1), y + random.uniform(-1, 1))
    if scene.condition == "blurred":
        image = image.filter(ImageFilter.GaussianBlur(BLUR))
    elif scene.condition == "covered":
        half, end = SIDE // 2, SIDE - 1
        boxes = ((0, 0, half, end), (half, 0, end, end), (0, 0, end, half), (0, half, end, end))
        pen.rectangle(random.choice(boxes), fill=COVER)
    return image


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
