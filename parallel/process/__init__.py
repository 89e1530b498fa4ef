"""Processes of this machine: ranks, forks, memory, settings."""
