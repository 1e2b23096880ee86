"""Orders of rows in which every request advances evenly, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tapcheck.capture import Columns, IntArray


def round_robin(columns: Columns) -> IntArray:
    """The order, shape [rows], in which requests take turns: no k+1-th row before any k-th.

    Within a round requests come by their index; each request's own rows keep their order.
    """
    grouped = np.argsort(columns.request, kind="stable")
    _, first, counts = np.unique(columns.request[grouped], return_index=True, return_counts=True)
    rounds = np.empty(len(columns), np.int64)
    rounds[grouped] = np.arange(len(columns)) - np.repeat(first, counts)
    order: IntArray = np.lexsort((columns.request, rounds))
    return order


def by_request(columns: Columns) -> IntArray:
    """The order, shape [rows], of request and then position, as a drain delivers rows."""
    order: IntArray = np.lexsort((columns.position, columns.request))
    return order
