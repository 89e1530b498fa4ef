"""Hangs, silent corruption, and errors that are raised on every rank."""
