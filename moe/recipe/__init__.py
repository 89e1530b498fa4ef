"""What a user may say, and where each value came from; nothing here needs torch."""
