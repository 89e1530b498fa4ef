"""`python -m tests.campaigns`: fault injection into training runs."""

import sys

from tests.campaigns.faults import main
from tests.support.command import carry_out

sys.exit(carry_out(main, "python -m tests.campaigns", sys.argv[1:]))
