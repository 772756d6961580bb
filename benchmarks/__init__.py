"""Measurements against peers and limits. Not in the wheel; the tests run only their pure parts."""
