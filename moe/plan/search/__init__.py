"""Searches for parallel plans with the methods of Alpa and FlexFlow."""
