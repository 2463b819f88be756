"""Every process that tests start imports this first. Imports of torch make many objects that stay,
and compilers, too: to look through all of them less often saves a fifth of the time.
"""

import gc

gc.set_threshold(100_000, 20, 100)
