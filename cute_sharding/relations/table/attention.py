"""Attention, by names: each query against all keys. The sequences, and what is multiplied, are
whole; batch and heads are free.
"""

from __future__ import annotations

from typing import Any

from cute_sharding.relations.table.kernels import AlignedMask
from cute_sharding.relations.table.names import Rule, Shape, text
from cute_sharding.relations.table.row import Row

# By an argument's name in torch the dims of the tensor that it is. A state (of a random generator,
# or of sequences of several lengths, which are not these) is not read.
DIMS = {
    "query": "b h [s] [e]",
    "key": "b h [t] [e]",
    "value": "b h [t] [f]",
    "grad_out": "b h [s] [f]",
    "out": "b h [s] [f]",
    "logsumexp": "b h [s]",
    "room": "b h [u]",  # for statistics of more queries than there are
    "columns": "b h [s] [u]",
    "state": "_",
    "none": "0",
}


def _mask(queries: Shape, mask: Shape) -> str:
    """A mask may lack leading dims, and have dims of size 1."""
    names = ["b", "h", "[s]", "[t]"][4 - len(mask) :]
    given = zip(names, mask, queries[4 - len(mask) :])
    return text(["1" if name in "bh" and n == 1 != of else name for name, n, of in given])


def kernel(parameters: str, results: str, *, shares_heads: bool = False) -> Rule:
    """A kernel called with these arguments: by :data:`DIMS` those that are tensors, ``.`` for what
    says nothing here, and ``dropout`` and ``debug``. Its results are tensors too: without a mask
    its gradient is a state.

    There is no signature where something is dropped, which each device would draw by itself, or,
    but with ``shares_heads``, where several heads of queries share one of keys: heads that are cut
    elsewhere would meet others.
    """
    names = parameters.split()

    def rule(*args: Any, attn_mask: Shape | None = None, **_: Any) -> str | None:
        given = [(name, of) for name, of in zip(names, args) if of is not None]
        of_mask = [("mask", attn_mask)] if attn_mask is not None else []
        first = dict(reversed(given))
        if first.get("dropout") or first.get("debug"):
            return None
        if not shares_heads and first["query"][:2] != first["key"][:2]:
            return None
        mask = first.get("mask", attn_mask)
        of_mask_given = DIMS["state"] if mask is None else _mask(first["query"], mask)
        dims = {**DIMS, "mask": of_mask_given}
        operands = [dims[name] for name, _ in (*given, *of_mask) if name in dims]
        return f"{', '.join(operands)} -> {', '.join([dims[name] for name in results.split()])}"

    rule.__doc__ = f"``{parameters} -> {' '.join(results.split())}``: batch and heads are free."
    return rule


GRADIENTS = "query key value"

ROWS: tuple[Row, ...] = (
    Row(
        ("_scaled_dot_product_flash_attention_for_cpu.default",),
        kernel("query key value", "out logsumexp", shares_heads=True),
        filled=frozenset("h"),
    ),
    Row(
        ("_scaled_dot_product_flash_attention_for_cpu_backward.default",),
        kernel("grad_out query key value out logsumexp", GRADIENTS, shares_heads=True),
        filled=frozenset("h"),
    ),
    *(
        Row((f"_scaled_dot_product_{name}.default",), rule, filled=frozenset("bh"), kernel=wants)
        for name, rule, wants in (
            (
                "flash_attention",
                kernel(
                    "query key value dropout . debug",
                    f"out logsumexp {'state ' * 6} none",
                ),
                None,
            ),
            (
                "flash_attention_backward",
                kernel(
                    "grad_out query key value out logsumexp state state . . dropout . state state",
                    GRADIENTS,
                ),
                None,
            ),
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
