"""``python -m mha_ext`` is the command line ``mha-ext``."""

import sys

from .cli import main

sys.exit(main())
