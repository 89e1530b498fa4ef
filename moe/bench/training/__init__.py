"""Measurements of training steps and their memory."""
