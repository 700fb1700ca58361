"""Saving and loading a run."""
