"""Colours that people can tell apart, and text that they can read on them."""

from itertools import combinations

import numpy as np
import pytest

from cute_sharding.tools.drawing import palette

# How dichromats see linear RGB: Viénot, Brettel and Mollon 1999 for red and green; for blue the
# same construction, by Machado, Oliveira and Fernandes 2009 at full severity.
SEEN_AS = {
    "normal": np.eye(3),
    "protanopia": [[0.1124, 0.8876, 0], [0.1124, 0.8876, 0], [0.004, -0.004, 1]],
    "deuteranopia": [[0.2928, 0.7072, 0], [0.2928, 0.7072, 0], [-0.0223, 0.0223, 1]],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.3039],
    ],
}


def lab(colour, vision):
    """CIE L*a*b* of a colour (D65), as that vision sees it."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.array(SEEN_AS[vision]) @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    x, y, z = np.cbrt(np.array(to_xyz) @ linear / [0.9505, 1.0, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", SEEN_AS)
def test_eight_devices_are_told_apart_by_colour(vision):
    seen = [lab(palette.of_device(device), vision) for device in range(8)]
    # 2.3 is the least difference that is noticed: four times that.
    assert min(np.linalg.norm(a - b) for a, b in combinations(seen, 2)) > 10


def test_text_on_every_colour_can_be_read():
    colours = [palette.of_device(device) for device in range(16)]
    colours.append(palette.of_device(palette.COMMON))
    colours += [palette.of_share(share / 100) for share in range(101)]
    for colour in colours:
        assert palette.contrast(palette.ink_on(colour), colour) >= 4.5  # WCAG 2.1, level AA
    assert len({*colours[:16]}) == 16
    assert palette.of_device(16) == palette.of_device(0)


def test_more_is_darker():
    shades = [palette.contrast("#FFFFFF", palette.of_share(share / 10)) for share in range(11)]
    assert shades == sorted(shades) and shades[0] < 1.2 and shades[-1] > 10
