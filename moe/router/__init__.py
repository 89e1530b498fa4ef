"""Who goes where: scores, selection, capacity and balance of one router."""
