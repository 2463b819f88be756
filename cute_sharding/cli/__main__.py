"""Runs ``python -m cute_sharding.cli``, which is the same as ``python -m cute_sharding``."""

import sys

from cute_sharding.cli import main

sys.exit(main())
