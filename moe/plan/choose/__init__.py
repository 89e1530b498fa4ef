"""All plans, and the choice among them."""
