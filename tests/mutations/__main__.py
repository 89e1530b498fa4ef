"""`python -m tests.mutations`: puts each fault into the running code, and prints whether `moe verify` finds it."""

import sys

from tests.mutations.run import main
from tests.support.command import carry_out

sys.exit(carry_out(main, "python -m tests.mutations", sys.argv[1:]))
