"""`python -m tests.campaigns`: faults put into runs that train."""

import sys

from tests.campaigns.faults import main
from tests.support.command import carry_out

sys.exit(carry_out(main, "python -m tests.campaigns", sys.argv[1:]))
