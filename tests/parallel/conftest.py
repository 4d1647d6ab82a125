"""Makes the helpers beside this file, and the NumPy device of the scheduler's tests, importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "scheduler"))
