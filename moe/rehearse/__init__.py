"""A recipe walked through by one rank of a world that is not there."""
