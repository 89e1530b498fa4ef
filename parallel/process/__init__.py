"""Processes of this machine: ranks, forks, freed memory, settings of the process."""
