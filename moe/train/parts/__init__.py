"""Parts of the training loop: forward and backward passes, a step's numbers, learning rate, rebalancing, profiles, callbacks."""
