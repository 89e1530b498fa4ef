"""The function of each verb. Each imports what it needs, so that wrong input is refused before anything heavy is imported."""
