"""Checking every layout against float64: ranks to run on, cases to run, and the collectives that ran."""
