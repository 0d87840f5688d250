"""Swapping the norms of a model for ours: ``meshnorm.convert`` and ``meshnorm.revert``."""
