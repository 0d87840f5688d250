"""Timing the norm side by side with others: who runs, how time is taken, what is held to float64, how it is shown.

Uses the package's public function alone, so that this room also times other revisions of meshnorm (``baseline.py``).
"""
