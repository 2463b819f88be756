"""Every process that tests start imports this first. Imports of torch make many objects that stay,
and compilers, too: to look through all of them less often saves a fifth of the time.

With WITHOUT_ROW in the environment what that row of replaced/patches.py says is not replaced: see
test_each_row_is_needed.py.
"""

import gc
import os

gc.set_threshold(100_000, 20, 100)

ROW = os.environ.get("WITHOUT_ROW")


def leave_out():
    from functools import partial
    from types import SimpleNamespace

    from cute_sharding.dtensor.replaced.compiler_patches import CACHE_KEYS
    from cute_sharding.dtensor.replaced.patch import Installed

    def without(stock, instead=lambda *_: None):
        def called(self, patch, *args):
            return (instead if patch.name == ROW else partial(stock, self, patch))(*args)

        return called

    Installed.replace = without(Installed.replace)
    Installed.put = without(Installed.put)
    Installed.note = without(Installed.note, lambda _, undo: undo())
    if CACHE_KEYS.name == ROW:  # an option, which is set
        object.__setattr__(CACHE_KEYS, "owner", lambda: SimpleNamespace(cache_key_tag=""))


if ROW:
    from cute_sharding._imports import when_imported

    when_imported("cute_sharding.dtensor.replaced.patch", leave_out)
