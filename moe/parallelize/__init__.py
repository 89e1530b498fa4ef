"""Where model and mesh meet: the only folder that knows both."""
