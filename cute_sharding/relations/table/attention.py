"""Attention, by names: each query reads all keys. Sequence dims and multiplied dims are whole;
batch and heads are free.
"""

from __future__ import annotations

from typing import Any

from cute_sharding.relations.table.kernels import AlignedMask
from cute_sharding.relations.table.names import Rule, Shape, text
from cute_sharding.relations.table.row import Row

# For each argument's name in torch, the dims of that tensor. The op does not read a state (of a
# random generator, or of sequences of several lengths, which we do not have).
DIMS = {
    "query": "b h [s] [e]",
    "key": "b h [t] [e]",
    "value": "b h [t] [f]",
    "grad_out": "b h [s] [f]",
    "out": "b h [s] [f]",
    "logsumexp": "b h [s]",
    "room": "b h [u]",  # statistics, padded to more queries than there are
    "columns": "b h [s] [u]",
    "state": "_",
    "none": "0",
}


def _mask(queries: Shape, mask: Shape) -> str:
    """The dims of a mask, which may lack leading dims and have dims of size 1."""
    names = ["b", "h", "[s]", "[t]"][4 - len(mask) :]
    given = zip(names, mask, queries[4 - len(mask) :])
    return text(["1" if name in "bh" and n == 1 != of else name for name, n, of in given])


def kernel(parameters: str, results: str, *, shares_heads: bool = False) -> Rule:
    """The rule of an attention kernel with these arguments: the tensors in :data:`DIMS`,
    ``dropout`` and ``debug``; ``.`` stands for an argument that does not matter here. Results are
    named the same way; without a mask the mask's gradient is a state.

    There is no signature with dropout, since each device would draw its own mask. Nor is there one
    if several query heads share a key head, except with ``shares_heads``: with heads cut elsewhere,
    queries would meet other keys.
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

    rule.__doc__ = f"``{parameters} -> {' '.join(results.split())}``; batch and heads are free."
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
