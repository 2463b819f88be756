"""Patch 2: the same definitions as in patch 1, with the comparisons of symbolic sizes that patch 1
answers at once.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from upstream.edits import Hook
from upstream.stack import Patch
from upstream.view_propagation.patch import MODULE, ON_INTS, VIEW_OPS, module_in
from upstream.wrap import formatted

HERE = Path(__file__).parent
TEST = "test/distributed/tensor/test_view_propagation_symbolic.py"

COMPARED = ("is_at_most", "is_multiple", "is_same", "least", "most")

# What patch 1 says of a view, and this patch does not.
_OF_INTS = "; None if sizes are symbolic"

ON_SYMINTS = replace(
    ON_INTS,
    conditional=None,
    calls={
        **{name: form for name, form in ON_INTS.calls.items() if name not in COMPARED},
        "number": lambda value, choices: f"int({value})",
        # A placement has a number: a guard where it was a symbol.
        "strided_shard": "_StridedShard({}, split_factor=int({}))".format,
        "split_factor_of": "{}.split_factor".format,
    },
    docs={**ON_INTS.docs, "view_of": ON_INTS.docs["view_of"].replace(_OF_INTS, "")},
    edits={
        **ON_INTS.edits,
        "carry": [
            *ON_INTS.edits["carry"],
            ("elif not view.elements:", "elif is_at_most(view.elements, 0):"),
        ],
        "_place": [],
        "_place_even": [],
        "View": [
            *ON_INTS.edits["View"],
            (
                "if prod(sizes) != self.elements:",
                "if type(self.elements) is int and prod(sizes) != self.elements:",
            ),
        ],
        "view_of": [
            ("dim_map: Sequence[Any]) -> View:", "dim_map: DimMap) -> View:"),
            ("    if 0 in target:", "    if is_same(prod(target), 0):"),
        ],
        "_Reading": [
            (
                "if n and group != n and group % n == 0:",
                "if is_same(group, 2 * n) and not is_same(n, 0):",
            ),
            ("self._fresh(group // n)", "self._fresh(2)"),
        ],
    },
)


def module() -> str:
    """``_view_propagation.py``, for symbolic sizes as well."""
    return module_in(ON_SYMINTS, symbolic=True)


def test() -> str:
    """Its tests."""
    return formatted((HERE / "test_view_propagation_symbolic.py.in").read_text())


HOOKS: tuple[Hook, ...] = (
    Hook(
        VIEW_OPS,
        """        exact = _view_propagation.propagate(
            input_src_placements,
            global_input_shape,
            rule,
            mesh_sizes,
            strict_view,
            needs_whole_dims,
        )
        if exact is not None:
            return exact
""",
        """        return _view_propagation.propagate(
            input_src_placements,
            global_input_shape,
            rule,
            mesh_sizes,
            strict_view,
            needs_whole_dims,
        )
""",
    ),
)

PATCH = Patch(
    name="symbolic-sizes",
    message=(HERE / "message.txt").read_text(),
    files={MODULE: module, TEST: test},
    hooks=HOOKS,
)
