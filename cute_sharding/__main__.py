import sys

from cute_sharding.tools.cli import main

sys.exit(main())
