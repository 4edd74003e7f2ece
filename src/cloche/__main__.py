"""`python -m cloche` is `cloche`."""

import sys

from cloche.cli.thin import main

sys.exit(main())
