"""Patch 1: what of this project goes into it, and the hooks in ``_view_ops.py``."""

from __future__ import annotations

from pathlib import Path

from upstream.edits import Hook, behind
from upstream.extract import Form, chosen, expanded
from upstream.stack import Patch
from upstream.wrap import formatted

HERE = Path(__file__).parent
MODULE = "torch/distributed/tensor/_ops/_view_propagation.py"
TEST = "test/distributed/tensor/test_view_propagation.py"
VIEW_OPS = "torch/distributed/tensor/_ops/_view_ops.py"

SPECS = ("InputDim", "Split", "Flatten", "Singleton", "Repeat", "Broadcast", "NewDim")

# Sizes are ints: what may also be a symbol elsewhere is answered at once.
ON_INTS = Form(
    calls={
        "is_at_most": "{} <= {}".format,
        "is_multiple": "{} % {} == 0".format,
        "is_same": "{} == {}".format,
        "_is_one": "{} == 1".format,
        "least": "min({}, {})".format,
        "most": "max({}, {})".format,
        "number": lambda value, choices: value,
        "known": str,
        "unknown": str,
        "_varargs": str,
        "strided_shard": "_StridedShard({}, split_factor={})".format,
        "Carried": lambda *fields: f"Carried({', '.join(fields[:2])})",
    },
    names={
        "_SINGLETON": "Singleton()",
        "_BY_NAME": "_READERS",
        "_shard": "Shard",
        "StridedShard": "_StridedShard",
    },
    leave=frozenset(
        {
            "Carried.traced",
            "View.layout",
            "View.output_shape",
            "_Reading.unknown",
        }
    ),
    edits={
        "Deal": [('"tuple[int, ...] | None"', "tuple[int, ...] | None")],
        "Cut": [('"tuple[int, int] | None"', "tuple[int, int] | None")],
        "split_into": [("if not _is_one(n)", "if n != 1")],
        "_place_even": [
            (
                "not is_multiple(source[at], split_factor * parts)",
                "source[at] % (split_factor * parts) != 0",
            )
        ],
        "Carried": [
            (
                "        traced: whether not all blocks are known to be of one size, so that it is "
                "proved for each\n            kind of device. (No graph is traced.)\n",
                "",
            )
        ],
        "carry": [
            (
                """
    The method, and why it is complete, is in docs/how-it-works.md ("The deal").

    Raises:
        Undecided: sizes are symbols, and it depends on a fact that is not known.
""",
                "",
            ),
            (
                "    is_even = True  # all blocks are known to be of one size; kept dims are not "
                "looked at\n",
                "",
            ),
            ("found, is_even = (kept[cut[0]], cut[1]), False", "found = kept[cut[0]], cut[1]"),
            (
                "found, is_even = _place(view, kinds, cut, parts), False",
                "found = _place(view, kinds, cut, parts)",
            ),
            (
                """    if is_even or before is None:
        return Carried(tuple(carried))
    return Carried(tuple(carried), None, _is_traced(view, cuts, mesh))""",
                "    return Carried(tuple(carried))",
            ),
            (
                """    if len(cuts) != len(mesh):
        raise ValueError(f"{len(cuts)} cuts for a mesh of {len(mesh)} dims: give one for each")
""",
                "",
            ),
        ],
        "local_size": [
            (
                """ holds: a block, or what is left.

    The second device begins no later than at the end; the last one finds no more than a block.
    """,
                """ holds. (The second begins no later
    than at the end, and the last finds no more than a block.)
    """,
            )
        ],
        "_carry_nothing": [("single, kinds_of(single)", "single, [(single.sizes, single.target)]")],
        "_place": [("not is_same(factor, smallest) and deal", "deal")],
        "View": [
            (
                '''        """Where an input dim stands in the source.

        Raises:
            ValueError: there is no such dim.
        """
        try:
            return self.source.index(dim)
        except ValueError:
            raise ValueError(
                f"a placement names dim {dim}; the shape {tuple(self.input_shape)} has "
                f"{len(self.input_shape)} dims, counted from 0"
            ) from None
''',
                '''        """Where an input dim stands in the source."""
        return self.source.index(dim)
''',
            ),
            ('        "__dict__",\n', ""),
            ('        "rank",\n', ""),
            ("        rank: int | None = None,\n", ""),
            ("        self.rank = len(target) if rank is None else rank\n", ""),
            (
                """ ``rank`` is the number of target dims that a placement may name: a
    trailing target dim beyond it (the two halves of a complex number) has no name.
""",
                "\n",
            ),
        ],
        "view_of": [
            (
                """
    The DimMap may be ours or torch's (torch.distributed.tensor._ops._view_ops): specs are told
    apart by class name. Input dims""",
                "\n    Input dims",
            ),
            ("        TypeError: the DimMap has a spec that is none.\n", ""),
            ("dim_map: Sequence[Any]) -> View:", "dim_map: DimMap) -> View | None:"),
            (
                "for an input of that shape.\n",
                "for an input of that shape; None if sizes are symbolic.\n",
            ),
            (
                "    reading = _Reading(input_shape)",
                "    if not _are_ints(input_shape):\n        return None\n"
                "    reading = _Reading(input_shape)",
            ),
            (
                "    if 0 in target:",
                "    if not _are_ints((*sizes, *target)):\n        return None\n"
                "    if 0 in target:",
            ),
        ],
        "_BY_NAME": [
            ("dict[str, ", "dict[type[DimSpec], "),
            *((f'"{spec}":', f"{spec}:") for spec in SPECS),
        ],
        "reshape": [
            ("*sizes: int | Sequence[int]", "sizes: Sequence[int]"),
            (
                """    if Size in map(type, shape) or Size in map(type, target):
        return _regrouped(shape, target)
""",
                "",
            ),
            ("_varargs(sizes)", "tuple(sizes)"),
            ("identity(ndim)", "tuple(map(InputDim, range(ndim)))"),
        ],
        "cut_of": [
            (" The one place that says so.", ""),
            ("tuple[int, Any] | None", "Cut"),
            (
                """        f"placement {placement!r} is of a kind that is not known here, "
        f"{type(placement).__name__}: redistribute the tensor to Shard, Replicate or Partial "
        "first, which is left to torch"
""",
                """        f"placement {placement!r} is of a kind that views cannot carry: "
        "redistribute to Shard, Replicate or Partial first"
""",
            ),
        ],
    },
)


def module() -> str:
    """``_view_propagation.py``."""
    return module_in(ON_INTS, symbolic=False)


def module_in(form: Form, *, symbolic: bool) -> str:
    """The module, of sizes that are numbers or also of symbols."""
    template = chosen((HERE / "_view_propagation.py.in").read_text(), symbolic=symbolic)
    return formatted(expanded(template, form).replace("view.rank", "len(view.target)"))


def test() -> str:
    """Its tests, which are PyTorch's in form and have no counterpart here."""
    return formatted((HERE / "test_view_propagation.py.in").read_text())


HOOKS: tuple[Hook, ...] = (
    Hook(VIEW_OPS, "import math\nfrom coll", "import math\nimport os\nfrom coll"),
    behind(
        VIEW_OPS,
        "Shape = tuple[int, ...]\n",
        """
# Whether views go by exact propagation (_view_propagation.py). Read once.
_USE_CUTE_VIEW_PROPAGATION = os.environ.get("USE_CUTE_VIEW_PROPAGATION", "0") == "1"
""",
    ),
    Hook(
        VIEW_OPS,
        "def dim_pad_left(",
        """# It imports the specs above. Inside the functions an import would cost at every call.
from torch.distributed.tensor._ops import _view_propagation


def dim_pad_left(""",
    ),
    Hook(
        VIEW_OPS,
        """    from torch.fx.experimental.symbolic_shapes import (
        free_symbols,
        guard_or_false,
        guard_or_true,
    )

    from_nelem = prod(from_size)
""",
        """    if _USE_CUTE_VIEW_PROPAGATION:
        rule = _view_propagation.view_groups(from_size, normalize_sizes(to_size))
        if rule is not None:
            return rule

    from torch.fx.experimental.symbolic_shapes import (
        free_symbols,
        guard_or_false,
        guard_or_true,
    )

    from_nelem = prod(from_size)
""",
    ),
    Hook(
        VIEW_OPS,
        "        if guard_or_true(s > 1) or i not in target_dims\n",
        """        if guard_or_true(s != 1 if _USE_CUTE_VIEW_PROPAGATION else s > 1)
        or i not in target_dims
""",
    ),
    Hook(
        VIEW_OPS,
        """    rule: DimMap,
    mesh_sizes: Shape,
    strict_view: bool = False,
) -> tuple""",
        """    rule: DimMap,
    mesh_sizes: Shape,
    strict_view: bool = False,
    needs_whole_dims: bool = False,
) -> tuple""",
    ),
    Hook(
        VIEW_OPS,
        """      if the leftmost split size is divisible by the mesh dimension
    \"\"\"
""",
        """      if the leftmost split size is divisible by the mesh dimension

    needs_whole_dims: the local op takes dims away only where their local size is 1
    (squeeze), so they must not be sharded. The rules above never shard them.
    \"\"\"
    if _USE_CUTE_VIEW_PROPAGATION:
        exact = _view_propagation.propagate(
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
    ),
    Hook(
        VIEW_OPS,
        """                mesh.shape,
                strict_view,
            )
""",
        """                mesh.shape,
                strict_view,
                needs_whole_dims=local_op_name is torch.squeeze,
            )
""",
    ),
)

PATCH = Patch(
    name="view-propagation",
    message=(HERE / "message.txt").read_text(),
    files={MODULE: module, TEST: test},
    hooks=HOOKS,
)
