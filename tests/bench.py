"""nanoCAL against what people would use instead; --plan: what training will cost (tests/plan.py)."""

import sys

from tests import plan

if __name__ == "__main__":
    try:
        plan.main([flag for flag in sys.argv[1:] if flag != "--plan"])
    except (ValueError, OSError) as error:
        sys.exit(f"bench.py: {error}")
