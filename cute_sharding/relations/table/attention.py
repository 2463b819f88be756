"""Attention, by names: each query reads all keys, and its result on some keys is a state. Batch,
heads and queries are free, keys are folded, and multiplied dims are whole.
"""

from __future__ import annotations

from re import sub
from typing import Any

from cute_sharding.relations.signature import Folding
from cute_sharding.relations.table.kernels import AlignedMask
from cute_sharding.relations.table.names import Rule, Shape, text
from cute_sharding.relations.table.row import Row, Windowing

# For each argument's name in torch, the dims of that tensor. The op does not read a state (of a
# random generator, or of sequences of several lengths, which we do not have). Each head of keys has
# several heads of queries, q.
DIMS = {
    "query": "b q s [e]",
    "key": "b h t [e]",
    "value": "b h t [f]",
    "grad_out": "b q s [f]",
    "out": "b q s [f]",
    "logsumexp": "b q s",
    "room": "b q [u]",  # statistics, padded to more queries than there are
    "columns": "b q s [u]",
    "state": "_",
    "none": "0",
}


def _mask(queries: Shape, keys: Shape, mask: Shape) -> str:
    """The dims of a mask, which may lack leading dims and have dims of size 1."""
    names, sizes = ["b", "q", "s", "t"], [*queries[:3], keys[2]]
    given = zip(names[4 - len(mask) :], mask, sizes[4 - len(mask) :])
    return text(["1" if n == 1 != of else name for name, n, of in given])


def kernel(parameters: str, results: str, *, queries: str = "[s]", keys: str = "[t]") -> Rule:
    """The rule of an attention kernel with these arguments: the tensors in :data:`DIMS`,
    ``dropout`` and ``debug``; ``.`` stands for an argument that does not matter here. Results are
    named the same way; without a mask the mask's gradient is a state. ``queries`` and ``keys``: how
    the dims of the sequences are written, by default as whole.

    There is no signature with dropout, since each device would draw its own mask.
    """
    names = parameters.split()

    def rule(*args: Any, attn_mask: Shape | None = None, **_: Any) -> str | None:
        given = [(name, of) for name, of in zip(names, args) if of is not None]
        of_mask = [("mask", attn_mask)] if attn_mask is not None else []
        first = dict(reversed(given))
        heads, groups = first["query"][1], first["key"][1]
        if first.get("dropout") or first.get("debug") or groups == 0 or heads % groups:
            return None
        mask = first.get("mask", attn_mask)
        of_mask_given = DIMS["state"] if mask is None else _mask(first["query"], first["key"], mask)
        dims = {**DIMS, "mask": of_mask_given}
        operands = [dims[name] for name, _ in (*given, *of_mask) if name in dims]
        found = f"{', '.join(operands)} -> {', '.join([dims[name] for name in results.split()])}"
        shared = heads // groups
        written = {"q": f"h*{shared}" if shared > 1 else "h", "s": queries, "t": keys}
        return sub(r"\b[qst]\b", lambda name: written[name[0]], found)

    rule.__doc__ = f"``{parameters} -> {' '.join(results.split())}``; {_FREE[keys]}."
    return rule


# By how the keys are written.
_FREE = {
    "[t]": "batch and heads are free",
    "(t)": "batch, heads and queries are free, and keys are folded",
    "t": "all dims but those that are multiplied are free or contracted",
}


GRADIENTS = "query key value"

# Heads of queries that share a head of keys lie side by side.
HEADS = Windowing(tiles=True)

# Of each query: the maximum and the sum of its exponentials, and its weighted sum of values.
STATES = (("max", 1), ("sum", 1), ("sum", 0))
FLASH = "out logsumexp state state state state state state none"
FLASH_GIVES = "grad_out query key value out logsumexp state state . . dropout . state state"

# The others pad what they give of each query, or have it in another form: their sequences are
# whole.
ROWS: tuple[Row, ...] = (
    *(
        row
        for name, forward, backward, filled in (
            (
                "flash_attention_for_cpu",
                ("query key value dropout", "out logsumexp"),
                "grad_out query key value out logsumexp dropout",
                "h",
            ),
            ("flash_attention", ("query key value dropout . debug", FLASH), FLASH_GIVES, "bh"),
        )
        for row in (
            Row(
                (f"_scaled_dot_product_{name}.default",),
                kernel(*forward, queries="s", keys="(t)"),
                filled=frozenset(filled),
                fold=Folding(name, STATES, rows=frozenset("s")),
                windows=HEADS,
            ),
            Row(
                (f"_scaled_dot_product_{name}_backward.default",),
                kernel(backward, GRADIENTS, queries="s", keys="t"),
                "sum",
                filled=frozenset(filled),
                fold=Folding(f"{name}_backward", rows=frozenset("st")),
                windows=HEADS,
            ),
        )
    ),
    *(
        Row(
            (f"_scaled_dot_product_{name}.default",),
            rule,
            filled=frozenset("bh"),
            kernel=wants,
            windows=HEADS,
        )
        for name, rule, wants in (
            (
                "efficient_attention",
                kernel("query key value mask . dropout", "out room state state"),
                AlignedMask(3),
            ),
            (
                "efficient_attention_backward",
                kernel(
                    "grad_out query key value mask out room state state dropout",
                    f"{GRADIENTS} mask",
                ),
                AlignedMask(4),
            ),
            (
                "cudnn_attention",
                kernel("query key value mask . dropout . debug", f"out columns {'state ' * 7}"),
                None,
            ),
            (
                "cudnn_attention_backward",
                kernel(
                    "grad_out query key value out columns state state mask state state . . dropout",
                    GRADIENTS,
                ),
                None,
            ),
        )
    ),
)
