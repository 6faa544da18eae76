"""`python -m blocktrain` is `blocktrain`."""

import sys

from blocktrain.cli.main import main

sys.exit(main())
