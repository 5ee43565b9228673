"""The command: ``python -m experiments.gpu --help``."""

import sys

from experiments.gpu.processes import main

sys.exit(main())
