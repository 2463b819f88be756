"""Patch 3: what of redistribution goes into it, and the hook in ``_redistribute.py``."""

from __future__ import annotations

from pathlib import Path

from upstream.edits import Hook, behind
from upstream.extract import Form, expanded
from upstream.stack import Patch
from upstream.wrap import formatted

HERE = Path(__file__).parent
MODULE = "torch/distributed/tensor/_exchange.py"
TEST = "test/distributed/tensor/test_exchange_redistribution.py"
REDISTRIBUTE = "torch/distributed/tensor/_redistribute.py"

# The smallest core: one exchange, in which a device sends itself what it keeps, replicas of a row
# do not share its sending, and every buffer is packed.
FORM = Form(
    leave=frozenset({"Transfer.peak_elements"}),
    docs={
        "Transfer": """
One device's part in a collective: strided copies into a send buffer, its splits, and copies out of
the receive buffer.
""",
        "Exchange.message": (
            "What ``sender`` has and ``receiver`` needs: x on the one, y on the other."
        ),
        "Exchange.transfer": """
The part of ``device`` in an all-to-all among ``peers``, in their order; to itself it sends what it
keeps.
""",
        "one_by_one": "Messages one after the other in a flat buffer.",
        "checked": "The local tensor as it is packed, if it is of the shape that the spec says.",
        "unpack": "The target, from what was received.",
        "write": "Between contiguous tensors.",
    },
    statements={
        "Step.chain": [
            (
                "return chain_of(",
                "return tuple([(f, self.mesh[m], device[m]) for m, f in chains[dim]])",
            ),
        ],
        "Exchange.message": [
            ("if not self.meet(", ""),
            ("return None", "return []"),
            ("return self._share(", "return [from_runs(box) for box in product(*runs)]"),
        ],
        "Exchange.transfer": [
            ("own = self.own(", ""),
            ("sides = ", ""),
            ("whole = ", ""),
            ("pack_free, unpack_free = ", ""),
            ("own_copies: ", ""),
            (
                "sending, receiving = whole",
                """sending = one_by_one([self.message(device, peer) for peer in peers])
receiving = one_by_one(
    [[copy.flipped for copy in self.message(peer, device)] for peer in peers]
)""",
            ),
            ("if not (pack_free or unpack_free):", ""),
        ],
        "transfer_of": [
            ("if isinstance(step, Exchange):", ""),
            ("return step.transfer(", "return step.transfer(device, peers(mesh, step.dims, rank))"),
        ],
        "checked": [
            (
                "if symints.is_symbolic(",
                "if tuple(local.shape) == part.source_shape:\n    return local.contiguous()",
            ),
            ("if local.numel() == 0", ""),
        ],
        "pack": [
            (
                "if part.packs is None:",
                """if not part.packs:
    # Of the tensor all the same: or a compiler takes the exchange of a gradient, of
    # which nothing is sent, for part of the forward pass.
    return local.view(-1)[:0]""",
            ),
            ("if fills(", ""),
        ],
        "unpack": [
            (
                "if part.unpacks is None:",
                """if not part.unpacks:
    # Of the buffer all the same: or a compiler leaves the exchange out.
    return received.view(part.target_shape)
target = received.new_empty(part.target_shape)""",
            ),
            ("if target is None and ", ""),
            ("if target is None:", ""),
            ("if part.own:", ""),
            ("for copy in part.own:", ""),
        ],
        "_strided": [
            ("lying = ", "stride = [flat(step, strides) for step in steps]"),
            ("return tensor.as_strided(", "return tensor.as_strided(sizes, stride, offset)"),
        ],
        "places": [
            (
                "found = next(",
                """with _disable_current_modes():
    lists = mesh._layout.remap_to_tensor(mesh._rank_map).flatten(1).tolist()
found = next(ranks for ranks in lists if rank in ranks)""",
            ),
            ("if found is None:", ""),
        ],
    },
    edits={
        "Transfer": [
            (
                "packs: tuple[Copy, ...] | None\n    own: tuple[Copy, ...]\n    unpacks: "
                "tuple[Copy, ...] | None",
                "packs: tuple[Copy, ...]\n    unpacks: tuple[Copy, ...]",
            ),
        ],
        "Exchange.message": [
            (
                "receiver: Device, turn: int = 0) -> Message | None:",
                "receiver: Device) -> list[Copy]:",
            ),
        ],
        "Exchange.transfer": [
            ("Sequence[Device | None], turn: int = 0)", "Sequence[Device])"),
            ("None if pack_free else ", ""),
            ("None if unpack_free else ", ""),
            ("        tuple(folded(own_copies)),\n", ""),
        ],
        "one_by_one": [
            ("Sequence[Message | None], *, into: bool)", "Sequence[Sequence[Copy]])"),
            ("message.boxes if message is not None else ()", "message"),
            ("copy.flipped if into else copy", "copy"),
        ],
        "transfer_of": [
            (
                "mesh: Any, rank: int, gathers: bool = False, turn: int = 0)",
                "mesh: Any, rank: int)",
            ),
            ("(step: Step,", "(step: Exchange,"),
            (
                "device, among = place(mesh, rank), peers(mesh, step.mesh_dims, rank)",
                "device = places(mesh, rank)[rank]",
            ),
        ],
        "checked": [("raise OtherShape(", "raise RuntimeError(")],
        "unpack": [
            (
                "part: Transfer, received: torch.Tensor, local: torch.Tensor, "
                "target: torch.Tensor | None = None",
                "part: Transfer, received: torch.Tensor",
            ),
        ],
        "write": [
            (", *, add: bool = False)", ")"),
            (
                "    _ = into.add_(read(x, copy)) if add else into.copy_(read(x, copy))",
                "    into.copy_(_strided(x, copy.sizes, copy.x, copy.dx))",
            ),
        ],
        "_strided": [
            (
                "stride, offset = lying(strides, start, steps)",
                "offset = tensor.storage_offset() + flat(start, strides)",
            ),
            ("strides, rest = tensor.stride(), len(start)", "strides = tensor.stride()"),
        ],
        "peers": [("place(mesh, rank), [", "places(mesh, rank)[rank], [")],
    },
)


def module() -> str:
    """``_exchange.py``."""
    text = expanded((HERE / "_exchange.py.in").read_text(), FORM)
    return formatted(text.replace("mesh: Any", "mesh: DeviceMesh"))


def test() -> str:
    """Its tests, which are PyTorch's in form and have no counterpart here."""
    return formatted((HERE / "test_exchange_redistribution.py.in").read_text())


HOOKS: tuple[Hook, ...] = (
    Hook(REDISTRIBUTE, "import math\nimport weakref\n", "import math\nimport os\nimport weakref\n"),
    behind(
        REDISTRIBUTE,
        "_DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION: bool = False\n",
        """
# Whether redistribution goes by one exchange where steps mesh dim by mesh dim would
# receive elements twice, or are not right (_exchange.py). Read once.
_USE_CUTE_REDISTRIBUTION = os.environ.get("USE_CUTE_REDISTRIBUTION", "0") == "1"
""",
    ),
    behind(
        REDISTRIBUTE,
        """        # which should be an empty tensor
        return local_tensor

""",
        """    if _USE_CUTE_REDISTRIBUTION:
        from torch.distributed.tensor._exchange import redistribute_by_exchange

        exchanged = redistribute_by_exchange(
            local_tensor, current_spec, target_spec, is_explicit=is_explicit
        )
        if exchanged is not None:
            if not async_op and isinstance(exchanged, funcol.AsyncCollectiveTensor):
                exchanged = exchanged.wait()
            return exchanged

""",
    ),
)

PATCH = Patch(
    name="exchange-redistribution",
    message=(HERE / "message.txt").read_text(),
    files={MODULE: module, TEST: test},
    hooks=HOOKS,
)
