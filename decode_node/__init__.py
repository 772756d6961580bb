"""The decode node."""
