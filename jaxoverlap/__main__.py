import sys

from jaxoverlap.cli import main

sys.exit(main())
