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
# do not share its sending, and every buffer is packed. The rows and the copies are the package's.
FORM = Form(names={"remembered": "lru_cache(maxsize=1 << 12)"})


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
