"""Colours: of devices, which people with any colour vision can tell apart, and of amounts."""

from __future__ import annotations

from functools import lru_cache

# Paul Tol's qualitative schemes "light" and, from its ninth device on, eight of "muted" and "dark"
# (https://sronpersonalpages.sron.nl/~pault/): made for colour blindness. Numbers in the cells tell
# devices apart that are 16 apart.
DEVICES = (
    *("#77AADD", "#EE8866", "#EEDD88", "#FFAABB", "#99DDFF", "#44BB99", "#BBCC33", "#AAAA00"),
    *("#332288", "#117733", "#882255", "#225555", "#663333", "#666633", "#222255", "#555555"),
)
# Of what all devices hold.
COMMON, COMMON_COLOUR = -1, "#DDDDDD"
# Of amounts, as in the matrix of who sends how much to whom: of none, and of the most there is.
NOTHING, MOST = "#F7FBFF", "#08306B"
# Of text, whichever reads better.
INK, PAPER = "#000000", "#FFFFFF"


def of_device(number: int) -> str:
    """The colour of a device; they repeat after 16."""
    if number == COMMON:
        return COMMON_COLOUR
    return DEVICES[number % len(DEVICES)]


def of_share(share: float) -> str:
    """The colour of an amount, as a share of the largest: from light to dark."""
    mixed = [
        round(a + (b - a) * min(max(share, 0.0), 1.0))
        for a, b in zip(_channels(NOTHING), _channels(MOST))
    ]
    return "#" + "".join(f"{channel:02X}" for channel in mixed)


@lru_cache(maxsize=512)
def ink_on(colour: str) -> str:
    """Black or white, whichever reads better on a colour."""
    return max(INK, PAPER, key=lambda ink: contrast(ink, colour))


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours, from 1 to 21, by WCAG 2.1."""
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def _channels(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def _luminance(colour: str) -> float:
    red, green, blue = (
        c / 12.92 if (c := channel / 255) <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for channel in _channels(colour)
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
