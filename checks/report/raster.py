"""Cells of a map as pixels: colour by log10(error / allowed), and a texture for what is no pass.

Passing cells are blue and the fainter the further they are within the limit, so that they sink into
a light page and a dark one alike; failing ones are opaque, orange to magenta, and striped. Textures
run on from cell to cell: they must show where a cell is two pixels wide.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tapcheck.checks.numerics import FloatArray
from tapcheck.checks.report.maps import FAILS, MISSING, NO_NUMBER, NOT_DUE, PASSES, STATES

Pixels = npt.NDArray[np.uint8]

# The colours span a factor of 10**DECADES on either side of the limit.
DECADES = 3.0
# Pixels of the image to one on the page, for screens that have as many.
OVERSAMPLING = 2

_PASSING = (np.array([92, 138, 190, 70]), np.array([38, 104, 196, 255]))
_FAILING = (np.array([255, 159, 28, 255]), np.array([214, 0, 96, 255]))
_STRIPE = np.array([40, 0, 24, 255])
_GREY = np.array([128, 134, 142, 255])
_VIOLET = np.array([112, 60, 214, 255])
_WHITE = np.array([255, 255, 255, 255])
_PERIOD = 8 * OVERSAMPLING


def cell_states(rows: list[str]) -> npt.NDArray[np.int64]:
    """The states that letters stand for, shape [rows, columns]."""
    return np.array([[STATES.index(letter) for letter in row] for row in rows], np.int64)


def paint(states: npt.NDArray[np.int64], log_ratio: FloatArray, width: int, height: int) -> Pixels:
    """The image of cells [rows, columns], shape [height, width, 4], for a page's pixels each way.

    `log_ratio` is read where a cell passes or fails.
    """
    rows, columns = states.shape
    y, x = np.indices((height * OVERSAMPLING, width * OVERSAMPLING))
    cell = (y * rows // len(y), x * columns // x.shape[1])
    state, image = states[cell], _colours(states, log_ratio)[cell]
    falling, rising = (x + y) % _PERIOD, (x - y) % _PERIOD
    thin, thick = OVERSAMPLING, 2 * OVERSAMPLING
    image[(state == FAILS) & (rising < thin)] = _STRIPE
    image[(state == MISSING) & (falling < thick)] = _GREY
    image[(state == NO_NUMBER) & ((falling < thin) | (rising < thin))] = _WHITE
    image[_edges(state == FAILS) | _edges(state == NO_NUMBER)] = _STRIPE
    image[_edges(state == MISSING)] = _GREY
    pixels: Pixels = image.astype(np.uint8)
    return pixels


def _colours(states: npt.NDArray[np.int64], log_ratio: FloatArray) -> npt.NDArray[np.int64]:
    share = np.clip(np.nan_to_num(np.abs(log_ratio)) / DECADES, 0, 1)[..., None]
    image = np.zeros((*states.shape, 4), np.int64)
    far, near = _PASSING
    passing, failing = states == PASSES, states == FAILS
    image[passing] = (near + share * (far - near))[passing]
    little, much = _FAILING
    image[failing] = (little + share * (much - little))[failing]
    image[states == NO_NUMBER] = _VIOLET
    image[states == NOT_DUE] = 0
    return image


def _edges(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """The outermost pixels of the areas of a mask."""
    padded = np.pad(mask, 1, mode="edge")
    inner = padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    return mask & ~inner
