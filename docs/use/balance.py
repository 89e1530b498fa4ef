"""Balance losses for `router.balance_loss`. Copy this file into the folder in which you train.

    moe train switch_tiny --router.balance_loss balance:overload --router.balance_weight 0.01
    moe verify --recipe mine.yaml            mine.yaml: extends: switch_tiny, router: {balance_loss: "balance:overload"}

Each function gets load [groups, experts], the experts' shares of the choices of a group of tokens, and probs, their mean router
probabilities, which have a gradient. It returns a loss for each group.
"""


def overload(load, probs):
    """Push only experts above their fair share, in proportion to what is above it. 0 for even loads."""
    return load.shape[1] * ((load * load.shape[1] - 1).clamp(min=0) * probs).sum(1)


def signs(load, probs):
    """Push each expert equally hard, down above its fair share and up below it, as the selection bias of DeepSeek-V3 does."""
    return ((load * load.shape[1] - 1).sign() * probs).sum(1)


def entropy(load, probs):
    """Divergence of the mean probabilities from even ones, in nats. It does not read the choices."""
    return (probs * (probs.clamp(min=1e-9) * probs.shape[1]).log()).sum(1)
