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
        "to_sizes": str,
        "to_symints": str,
        "_varargs": str,
        "strided_shard": "_StridedShard({}, split_factor={})".format,
        "split_factor_of": "{}.split_factor".format,
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
            "View.of_runs",
            "View.of_sizes",
            "View.output_shape",
            "_Reading.unknown",
        }
    ),
    docs={
        "Carried": """
The cuts of the output, one a mesh dim; or the first mesh dim that cannot be carried, and the cuts
of those before it.

Attributes:
    cuts: of the mesh dims that are carried.
    blocked: the first mesh dim that is not, if there is one.
""",
        "carry": """
The cuts of the view's output that hold, on every device, exactly the elements that ``cuts`` of its
input hold.

Args:
    view: the view.
    cuts: one for each mesh dim, on the view's input dims.
    mesh: the mesh's sizes.
""",
        "local_size": """
How many of ``n`` rows device ``device`` of ``parts`` holds. (The second begins no later than at the
end, and the last finds no more than a block.)
""",
        "View": """
A view op on a tensor of a given shape, as *source dims* read in order under a target shape.

``source`` lists the input's dims in the order in which the output reads them, with None for a fresh
dim that the output repeats or broadcasts over; ``sizes`` are their sizes and ``target`` is the
output shape, so ``prod(sizes) == prod(target)``. A permutation reorders the source, a reshape
regroups it, and broadcasting adds to it: there is nothing else to a view op.

``kept`` maps each input dim that the view leaves whole to its output dim, and ``home`` each one
that it repeats, broadcasts or takes apart in place to the output dim it becomes: there the local op
makes the local shape by itself, also of nothing. ``elements`` is how many there are in the output.

Raises:
    ValueError: ``sizes`` and ``target`` have different numbers of elements.
""",
        "View.position": "Where an input dim stands in the source.",
        "view_of": """
The view that a DimMap describes, for an input of that shape; None if sizes are symbolic.

Input dims that the DimMap leaves out are of size 1 (a view cannot drop elements) and stand first in
the source.

Raises:
    ValueError: it does not fit the shape.
""",
        "cut_of": """
What a placement does to the tensor: the dim that it cuts and the split factor, which may be a
SymInt; None where it cuts nothing.

Raises:
    RuntimeError: a kind of placement that is not known: it is not taken for Replicate.
""",
    },
    statements={
        "carry": [
            ("if len(cuts) != len(mesh):", ""),
            ("is_even = True", ""),
            ("if is_even or before is None:", ""),
        ],
        "View.__init__": [("self.rank =", ""), ("self.repeats =", "")],
        "View.position": [("try:", "return self.source.index(dim)")],
        "reshape": [("if Size in map(type, shape)", "")],
        "cut_of": [
            (
                "raise RuntimeError(",
                """raise RuntimeError(
    f"placement {placement!r} is of a kind that views cannot carry: "
    "redistribute to Shard, Replicate or Partial first"
)""",
            )
        ],
    },
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
        "carry": [
            ("found, is_even = (kept[cut[0]], cut[1]), False", "found = kept[cut[0]], cut[1]"),
            (
                "found, is_even = _place(view, kinds, cut, parts), False",
                "found = _place(view, kinds, cut, parts)",
            ),
            (
                "    return Carried(tuple(carried), None, _is_traced(view, cuts, mesh))",
                "    return Carried(tuple(carried))",
            ),
        ],
        "_carry_nothing": [("single, kinds_of(single)", "single, [(single.sizes, single.target)]")],
        "_place": [("not is_same(factor, smallest) and deal", "deal")],
        "View": [
            ('        "__dict__",\n', ""),
            ('        "rank",\n', ""),
            ("        rank: int | None = None,\n", ""),
        ],
        "view_of": [
            ("dim_map: Sequence[Any]) -> View:", "dim_map: DimMap) -> View | None:"),
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
            ("_varargs(sizes)", "tuple(sizes)"),
            ("identity(ndim)", "tuple(map(InputDim, range(ndim)))"),
        ],
        "cut_of": [("tuple[int, Any] | None", "Cut")],
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
