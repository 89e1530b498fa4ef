"""Hangs, silent corruption and errors that every rank has to hear of."""
