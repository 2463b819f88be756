import sys

from cute_sharding.cli import main

sys.exit(main())
